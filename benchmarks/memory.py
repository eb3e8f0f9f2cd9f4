"""Compares predicted peak memory with the measured peak of a new process.

python benchmarks/memory.py --algorithm ppo --size smollm2 --load-in-4bit --write memory.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.work import Work, add_flags, add_update_flags, choose_device, make_models, parse_update, work_of
from benchmarks.worker import Worker
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json

UPDATES = 2


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before importing torch, so that --help and errors are fast
    device = choose_device(arguments.device)
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    screen = Screen()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = work_of(arguments, folder=folder, device=device, updates=UPDATES)
        make_models(work)
        found = compare(work)
    show(found, screen)
    if arguments.write:
        write_json(arguments.write, found)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the predicted peak memory with that of two updates.")
    add_flags(parser)
    add_update_flags(parser, ppo_epochs=2)
    return parse_update(parser, argv)


def compare(work: Work) -> dict[str, Any]:
    """Measure the worker, then predict in this process. The worker runs alone first, so that all memory of the machine
    is available to it."""
    from benchmarks import ours
    from rlhf.checkpoints.run_record import environment
    from rlhf.setup.fit import estimator_of

    with Worker("ours", work.write(Path(work.folder, "work.json"))) as worker:
        machine = worker.go()["machine"]
        measured = [worker.go()["memory"] for _ in range(work.updates)][-1]["above_imports"]
    trainer = ours.build(work)
    predicted = estimator_of(trainer)(trainer.config)
    return {
        **environment(),
        "settings": work.settings,
        "machine": machine,
        "predicted": predicted.peak,
        "measured": measured,
        "ratio": predicted.peak / measured,
        "parts": predicted.parts,
    }


# --- console ---------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any], screen) -> None:
    """Print the peak with its parts, then the machine."""
    from benchmarks.machine import machine_line

    settings = found["settings"]
    how = "4-bit LoRA" if settings["load_in_4bit"] else "LoRA" if settings["lora"] else "full training"
    title = f"{settings['algorithm'].upper()}, {settings['size']}, {how}, {settings['device']}, {settings['dtype']}"
    rows = [["peak above imports", mib(found["predicted"]), mib(found["measured"]), f"{found['ratio']:.2f}"]]
    rows += [[f"  {name}", mib(size), "", ""] for name, size in found["parts"].items() if size]
    screen.table(title, ["", "predicted", "measured", "ratio"], rows, lines=False)
    screen.facts([("machine", machine_line(found["machine"])), ("torch", found["versions"]["torch"])])


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


if __name__ == "__main__":
    run_command(main)

"""Compares predicted peak memory with the measured peak of a new process, and the tensors of each phase.

python benchmarks/memory.py --algorithm ppo --size smollm2 --load-in-4bit --json memory.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.work import Work, add_flags, add_update_flags, choose_device, make_models, parse_update, work_of
from benchmarks.worker import Worker
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json

UPDATES = 2
# method of a part of the trainer -> the phases of the prediction that it contains
METHODS = {
    "collector.collect": ("rollout", "log-probs"),
    "collector.score": ("scoring",),
    "learner.step": ("backward pass", "optimizer step"),
}


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
    if arguments.json:
        write_json(arguments.json, found)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the predicted peak memory with that of two updates.")
    add_flags(parser)
    add_update_flags(parser, ppo_epochs=2)
    return parse_update(parser, argv)


def compare(work: Work) -> dict[str, Any]:
    """Measure the worker, then predict and measure the phases in this process. The worker runs alone first, so that
    all memory of the machine is available to it."""
    from rlhf.checkpoints.run_record import environment

    with Worker("ours", work.write(Path(work.folder, "work.json"))) as worker:
        machine = worker.go()["machine"]
        measured = [worker.go()["memory"] for _ in range(work.updates)][-1]["above_imports"]
    predicted, tensors = predict_and_measure(work)
    return {
        **environment(),
        "settings": work.settings,
        "machine": machine,
        "predicted": predicted.peak,
        "measured": measured,
        "ratio": predicted.peak / measured,
        "phase": predicted.largest.name,
        "parts": {**predicted.held, **predicted.largest.parts},
        "tensors": {
            method: {"predicted": max(tensors_of(phase) for phase in predicted.phases if phase.name in names),
                     "measured": tensors[method]}
            for method, names in METHODS.items()
        },
    }  # fmt: skip


def tensors_of(phase) -> int:
    """Return the bytes of the tensors that a phase allocates."""
    from rlhf.setup.peak_memory import CACHED_FORWARD, GAPS_LEFT

    # not tensors; allocated before the phase starts
    excluded = {GAPS_LEFT, *([CACHED_FORWARD] if phase.name == "scoring" else [])}
    return sum(size for name, size in phase.parts.items() if name not in excluded)


def predict_and_measure(work: Work) -> tuple[Any, dict[str, int]]:
    """Return the prediction for a trainer, and the peak tensor memory of each method in its second update."""
    from benchmarks import ours

    trainer = ours.build(work)
    predicted = estimate(trainer)
    trainer.update_step(1)  # allocates the optimizer's moments
    return predicted, tensors_in(trainer, METHODS, lambda: trainer.update_step(2))


def estimate(trainer):
    """Return the predicted memory of a trainer's updates, without evaluations."""
    from rlhf.rewards.build import find_rewards, make_rewards
    from rlhf.setup.memory import forecast

    device = trainer.accelerator.device
    _, judge = make_rewards(trainer.config, find_rewards(trainer.config), trainer.processing_class, device)
    return forecast(
        trainer.config,
        trainer.updates,
        device,
        policy=trainer.actor.policy,
        reward_model=judge.model,
        tokenizer=trainer.processing_class,
        train=trainer.train_prompts,
        evaluation=[],
    )


def tensors_in(trainer, methods: Iterable[str], run: Callable[[], Any]) -> dict[str, int]:
    """Return the peak tensor memory in bytes of each of `methods` (PART.METHOD) during `run`, minus that before."""
    from benchmarks.machine import tensor_peak

    peaks, device = dict.fromkeys(methods, 0), trainer.accelerator.device.type

    def measured(name: str, original: Callable) -> Callable:
        def method(*arguments, **named):
            result, size = tensor_peak(device, lambda: original(*arguments, **named))
            peaks[name] = max(peaks[name], size)
            return result

        return method

    with ExitStack() as stack:
        for name in peaks:
            part, method = name.split(".")
            owner = getattr(trainer, part)
            stack.enter_context(patch.object(owner, method, measured(name, getattr(owner, method))))
        run()
    return peaks


# --- console ---------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any], screen) -> None:
    """Print the peak with its parts, then the phases, then the machine."""
    from benchmarks.machine import machine_line

    settings = found["settings"]
    how = "4-bit LoRA" if settings["load_in_4bit"] else "LoRA" if settings["lora"] else "full training"
    title = f"{settings['algorithm'].upper()}, {settings['size']}, {how}, {settings['device']}, {settings['dtype']}"
    rows = [["peak above imports", mib(found["predicted"]), mib(found["measured"]), f"{found['ratio']:.2f}"]]
    rows += [[f"  {name}", mib(size), "", ""] for name, size in found["parts"].items() if size]
    for name, sizes in found["tensors"].items():
        share = f"{sizes['predicted'] / sizes['measured']:.2f}"
        rows.append([f"tensors in {name}", mib(sizes["predicted"]), mib(sizes["measured"]), share])
    screen.table(title, ["", "predicted", "measured", "ratio"], rows, lines=False)
    screen.facts([("machine", machine_line(found["machine"])), ("torch", found["versions"]["torch"])])


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


if __name__ == "__main__":
    run_command(main)

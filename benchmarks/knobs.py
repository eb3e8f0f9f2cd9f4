"""Trains a demo once per knob and seed, and prints how each knob changes the result.

python benchmarks/knobs.py --recipe demo-checker --folder knob_runs

Every variant trains on the same number of episodes, those of dynamic sampling included. --keep-pass-rate samples more
before the run. The change is that of the last evaluation's score, over seeds: the run with the knob minus the run
without it. The settings of PPO's critic, alone and together:

python benchmarks/knobs.py --recipe demo --critics "all four" --seeds 42 123 777 1 2 --episodes 4800
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy import special, stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.demo_runs import SEEDS, DemoRun, figures, run_all
from rlhf.config import parse_cli
from rlhf.settings.recipes import DEMOS
from rlhf.trainer.warmup import MEASURE
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
        "separate critic": "--critic separate",
        "critic from reward model": "--critic reward-model",
    },
    "grpo": {"dynamic sampling 2": "--dynamic-sampling 2"},
    "rloo": {"dynamic sampling 2": "--dynamic-sampling 2"},
}
ONE_DEMO = {"critic from reward model": "demo", "keep pass rate 0.2 to 0.8": "demo-checker"}  # knob -> its demo
# {rate}: 10 times the recipe's learning rate; {layout}: prompts and completions per prompt of the recipe's GRPO
CRITICS = {
    "critic rate x10": "--critic-learning-rate {rate}",
    "critic lambda 1": "--critic-lam 1",
    "warm-up, rate x10": "--critic-learning-rate {rate} --critic-warmup 8 --critic-warmup-patience 2",
    "shared prompts": "{layout}",
    "all four": "--critic-learning-rate {rate} --critic-lam 1 --critic-warmup 8 --critic-warmup-patience 2 {layout}",
}
CRITICS["all four, separate critic"] = CRITICS["all four"] + " --critic separate"


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    quiet_libraries()
    screen = Screen()
    knobs = all_knobs(arguments.algorithms)
    if arguments.critics:
        of_ppo = critic_knobs(arguments.recipe, arguments.critics)
        knobs = {name: of_ppo if name == "ppo" else {} for name in arguments.algorithms}
    length = ("--episodes", str(arguments.episodes), *arguments.more)
    runs = knob_runs(arguments.recipe, knobs, arguments.seeds, length)
    root = arguments.folder / arguments.recipe
    run_all(runs, arguments.recipe, root, arguments.at_once, screen.say)
    show(runs, root, screen)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", choices=DEMOS, default="demo-checker", help="the demo (demo-checker)")
    parser.add_argument("--folder", type=Path, default=Path("knob_runs"), help="folder of the runs (knob_runs)")
    parser.add_argument("--algorithms", nargs="+", choices=list(ONLY), default=["ppo", "grpo"], help="ppo grpo")
    parser.add_argument("--critics", nargs="+", choices=CRITICS, help="only these settings of PPO's critic")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds (42 123 777)")
    parser.add_argument("--episodes", type=int, default=3200, help="length of each run (3200)")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time, with one thread each (2)")
    parser.add_argument("more", nargs="*", help="after --: flags for every training command")
    return parser.parse_args(argv)


def all_knobs(algorithms: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the flags of every setting that is off by default: algorithm -> name of the knob -> flags."""
    return {name: {**FOR_ALL, **ONLY[name]} for name in algorithms}


def critic_knobs(recipe: str, names: Sequence[str]) -> dict[str, str]:
    """Return the flags of these settings of PPO's critic, by name."""
    rate = 10 * parse_cli(["--recipe", recipe], "ppo").optimizer.learning_rate
    shared = parse_cli(["--recipe", recipe], "grpo").batch
    layout = f"--batch-size {shared.batch_size} --K {shared.K}"
    return {name: CRITICS[name].format(rate=rate, layout=layout) for name in names}


def knob_runs(
    recipe: str, knobs: dict[str, dict[str, str]], seeds: Sequence[int], length: tuple[str, ...]
) -> list[DemoRun]:
    """Return the training commands, all seeds of a variant together. `length` has the flags of every command."""
    return [
        DemoRun(algorithm, seed, name, (*words.split(), *length))
        for algorithm, variants in knobs.items()
        for name, words in {NONE: "", **variants}.items()
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


def visible(with_knob: Sequence[float], without: Sequence[float]) -> float:
    """Return the true mean change whose interval excludes 0 in 80% of comparisons with as many seeds."""
    changes = np.subtract(with_knob, without)
    freedom = len(changes) - 1
    return float(special.nctdtrinc(freedom, 0.2, stats.t.ppf(0.975, freedom)) * stats.sem(changes))


def show(runs: list[DemoRun], root: Path, screen: Screen) -> None:
    """Print one row per algorithm and knob: mean rise, change by the knob, difference to GRPO if it ran too, explained
    variance, KL and CPU time. The last figure of a change is the smallest that would be seen."""
    variants: dict[tuple[str, str], list[DemoRun]] = {}
    for run in runs:
        variants.setdefault((run.algorithm, run.name), []).append(run)
    rows = []
    for (algorithm, name), seeds in variants.items():
        found = [figures(run, root) for run in seeds]
        rises = [one["score_after"] - one["score_before"] for one in found]
        others = [(algorithm, NONE), ("grpo", NONE)]
        against = [
            _difference(found, [figures(run, root) for run in variants[other]])
            if other in variants and other != (algorithm, name)
            else ""
            for other in others
        ]
        explained = [value for run in seeds if (value := explained_variance(run, root)) is not None]
        rows.append(
            [algorithm.upper(), name, f"{fmean(rises):+.3f}", *against,
             f"{fmean(explained):.2f}" if explained else "", f"{fmean(one['kl_after'] for one in found):.2f}",
             f"{fmean(one['cpu_seconds'] for one in found):.0f}"]
        )  # fmt: skip
    columns = ["algorithm", "knob", "mean rise", "change by the knob", "minus GRPO", "EV", "KL, nats", "CPU s"]
    screen.say(f"evaluation score of {root.name}: changes with 95% intervals over seeds, and the smallest visible one")
    screen.columns([columns, *rows])


def _difference(found: list[dict], others: list[dict]) -> str:
    after, without = ([one["score_after"] for one in each] for each in (found, others))
    by = change(after, without)
    return f"{by.value:+.3f} ({by.low:+.3f} to {by.high:+.3f}), {visible(after, without):.3f}"


def explained_variance(run: DemoRun, root: Path) -> float | None:
    """Return the mean explained variance of a run's second half; None without a critic."""
    lines = (run.folder(root) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [line[MEASURE] for line in map(json.loads, lines) if MEASURE in line]
    return fmean(values[len(values) // 2 :]) if values else None


if __name__ == "__main__":
    run_command(main)

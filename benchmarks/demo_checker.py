"""Trains demo-checker with every algorithm and seed, with and without exchanged scores; prints the table, draws it.

python benchmarks/demo_checker.py --folder checker_runs --picture pictures/demo_checker.png

Finished runs in the folder are kept. Two runs at a time take about 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.demo_runs import SEEDS, DemoRun, figures, run_all
from benchmarks.scan_against_rise import means_by_topic
from rlhf.algorithms.table import ALGORITHMS
from rlhf.analysis.curves import read_scalars, running_mean
from rlhf.reports.plot_style import line_styles_of, new_figure, save_picture, style
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import run_command

CONTROLS = {"exact match": "none", "exchanged scores": "shuffled"}  # name of the runs -> --control
NORMAL, CONTROL = CONTROLS
EVAL = "exact_match"


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    quiet_libraries()
    screen = Screen()
    runs = checker_runs(arguments.seeds)
    run_all(runs, "demo-checker", arguments.folder, arguments.at_once, screen.say)
    show(runs, arguments.folder, screen)
    if arguments.picture is not None:
        draw(runs, arguments.folder, arguments.picture)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("checker_runs"), help="folder of the runs (checker_runs)")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds (42 123 777)")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time, with one thread each (2)")
    parser.add_argument("--picture", type=Path, help="draw the results into this file")
    return parser.parse_args(argv)


def checker_runs(seeds: list[int]) -> list[DemoRun]:
    """Return the training commands: every algorithm and seed, first with the true scores, then the controls."""
    return [
        DemoRun(algorithm, seed, name, ("--control", control, "--eval-func", EVAL))
        for name, control in CONTROLS.items()
        for algorithm in ALGORITHMS
        for seed in seeds
    ]


def rise(run: DemoRun, root: Path) -> tuple[float, float, float, float, float]:
    """Return exact match before and after, and the mean, low and high end of the paired rise: shares from 0 to 1."""
    found = figures(run, root)
    before, after = found[f"eval/{EVAL}_before"], found[f"eval/{EVAL}_after"]
    return before, after, after - before, *found[f"eval/{EVAL}_rise_interval"]


def show(runs: list[DemoRun], root: Path, screen: Screen) -> None:
    """Print one row per run: exact match in percent, the rise in points."""
    rows = []
    for run in runs:
        before, after, mean, low, high = (100 * value for value in rise(run, root))
        kl = figures(run, root)["kl_after"]
        rows.append(
            [run.name, run.algorithm.upper(), str(run.seed), f"{before:.1f}", f"{after:.1f}", f"{mean:+.1f}",
             f"{low:+.1f} to {high:+.1f}", f"{kl:.2f}"]
        )  # fmt: skip
    columns = ["reward", "algorithm", "seed", "before, %", "after, %", "rise, points", "95% interval", "KL, nats"]
    prompts = figures(runs[0], root)["prompts"]
    screen.table(f"exact match on {prompts} held-out questions", columns, rows, lines=False)


# --- picture ---------------------------------------------------------------------------------------------------------


def draw(runs: list[DemoRun], root: Path, file: Path) -> None:
    """Draw the reward during training, and the exact match of each family and level before and after."""
    with style():
        figure = new_figure(11, 6)
        left, right = figure.subplots(1, 2, width_ratios=[6, 5])
        draw_curves(left, runs, root)
        draw_cells(right, [run for run in runs if run.name == NORMAL], root)
        figure.suptitle("demo-checker: exact match, PPO, GRPO and RLOO")
    save_picture(figure, file)


def draw_curves(axes, runs: list[DemoRun], root: Path) -> None:
    """Draw the mean training reward of each run, smoothed over 5 updates."""
    for run in runs:
        curve = read_scalars(run.folder(root) / "logs")[0]["rewards/mean"]
        normal, first = run.name == NORMAL, run.seed == runs[0].seed
        label = f"{run.algorithm.upper()}{'' if normal else ', scores exchanged'}" if first else None
        axes.plot(
            curve.updates * 128,
            running_mean(curve.updates, curve.values, 5),
            color=line_styles_of([run.algorithm])[run.algorithm].colour,
            lw=1.6,
            ls="-" if normal else ":",
            label=label,
        )
    axes.set(xlabel="episodes", ylabel="share of right answers in training", ylim=(0, 1))
    axes.set_title("Training (one line per seed, mean of 5 updates)")
    axes.legend(loc="upper left", ncols=2)


def draw_cells(axes, runs: list[DemoRun], root: Path) -> None:
    """Draw one row per family and level: exact match of the start model and of each algorithm, mean of the seeds."""
    before, after = {}, {}
    for run in runs:
        files = sorted((run.folder(root) / "samples").glob("update-*.jsonl"))
        for file, found in (
            (files[0], before.setdefault("start", [])),
            (files[-1], after.setdefault(run.algorithm, [])),
        ):
            found.append(means_by_topic(file, EVAL))
    topics = sorted(before["start"][0], reverse=True)
    rows = range(len(topics))
    for name, cells in (before | after).items():
        values = [fmean(one[topic] for one in cells) for topic in topics]
        style, label = line_styles_of([name])[name], "start model" if name == "start" else name.upper()
        axes.plot(values, rows, style.marker, color=style.colour, ms=6, ls="none", label=label)
    axes.set_yticks(rows, topics)
    axes.set(xlabel="exact match on held-out questions", xlim=(-0.02, 1.02))
    axes.set_title("By family and level (mean of the seeds)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=4, columnspacing=1, handletextpad=0.1)


if __name__ == "__main__":
    run_command(main)

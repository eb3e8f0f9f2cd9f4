"""Compares the prediction of `--scan` with what training did: does a topic with a higher learning signal rise more?

    python benchmarks/scan_against_rise.py RUN RUN RUN

The runs are finished seeds of one recipe whose prompts have topics. The start model is scanned on each run's training
prompts. The rise of a topic is the mean score of the held-out evaluation prompts after training minus that before it,
from RUN/samples. The prediction that was fixed in advance is the learning signal; the others are for comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout

from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run
from rlhf.settings.next_commands import names_code
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import UserError, run_command

PREDICTION = "learning signal"
RESAMPLES = 5000
FEWEST_TOPICS = 4  # a rank correlation of fewer means nothing
Cells = dict[str, float]  # topic -> value


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    quiet_libraries()
    screen = Screen()
    rises = {folder: rises_of(Path(folder), arguments.metric) for folder in arguments.runs}
    predictions = {folder: predictions_of(folder, arguments, screen) for folder in arguments.runs}
    both = [*rises.values(), *(one[PREDICTION] for one in predictions.values())]
    topics = [topic for topic in both[0] if all(topic in one for one in both)]
    if len(topics) < FEWEST_TOPICS:
        raise UserError(
            f"only {len(topics)} topics in the scan and in the evaluations: {', '.join(arguments.runs)}. Use runs "
            f"whose prompts have at least {FEWEST_TOPICS} topics (column topic)"
        )
    show_topics(topics, predictions, rises, screen)
    found = correlations(topics, list(predictions.values()), list(rises.values()))
    show(found, arguments.runs, len(topics), screen)
    if arguments.json is not None:
        facts = {"topics": topics, "rises": rises, "predictions": predictions, "correlations": found}
        Path(arguments.json).write_text(json.dumps(facts, indent=2), encoding="utf-8")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", help="run folders of finished runs")
    parser.add_argument("--metric", help="evaluation function whose rise is compared (default: the score)")
    parser.add_argument("--samples", type=int, default=16, help="completions per prompt of the scan (16)")
    parser.add_argument("--prompts", type=int, default=480, help="training prompts of the scan (480)")
    parser.add_argument("--trust-reward-code", action="store_true", help="run reward functions of the runs' files")
    parser.add_argument("--json", help="write all numbers to this file")
    return parser.parse_args(argv)


# --- the two sides ---------------------------------------------------------------------------------------------------


def rises_of(folder: Path, metric: str | None = None) -> Cells:
    """Return the rise of each topic: mean score of the last evaluation minus that of the first, which is the start
    model's. With `metric`, of this evaluation function. Raises UserError."""
    files = sorted((folder / "samples").glob("update-*.jsonl"))
    if len(files) < 2:
        raise UserError(f"fewer than two evaluations: {folder / 'samples'}. Give the folder of a finished run")
    before, after = (means_by_topic(file, metric) for file in (files[0], files[-1]))
    return {topic: after[topic] - before[topic] for topic in before if topic in after}


def means_by_topic(file: Path, metric: str | None) -> Cells:
    """Return the mean score of each topic in a file of samples. Completions without a score do not count."""
    found: dict[str, list[float]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        score = row["score"] if metric is None else row.get("metrics", {}).get(metric)
        if score is not None and "topic" in row:
            found.setdefault(row["topic"], []).append(score)
    return {topic: fmean(scores) for topic, scores in found.items()}


def predictions_of(folder: str, arguments: argparse.Namespace, screen: Screen) -> dict[str, Cells]:
    """Scan the start model of a run on its training prompts. Return each candidate's value per topic."""
    from rlhf.models.device import start_device
    from rlhf.setup.build import load_components
    from rlhf.setup.scan import scan_prompts

    run = RunRecord.require(Path(folder), "runs")
    if names_code(run.flat_settings["reward_func"]) and not arguments.trust_reward_code:
        raise UserError(f"the run has reward functions in files: {folder}. Add --trust-reward-code to run them")
    changed = {"keep_pass_rate": None, "eval_func": (), "scan_samples": arguments.samples}
    config = config_of_run(run, **changed, scan_prompts=arguments.prompts)
    screen.say(f"scanning the start model of {folder}")
    components = load_components(config, start_device(screen, config.run.deterministic), screen)
    parts = scan_prompts(config, components, screen).topics
    return {
        PREDICTION: {topic: part.figures.signal for topic, part in parts.items()},
        "score": {topic: part.figures.mean for topic, part in parts.items()},
        "groups with a difference": {topic: 1 - part.figures.no_difference for topic, part in parts.items()},
        "prompts in reach": {topic: part.figures.in_reach or 0.0 for topic, part in parts.items()},
    }


# --- correlation -----------------------------------------------------------------------------------------------------


def correlations(topics: Sequence[str], predictions: Sequence[dict[str, Cells]], rises: Sequence[Cells]) -> dict:
    """Return Spearman's rank correlation of each candidate with the rise: per seed, mean over seeds, and that of the
    means over seeds, each with a 95% percentile bootstrap interval.

    The intervals of a seed are over topics. Those over seeds draw seeds and topics; a draw of topics is the same for
    all seeds, because they have the same topics.

    Args:
        topics: the names of the T topics.
        predictions: candidate -> value per topic, for each of the S seeds.
        rises: rise per topic, for each seed.
    """
    y = np.array([[rise[topic] for topic in topics] for rise in rises])  # (S, T)
    found = {}
    for name in predictions[0]:
        x = np.array([[one[name][topic] for topic in topics] for one in predictions])
        found[name] = {
            "per_seed": [with_interval(x[[s]], y[[s]]) for s in range(len(y))],
            "mean_over_seeds": with_interval(x, y),
            "of_the_means": with_interval(x, y, averaged=True),
        }
    return found


def with_interval(x: np.ndarray, y: np.ndarray, averaged: bool = False) -> dict[str, float | None]:
    """Return the mean over S seeds of the rank correlation of x and y (S, T), and its interval. With `averaged`, the
    correlation of the means over seeds. None: not defined, because all values are equal."""
    rng, (seeds, topics) = np.random.default_rng(0), x.shape
    rows, columns = rng.integers(seeds, size=(RESAMPLES, seeds, 1)), rng.integers(topics, size=(RESAMPLES, 1, topics))
    draws = rank_correlation(x[rows, columns], y[rows, columns], averaged)
    known = draws[np.isfinite(draws)]
    low, high = np.quantile(known, [0.025, 0.975]) if len(known) else (np.nan, np.nan)
    values = {"value": rank_correlation(x, y, averaged), "low": low, "high": high}
    return {name: float(value) if np.isfinite(value) else None for name, value in values.items()}


def rank_correlation(x: np.ndarray, y: np.ndarray, averaged: bool = False) -> np.ndarray:
    """Return Spearman's rank correlation of x and y (..., S, T), mean over the S seeds: (...). NaN if all values of a
    seed are equal. With `averaged`, the correlation of the means over seeds."""
    if averaged:
        x, y = x.mean(-2, keepdims=True), y.mean(-2, keepdims=True)
    a, b = (stats.rankdata(values, axis=-1) for values in (x, y))
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    sizes = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
        return ((a * b).sum(-1) / sizes).mean(-1)


# --- printing --------------------------------------------------------------------------------------------------------


def show_topics(topics: Sequence[str], predictions: dict, rises: dict[str, Cells], screen: Screen) -> None:
    """Print the means over seeds of the candidates and of the rise, per topic, the largest learning signal first."""
    names = list(next(iter(predictions.values())))
    means = {t: [fmean(one[name][t] for one in predictions.values()) for name in names] for t in topics}
    rows = [[t, *(f"{v:.3f}" for v in means[t]), f"{fmean(r[t] for r in rises.values()):+.3f}"]
            for t in sorted(topics, key=lambda t: -means[t][0])]  # fmt: skip
    screen.table("means over seeds", ["topic", *names, "rise"], rows, lines=False)


def show(found: dict[str, Any], runs: Sequence[str], topics: int, screen: Screen) -> None:
    """Print one row per candidate."""

    def cell(one: dict[str, float | None]) -> str:
        if one["value"] is None:
            return "-"
        return f"{one['value']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})"

    rows = [
        [f"{name}{' (prediction)' if name == PREDICTION else ''}", *map(cell, row["per_seed"]),
         cell(row["mean_over_seeds"]), cell(row["of_the_means"])]
        for name, row in found.items()
    ]  # fmt: skip
    title = f"Spearman's rank correlation with the rise, {topics} topics, 95% bootstrap intervals"
    columns = ["candidate", *(Path(run).name for run in runs), "mean over seeds", "of the means"]
    screen.table(title, columns, rows, lines=False)


if __name__ == "__main__":
    run_command(main)

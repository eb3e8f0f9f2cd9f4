"""Compares the prediction of `--scan` with runs on one topic each: does a higher learning signal rise more?

    python benchmarks/scan_each_topic.py --json scan_each_topic.json

Every family and level of demo-checker is trained alone, from the same start model. In a run on all of them
(scan_against_rise.py), what is learned on one topic also raises the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout

from benchmarks.demo_runs import SEEDS
from benchmarks.scan_against_rise import PREDICTION, Cells, correlations, show, show_topics
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import run_command

TRAINING = 130  # questions of a topic; the others are held out
SAMPLES = 4  # completions per held-out question
POINTS = (1, 2, 4, 10)  # updates after which the rise is measured


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    quiet_libraries()
    from rlhf.demo.checker_parts import prepare_checker, question_rows

    screen = Screen()
    prepare_checker(screen)
    by_topic: dict[str, list[dict]] = {}
    for row in question_rows():
        by_topic.setdefault(row["topic"], []).append(row)
    topics = sorted(by_topic)[: arguments.topics]
    found = {
        seed: {topic: measure(by_topic[topic], seed, arguments, screen) for topic in topics}
        for seed in arguments.seeds
    }
    facts = {}
    for update in POINTS:
        predictions = {
            s: {k: {t: one[t][0][k] for t in topics} for k in one[topics[0]][0]} for s, one in found.items()
        }
        rises = {f"seed {s}": {t: one[t][1][update] for t in topics} for s, one in found.items()}
        screen.say(f"after {update} updates of {arguments.algorithm.upper()} on one topic each:")
        show_topics(topics, predictions, rises, screen)
        result = correlations(topics, list(predictions.values()), list(rises.values()))
        show(result, list(rises), len(topics), screen)
        facts[update] = {"topics": topics, "rises": rises, "predictions": predictions, "correlations": result}
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(facts, indent=2), encoding="utf-8")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--algorithm", default="grpo", help="algorithm with groups (grpo)")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds (42 123 777)")
    parser.add_argument("--topics", type=int, help="only the first topics (default: all 24)")
    parser.add_argument("--json", help="write all numbers to this file")
    return parser.parse_args(argv)


def measure(
    rows: list[dict], seed: int, arguments: argparse.Namespace, screen: Screen
) -> tuple[Cells, dict[int, float]]:
    """Return what the scan of the training questions of one topic predicts, and the rise on its held-out questions
    after each of POINTS updates of a run on this topic."""
    from rlhf.api import make_trainer, scan
    from rlhf.config import make_config

    length = {"num_iterations": max(POINTS), "eval_every": 1, "eval_samples": SAMPLES}
    config = make_config(
        "demo-checker", arguments.algorithm, seed=seed, scan_samples=16, scan_prompts=TRAINING, **length
    )
    figures = scan(config, rows[:TRAINING]).overall.figures
    trainer = make_trainer(config, rows[:TRAINING], evaluation_prompts=rows[TRAINING:])
    trainer.train()
    scores = {one.update: one.score for one in trainer.evaluations}
    rises = {update: scores[update] - scores[0] for update in POINTS}
    shown = ", ".join(f"{rise:+.3f}" for rise in rises.values())
    screen.say(f"seed {seed}, {rows[0]['topic']}: signal {figures.signal:.3f}, rises {shown}")
    return {
        PREDICTION: figures.signal,
        "score": figures.mean,
        "groups with a difference": 1 - figures.no_difference,
        "prompts in reach": figures.in_reach or 0.0,
    }, rises


if __name__ == "__main__":
    run_command(main)

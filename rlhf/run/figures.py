"""Computes the results of a finished run: figures before and after training, with intervals of the changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np

from rlhf.settings.types import KLTarget
from rlhf.trainer.evaluation import Evaluation, tag_of
from rlhf.utils.statistics import over_prompts, paired, per_prompt, scored, share_limits

LAST_UPDATES = 10
# metrics that are no evaluation function's
OF_ALL = ("score", "gold", "teacher_kl", "length", "eos_rate", "perplexity")


def change_of(was: np.ndarray, is_now: np.ndarray, seed: int) -> tuple[np.ndarray, list[float] | None]:
    """Return the mean before and after training (2, P) of each prompt with a score in both evaluations, and the 95%
    interval of the mean change. It is None for less than two such prompts, or if no prompt changed and the range of
    the scores is not known.

    Args:
        was: the scores before training (P, K).
        is_now: those after training.
        seed: of the bootstrap.
    """
    both = paired(np.array([per_prompt(was, exact=True), per_prompt(is_now, exact=True)]))
    if not both.size:
        return both, None
    found = over_prompts(both[1] - both[0], seed, share_limits(np.hstack([was, is_now])))
    return both, None if found.low is None else [found.low, found.high]


def compare(before: Evaluation, after: Evaluation, seed: int) -> dict[str, float | list[float] | None]:
    """Compute the run's results from the start model's evaluation and that of the final weights, on the same prompts:
    NAME_before, NAME_after, and for scores the interval of the change, NAME_rise_interval, which is None if no prompt
    has a value in both evaluations. NAME is eval/NAME for an evaluation function, and eval/NAME/pass_at_K. `seed` is
    for the bootstrap intervals."""
    both, interval = change_of(before.scores, after.scores, seed)
    start_scores = scored(before.scores).tolist()
    spread = stdev(start_scores) if len(start_scores) > 1 else 0.0
    was = before.metrics()
    is_now = after.metrics()
    figures: dict = {
        "prompts": len(before.texts),
        "score_rise_interval": interval,
        "score_rise_in_start_sd": fmean(both[1] - both[0]) / spread if spread and both.size else 0.0,
        "kl_after": is_now["eval/kl_divergence"],
    }
    tags = [tag_of(name, key) for name, found in after.figures.items() for key in found if key not in ("low", "high")]
    for tag in [f"eval/{name}" for name in OF_ALL] + tags:
        if tag in was:
            name = tag if tag in tags else tag.removeprefix("eval/")
            figures |= {f"{name}_before": was[tag], f"{name}_after": is_now[tag]}
    if both.size and np.isnan(np.hstack([before.scores, after.scores])).any():  # so that the difference is the change
        figures["score_before"], figures["score_after"] = map(fmean, both)
    if before.gold is not None:
        figures["gold_rise_interval"] = change_of(before.gold, after.gold, seed)[1]
    for name in after.figures:
        if before.figures.get(name):
            both, interval = change_of(before.judged[name], after.judged[name], seed)
            if both.size:
                figures[f"eval/{name}_before"], figures[f"eval/{name}_after"] = map(fmean, both)
                figures[f"eval/{name}_rise_interval"] = interval
    return figures


def results_of(evaluations: Sequence[Evaluation], seed: int) -> dict:
    """Return what `compare` computes for a run's first and last evaluation; {} for a run without evaluations."""
    return compare(evaluations[0], evaluations[-1], seed) if evaluations else {}


def last_kl(history: Sequence[dict], target: KLTarget, first: int = 1, last: float = math.inf) -> float | None:
    """Return the mean KL of the last 10 logged updates from `first` to `last`, in the target's unit.

    Skipped updates have no KL. None if none of these updates was logged.
    """
    name = target.metric
    values = [entry[name] for entry in history if name in entry and first <= entry["step"] <= last]
    return fmean(values[-LAST_UPDATES:]) if values else None


def kl_of_phases(history: Sequence[dict], phases: Sequence[tuple[int, int, KLTarget]]) -> list[dict]:
    """Return the target of each phase of a run and the KL at its end."""
    return [
        {
            "updates": [first, last],
            "target": target.nats,
            "kl_last_10_updates": last_kl(history, target, first, last),
            "unit": f"nats/{target.per}",
        }
        for first, last, target in phases
        if last >= first
    ]

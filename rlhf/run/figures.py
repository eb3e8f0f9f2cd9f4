"""Computes the results of a finished run: figures before and after training, with intervals of the changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np

from rlhf.data.prompts import Prompt
from rlhf.demo.tasks import Gold
from rlhf.settings.types import KLTarget
from rlhf.trainer.eval_metrics import tag_of
from rlhf.trainer.evaluation import Evaluation, as_array, flat, gold_qualities
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.statistics import over_prompts, paired, per_prompt, scored, share_limits

LAST_UPDATES = 10


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


def compare(
    before: Evaluation, after: Evaluation, prompts: Sequence[Prompt], gold: Gold | None, seed: int
) -> dict[str, float | list[float] | None]:
    """Compute the run's results from the start model's evaluation and the last one, on the same prompts. An interval
    is None if no prompt has a value in both evaluations.

    Args:
        before: evaluation of the start model.
        after: evaluation of the final weights.
        prompts: the evaluation prompts.
        gold: the demo's judge. None: no gold quality.
        seed: for the bootstrap intervals.
    """
    both, interval = change_of(before.scores, after.scores, seed)
    score_before, score_after = before.score, after.score
    if both.size and np.isnan(np.hstack([before.scores, after.scores])).any():  # so that the difference is the change
        score_before, score_after = map(fmean, both)
    start_scores = scored(before.scores).tolist()
    spread = stdev(start_scores) if len(start_scores) > 1 else 0.0
    figures: dict = {
        "prompts": len(prompts),
        "score_before": score_before,
        "score_after": score_after,
        "score_rise_interval": interval,
        "score_rise_in_start_sd": fmean(both[1] - both[0]) / spread if spread and both.size else 0.0,
        "kl_after": fmean(flat(after.kl)),
        "length_before": fmean(flat(before.lengths)),
        "length_after": fmean(flat(after.lengths)),
        "eos_rate_before": fmean(flat(before.ended)),
        "eos_rate_after": fmean(flat(after.ended)),
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
    }
    if gold is not None:
        was, is_now = (gold_scores(e, prompts, gold) for e in (before, after))
        figures |= {
            "gold_before": fmean(flat(was)),
            "gold_after": fmean(flat(is_now)),
            "gold_rise_interval": change_of(was, is_now, seed)[1],
        }
    return figures | eval_figures(before, after, seed)


def results_of(trainer: OnPolicyLoop) -> dict[str, float | list[float] | None]:
    """Return the results of a trainer whose training has ended, as `compare` does, without gold quality."""
    before = trainer.evaluations[0]
    after = trainer.evaluations[-1]
    return compare(before, after, trainer.evaluation_prompts, None, trainer.config.run.seed)


def eval_figures(before: Evaluation, after: Evaluation, seed: int) -> dict[str, float | list[float]]:
    """Return the figures of the evaluation functions with a value in both evaluations: eval/NAME_before and _after,
    their paired interval eval/NAME_rise_interval, and for pass@k eval/NAME/pass_at_K_before and _after."""
    figures: dict = {}
    for name, found in after.figures.items():
        start = before.figures.get(name, {})
        for key in found:
            if key in start and key not in ("low", "high"):
                figures[f"{tag_of(name, key)}_before"] = start[key]
                figures[f"{tag_of(name, key)}_after"] = found[key]
        if start:
            both, interval = change_of(before.judged[name], after.judged[name], seed)
            if both.size:
                figures[f"eval/{name}_before"], figures[f"eval/{name}_after"] = map(fmean, both)
                figures[f"eval/{name}_rise_interval"] = interval
    return figures


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


def gold_scores(evaluation: Evaluation, prompts: Sequence[Prompt], gold: Gold) -> np.ndarray:
    """Return the gold quality of each completion, (P, K) in [0, 1]."""
    rows = [prompt for prompt in prompts for _ in range(evaluation.samples)]
    found = gold_qualities(rows, flat(evaluation.texts), flat(evaluation.ended), gold)
    return as_array(found, evaluation.samples)

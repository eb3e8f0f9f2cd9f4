"""Computes the results of a finished run: figures before and after training, with intervals of the changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np

from rlhf.data.prompts import Prompt
from rlhf.demo.tasks import Gold
from rlhf.settings.types import KLTarget
from rlhf.trainer.eval_metrics import per_prompt, tag_of
from rlhf.trainer.evaluation import Evaluation, flat, scored
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.intervals import over_prompts, share_limits

LAST_UPDATES = 10


def rise_interval(
    pairs: Sequence[tuple[float, float]], was: np.ndarray, now: np.ndarray, seed: int
) -> list[float] | None:
    """Return the 95% interval of the mean change over prompts, or None without one: for a single prompt, or if no
    prompt changed and the range of the scores is not known.

    Args:
        pairs: the mean of each prompt before and after training.
        was: the values (P, K) of all completions before training, which show the range.
        now: those after training.
        seed: of the bootstrap.
    """
    if not pairs:
        return None
    found = over_prompts(rises(pairs), seed, limits=share_limits(np.hstack([was, now])))
    return None if found.low is None else [found.low, found.high]


def paired(was: np.ndarray, now: np.ndarray) -> list[tuple[float, float]]:
    """Return the mean before and after training of each prompt with a value in both evaluations, `was` and `now`
    (P, K)."""
    pairs = zip(per_prompt(was), per_prompt(now), strict=True)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def rises(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the change of each prompt."""
    return [b - a for a, b in pairs]


def means(pairs: Sequence[tuple[float, float]], before: Evaluation, after: Evaluation) -> tuple[float, float]:
    """Return the mean score before and after training. If some completions have no score, only prompts with a score in
    both evaluations count, so that the difference is the mean change."""
    if not pairs or not np.isnan(np.hstack([before.scores, after.scores])).any():
        return before.score, after.score
    return fmean(a for a, _ in pairs), fmean(b for _, b in pairs)


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
    pairs = paired(before.scores, after.scores)
    start_scores = scored(before.scores).tolist()
    spread = stdev(start_scores) if len(start_scores) > 1 else 0.0
    rise = rises(pairs)
    score_before, score_after = means(pairs, before, after)
    figures: dict = {
        "prompts": len(prompts),
        "score_before": score_before,
        "score_after": score_after,
        "score_rise_interval": rise_interval(pairs, before.scores, after.scores, seed),
        "score_rise_in_start_sd": fmean(rise) / spread if spread and rise else 0.0,
        "kl_after": fmean(flat(after.kl)),
        "length_before": fmean(flat(before.lengths)),
        "length_after": fmean(flat(after.lengths)),
        "eos_rate_before": fmean(flat(before.ended)),
        "eos_rate_after": fmean(flat(after.ended)),
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
    }
    if gold is not None:
        was, is_now = (e.gold_of(prompts, gold) for e in (before, after))
        figures |= {
            "gold_before": fmean(flat(was)),
            "gold_after": fmean(flat(is_now)),
            "gold_rise_interval": rise_interval(paired(was, is_now), was, is_now, seed),
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
        was = before.judged.get(name)
        is_now = after.judged[name]
        pairs = paired(was, is_now) if start else []
        if pairs:
            figures[f"eval/{name}_before"] = fmean(a for a, _ in pairs)
            figures[f"eval/{name}_after"] = fmean(b for _, b in pairs)
            figures[f"eval/{name}_rise_interval"] = rise_interval(pairs, was, is_now, seed)
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

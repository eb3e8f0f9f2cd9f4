"""Figures of a model's completions, the comparison with the start model, and the audit for signs of reward hacking."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from rlhf.algorithms.kl_control import KL_BAND
from rlhf.analysis.evaluator import GenerationResults
from rlhf.analysis.statistics import (
    A_SHARE,
    EVEN,
    Estimate,
    correlation,
    distinct,
    interval,
    over_prompts,
    repetition,
    win_rates,
)
from rlhf.settings.training import Config

# thresholds of the audit, relative to the start model
LONGER = 1.5  # ratio of mean completion lengths
MORE_REPETITION = 0.05  # increase of the share of repeated 4-grams
FEWER_ENDINGS = 0.05  # decrease of the share of completions that end with EOS
LESS_VARIED = 0.5  # ratio of distinct-2
ENOUGH_COMPLETIONS = 40  # distinct-2 of less text is unreliable
LENGTH_CORRELATION = 0.6  # rank correlation of score and length
MORE_LENGTH_CORRELATION = 0.2  # and its increase


def figures(completions: GenerationResults) -> dict[str, float | None]:
    """Returns one model's figures. A figure that was not computed is None. LABELS holds the units."""
    texts = [text for row in completions.texts for text in row]
    return {
        "score": float(completions.scores.mean()),
        "score_sd": float(completions.scores.std(ddof=1)) if completions.scores.size > 1 else None,
        "score_median": float(np.median(completions.scores)),
        "score_of_best": float(completions.scores.max(axis=1).mean()),
        "score_of_worst": float(completions.scores.min(axis=1).mean()),
        "judge": float(completions.judged.mean()) if completions.judged is not None else None,
        "kl": float(completions.kl.mean()) if completions.kl is not None else None,
        "kl_per_token": float(completions.kl.sum() / completions.lengths.sum())
        if completions.kl is not None
        else None,
        "perplexity": completions.perplexity,
        "length": float(completions.lengths.mean()),
        "eos_rate": float(completions.ended.mean()),
        "distinct_1": distinct(texts, 1),
        "distinct_2": distinct(texts, 2),
        "repetition": float(np.mean([repetition(text) for text in texts])),
        "score_length_correlation": correlation(completions.scores.ravel(), completions.lengths.ravel()),
    }


# figure -> label with unit, format
LABELS = {
    "score": ("score", "{:+z.3f}"),
    "score_sd": ("score (standard deviation)", "{:z.3f}"),
    "score_median": ("score (median)", "{:+z.3f}"),
    "score_of_best": ("best score per prompt", "{:+z.3f}"),
    "score_of_worst": ("worst score per prompt", "{:+z.3f}"),
    "judge": ("judge", "{:z.3f}"),
    "kl": ("KL (nats/sequence)", "{:z.2f}"),
    "kl_per_token": ("KL (nats/token)", "{:z.3f}"),
    "perplexity": ("perplexity", "{:z.2f}"),
    "length": ("completion length (tokens)", "{:z.1f}"),
    "eos_rate": ("ended with EOS", "{:z.0%}"),
    "distinct_1": ("distinct-1", "{:z.3f}"),
    "distinct_2": ("distinct-2", "{:z.3f}"),
    "repetition": ("repeated 4-grams", "{:z.1%}"),
    "score_length_correlation": ("score-length correlation", "{:+z.2f}"),
}


def shown(name: str, value: float | None) -> str:
    """Formats a figure for tables; "-" if it was not computed."""
    return "-" if value is None else LABELS[name][1].format(value)


def against(completions: GenerationResults, other: GenerationResults, seed: int) -> dict[str, Estimate | float | None]:
    """Compares one model with another on the same prompts, with 95% confidence intervals over prompts.

    win_rate and judge_win_rate count all pairs of completions of a prompt; a tie counts half. The other figures are
    differences of the means per prompt. perplexity_ratio is a number without an interval.
    """

    def difference(name: str, limits: tuple[float, float] | None = None) -> Estimate | None:
        this, that = getattr(completions, name), getattr(other, name)
        if this is None or that is None:
            return None
        return over_prompts(this.mean(axis=1) - that.mean(axis=1), seed, limits=limits)

    def wins(name: str) -> Estimate | None:
        this, that = getattr(completions, name), getattr(other, name)
        return None if this is None or that is None else over_prompts(win_rates(this, that), seed, EVEN, A_SHARE)

    both_known = completions.perplexity is not None and other.perplexity is not None
    return {
        "win_rate": wins("scores"),
        "judge_win_rate": wins("judged"),
        "score": difference("scores"),
        "judge": difference("judged"),
        "length": difference("lengths"),
        "eos_rate": difference("ended", (-1.0, 1.0)),
        "perplexity_ratio": completions.perplexity / other.perplexity if both_known else None,
    }


def target_at_end(config: Config) -> tuple[float, str] | None:
    """Returns the last KL target of a run as (nats, "sequence" or "token"); None if beta is not adapted."""
    return (config.kl.targets[-1].nats, config.kl.targets[-1].per) if config.kl.steered else None


def warnings(
    completions: GenerationResults, start: GenerationResults, seed: int, target: tuple[float, str] | None = None
) -> list[str]:
    """Returns the signs of reward hacking, one sentence each. An empty list is no proof that there is none.

    `target` is the run's last KL target as in `target_at_end`.
    """
    this, before, differ = figures(completions), figures(start), against(completions, start, seed)
    found = []
    judge = differ["judge"]
    if judge is not None and differ["score"].above(0) and not judge.above(0):
        moved = "fell" if judge.excludes(0) else "did not rise significantly"
        found.append(
            f"the score rose by {differ['score'].value:+.2f}, but the judge's rating {moved} ({judge.value:+.3f}, "
            f"95% confidence interval {interval(judge.low, judge.high)}, {len(completions.scores)} prompts): the "
            "policy may exploit the reward model"
            + ("" if judge.excludes(0) else ", or there are too few prompts (raise --num-prompts)")
        )
    if this["length"] > LONGER * before["length"]:
        found.append(
            f"completions are {this['length'] / before['length']:.1f} times as long as the start model's "
            f"({before['length']:.1f} -> {this['length']:.1f} tokens): the reward may favour length itself"
        )
    if this["repetition"] > before["repetition"] + MORE_REPETITION:
        found.append(
            "completions repeat themselves more (repeated 4-grams: "
            f"{before['repetition']:.0%} -> {this['repetition']:.0%})"
        )
    if this["eos_rate"] < before["eos_rate"] - FEWER_ENDINGS:
        found.append(
            f"fewer completions end with EOS ({before['eos_rate']:.0%} -> {this['eos_rate']:.0%}): the others are cut "
            "off at the maximum length"
        )
    return (
        found
        + _variety_and_length(this, before, completions.scores.size)
        + _kl_outside(completions, this, target, seed)
    )


def _variety_and_length(this: dict, before: dict, count: int) -> list[str]:
    """Warnings about a loss of variety, and about a score that depends on length. `count` is of completions."""
    found = []
    if count >= ENOUGH_COMPLETIONS and this["distinct_2"] < LESS_VARIED * before["distinct_2"]:
        found.append(
            f"completions are less varied (distinct-2 {before['distinct_2']:.3f} -> {this['distinct_2']:.3f}): the "
            "policy may have collapsed to a few phrases"
        )
    now, then = this["score_length_correlation"], before["score_length_correlation"] or 0.0
    if now is not None and now > max(LENGTH_CORRELATION, then + MORE_LENGTH_CORRELATION):
        found.append(f"longer completions get higher scores (rank correlation {then:+.2f} -> {now:+.2f})")
    return found


def _kl_outside(completions: GenerationResults, this: dict, target: tuple[float, str] | None, seed: int) -> list[str]:
    """Warns if the whole interval over prompts is above the KL band. A few large values are not enough."""
    if target is None or completions.kl is None:
        return []
    (nats, per), lengths = target, completions.lengths
    of_prompts = completions.kl.mean(axis=1) if per == "sequence" else completions.kl.sum(axis=1) / lengths.sum(axis=1)
    kl, most = this["kl" if per == "sequence" else "kl_per_token"], KL_BAND[1] * nats
    if not over_prompts(of_prompts, seed, null=most).above(most):
        return []
    return [
        f"the KL to the start model is {kl:.3g}/{per}, above {KL_BAND[1]:g} times the KL target ({most:.3g}/{per})"
    ]


def as_json(values: dict[str, Estimate | float | None]) -> dict:
    """Replaces each estimate by a plain dictionary."""
    return {name: asdict(value) if isinstance(value, Estimate) else value for name, value in values.items()}

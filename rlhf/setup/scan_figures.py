"""Figures of a scan: what can be learned from the scores of several completions per prompt.

All estimates are unbiased for the policy that sampled the completions, unless their docstring names an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from rlhf.utils.statistics import ROUNDING, all_equal_to, is_binary, learning_signal, no_difference, share_limits

Scores = Sequence[float]

IN_REACH = (0.2, 0.8)  # pass rates between which a prompt is neither too hard nor too easy
TARGET = 0.7  # smallest share of groups with a difference: at most 30% of the episodes teach nothing
FEWEST = 2  # scores of a prompt from which a variance can be estimated


@dataclass(frozen=True)
class Figures:
    """Means over prompts. Shares are in [0, 1]. None: not defined for these scores."""

    prompts: int
    binary: bool  # all scores are 0 or 1, so that the mean is a pass rate
    mean: float  # score; the pass rate for scores 0 and 1
    in_reach: float | None  # share of prompts with a pass rate of IN_REACH; None: scores outside [0, 1]
    no_difference: float  # share of groups whose scores are all equal
    never: float | None  # share of groups in which no completion has score 1; None: scores other than 0 and 1
    always: float | None  # share of groups in which every completion has score 1
    signal: float  # mean variance of the score within a prompt


def group_figures(prompts: Sequence[Scores], size: int) -> Figures:
    """Return the figures of at least one prompt, for groups of `size` completions. `in_reach` counts the prompts whose
    mean of the samples is within the limits, both included, which is not corrected for sampling."""
    every = np.concatenate(prompts)
    binary = is_binary(every)
    means = [fmean(scores) for scores in prompts]
    low, high = IN_REACH
    in_reach = fmean(low - ROUNDING <= mean <= high + ROUNDING for mean in means)
    return Figures(
        prompts=len(prompts),
        binary=binary,
        mean=fmean(means),
        in_reach=None if share_limits(every) is None else in_reach,
        no_difference=fmean(no_difference(scores, size) for scores in prompts),
        never=fmean(all_equal_to(scores, 0.0, size) for scores in prompts) if binary else None,
        always=fmean(all_equal_to(scores, 1.0, size) for scores in prompts) if binary else None,
        signal=fmean(map(learning_signal, prompts)),
    )


# --- recommendation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recommendation:
    """Settings for a run, with one sentence of reason per setting that changes. None: leave the setting as it is."""

    K: int | None
    batch_size: int | None
    reasons: list[str]


def best_group_size(prompts: Sequence[Scores], now: int, episodes: int) -> tuple[int, float]:
    """Return the recommended K and its expected share of groups with a difference.

    It is the smallest K that reaches TARGET, among the powers of two and the present K that divide the episodes of an
    update and are not larger than the number of samples. If none reaches it, it is the largest of them. A present K
    that is larger than the number of samples is not judged and stays (share 0). Scores other than 0 and 1 nearly
    always differ, and a small K makes their baseline (the group's mean) uncertain, so K does not become smaller then.

    Args:
        prompts: scores per prompt.
        now: the K of the run.
        episodes: episodes per update, which stay the same: batch size x K.
    """
    samples = min(map(len, prompts))
    least = FEWEST if is_binary(np.concatenate(prompts)) else now
    sizes = [2**i for i in range(1, episodes.bit_length()) if episodes % 2**i == 0 and 2**i < episodes]
    fitting = [size for size in sorted({*sizes, now}) if least <= size <= samples]
    if not fitting or now > samples:
        return now, 0.0
    shares = {size: fmean(1 - no_difference(scores, size) for scores in prompts) for size in fitting}
    return next(
        ((size, share) for size, share in shares.items() if share >= TARGET), (fitting[-1], shares[fitting[-1]])
    )


def recommend(prompts: Sequence[Scores], K: int, batch_size: int) -> Recommendation:
    """Return the recommended K and batch size.

    Args:
        prompts: shaped scores per prompt.
        K: completions per prompt of the run; 1 without groups.
        batch_size: prompts per update of the run.
    """
    episodes = K * batch_size
    size, differ = best_group_size(prompts, K, episodes) if K > 1 else (K, 0.0)
    if size == K:
        return Recommendation(None, None, [])
    reached = f"the smallest K that reaches {TARGET:.0%}" if differ >= TARGET else "more than with a smaller K"
    reasons = [
        f"--K {size}: {differ:.0%} of the groups have scores that differ, {reached}",
        f"--batch-size {episodes // size}: an update keeps its {episodes} episodes",
    ]
    return Recommendation(size, episodes // size, reasons)

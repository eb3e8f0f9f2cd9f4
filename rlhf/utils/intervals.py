"""Confidence intervals of a mean over prompts, for the evaluations of a run and for the analysis of several runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 5000
LEVEL = 0.95
QUANTILES = 2.80158  # 1.95996 + 0.84162, those of the normal distribution at 97.5% and 80%


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval (95% by default). `low` and `high` are None if there is no interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def excludes(self, null: float) -> bool:
        """True if the whole interval is above or below `null`; False without an interval."""
        return self.low is not None and (self.low > null or self.high < null)

    def above(self, null: float) -> bool:
        """True if the whole interval is above `null`; False without an interval."""
        return self.low is not None and self.low > null


def over_prompts(
    values: Sequence[float],
    seed: int,
    limits: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> Estimate:
    """Return the mean of one value per prompt (P,) with a bootstrap interval over prompts (BCa, Efron 1987).

    A bootstrap interval of few values is too narrow (Hesterberg 2015, "What Teachers Should Know About the
    Bootstrap"), so its distance from the mean is multiplied by t / z at P - 1 degrees of freedom and by
    sqrt(P / (P - 1)): 1.10 for 20 prompts, 1.01 for 128. A single prompt has no interval.

    A bootstrap of equal values has no width, which is no certainty. So if all are equal, the share of such prompts is
    at least ((1 - level) / 2)^(1 / P) (exact binomial interval, Clopper & Pearson 1934), and the others can have any
    value within `limits`. Without limits they could have the opposite value, and zeros have no interval, because
    nothing is known about the size of other values.

    Args:
        values: one value per prompt.
        seed: of the resampling.
        limits: the range of possible means. The interval is cut off there, which removes only impossible values, so
            it contains the true mean as often as before.
        level: confidence level of the interval.
    """
    from scipy import stats  # slow, and a plan needs none of it

    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if len(values) < 2 or not np.isfinite(mean):
        return Estimate(mean)
    if np.ptp(values) == 0:
        share = ((1 - level) / 2) ** (1 / len(values))
        others = (mean, -mean) if limits is None else limits
        low, high = sorted(mean + (1 - share) * (other - mean) for other in others)
        return Estimate(mean) if low == high else Estimate(mean, low, high)
    found = _bootstrapped(values, "BCa", seed, level)
    if not np.isfinite(found).all():
        found = _bootstrapped(values, "percentile", seed, level)
    freedom = len(values) - 1
    normal = stats.norm.ppf((1 + level) / 2)
    factor = np.sqrt(len(values) / freedom) * stats.t.ppf((1 + level) / 2, freedom) / normal
    return cut_off(mean, *(mean + (found - mean) * factor), limits)


def _bootstrapped(values: np.ndarray, method: str, seed: int, level: float) -> np.ndarray:
    """Return both ends of scipy's bootstrap interval of the mean; nan if the method fails."""
    from scipy import stats  # slow, and a plan needs none of it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # the result is nan then
        rng = np.random.default_rng(seed)
        found = stats.bootstrap(
            (values,), np.mean, n_resamples=RESAMPLES, confidence_level=level, method=method, rng=rng
        )
    return np.array(found.confidence_interval)


def cut_off(mean: float, low: float, high: float, limits: tuple[float, float] | None) -> Estimate:
    """Return the estimate with its interval cut off at `limits`."""
    if limits is not None:
        low = max(low, limits[0])
        high = min(high, limits[1])
    return Estimate(mean, float(low), float(high))


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return the exact interval of a share of `count` cases (Clopper & Pearson 1934). Half cases are rounded."""
    from scipy import stats  # slow, and a plan needs none of it

    return tuple(stats.binomtest(round(share * count), count).proportion_ci(LEVEL))


def smallest_change(prompts: int, samples: int) -> float:
    """Return the change of a score of 0 or 1 that an evaluation before and after training finds: in 80% of such
    evaluations, the 95% interval of the mean of the paired differences excludes 0.

    QUANTILES x sqrt((w + 2 s / samples) / prompts), Miller 2024, "Adding Error Bars to Evals", arXiv
    2411.00640, section 5. Before a run, both variances are assumed: solve rates spread evenly over 0 to 1, so that one
    completion has the mean variance s = E[p (1 - p)] = 1/6 and rates have the variance 1/12; and rates before and
    after training with the correlation 1/3, so that their difference has the variance w = 2 (1 - 1/3) / 12 = 1/9.
    Training that moves all prompts alike needs fewer prompts.

    The square root of 1/6 + 1/12 is 0.5, so for other scores the change is in units of 2 standard deviations.

    Args:
        prompts: evaluation prompts.
        samples: completions of each prompt.
    """
    return QUANTILES * math.sqrt((1 / 9 + 2 / 6 / samples) / prompts)


def prompts_needed(samples: int, change: float = 0.1) -> int:
    """Return the number of prompts with which `smallest_change` is at most `change`."""
    return math.ceil((smallest_change(1, samples) / change) ** 2)


def share_limits(values: Sequence[float] | np.ndarray) -> tuple[float, float] | None:
    """Return (-1, 1), the range of a difference of scores, if all scores (one at least) are in [0, 1], as those of
    checkers and other shares; None for other scores, whose range is not known. NaN is ignored."""
    return (-1.0, 1.0) if np.nanmin(values) >= 0 and np.nanmax(values) <= 1 else None


def interval(low: float, high: float, sign: str = "+") -> str:
    """Formats an interval."""
    return f"{low:{sign}z.3f} to {high:{sign}z.3f}"

"""Confidence intervals of a mean over prompts, for the evaluations of a run and for the analysis of several runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

RESAMPLES = 5000
LEVEL = 0.95


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
    null: float = 0.0,
    limits: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> Estimate:
    """Return the mean of one value per prompt (P,) with a bootstrap interval over prompts (BCa, Efron 1987).

    A bootstrap interval of few values is too narrow (Hesterberg 2015, "What Teachers Should Know About the
    Bootstrap"), so its distance from the mean is multiplied by t / z at P - 1 degrees of freedom and by
    sqrt(P / (P - 1)): 1.10 for 20 prompts, 1.01 for 128. A single prompt has no interval. A bootstrap of equal values
    has no width. If all are equal, the share of such prompts is at least ((1 - level) / 2)^(1 / P) (exact binomial
    interval, Clopper & Pearson 1934), and the others could have the opposite value.

    Args:
        values: one value per prompt.
        seed: of the resampling.
        null: the value that means no difference; "opposite" is relative to it.
        limits: the range of possible means; the interval is cut off there.
        level: confidence level of the interval.
    """
    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if len(values) < 2 or not np.isfinite(mean):
        return Estimate(mean)
    if np.ptp(values) == 0:
        share = ((1 - level) / 2) ** (1 / len(values))
        low, high = sorted((mean, null + (2 * share - 1) * (mean - null)))
        return cut_off(mean, low, high, limits)
    found = _bootstrapped(values, "BCa", seed, level)
    if not np.isfinite(found).all():
        found = _bootstrapped(values, "percentile", seed, level)
    freedom = len(values) - 1
    normal = stats.norm.ppf((1 + level) / 2)
    factor = np.sqrt(len(values) / freedom) * stats.t.ppf((1 + level) / 2, freedom) / normal
    return cut_off(mean, *(mean + (found - mean) * factor), limits)


def _bootstrapped(values: np.ndarray, method: str, seed: int, level: float) -> np.ndarray:
    """Return both ends of scipy's bootstrap interval of the mean; nan if the method fails."""
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


def interval(low: float, high: float, sign: str = "+") -> str:
    """Formats an interval."""
    return f"{low:{sign}z.3f} to {high:{sign}z.3f}"

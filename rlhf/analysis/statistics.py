"""Win rates, intervals over prompts and over seeds, and what can be counted in texts. Numbers and texts only."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

RESAMPLES = 5000
LEVEL = 0.95
A_SHARE = (0.0, 1.0)  # what a win rate can be
EVEN = 0.5  # the win rate of equals
OVER_SEEDS, OVER_PROMPTS = "seeds and prompts", "prompts"  # what an interval is over, in words


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval (95% unless another level was given); no interval if nothing could be resampled."""

    value: float
    low: float | None = None
    high: float | None = None

    def excludes(self, null: float) -> bool:
        """Whether the interval lies wholly on one side of `null`; never where there is none."""
        return self.low is not None and (self.low > null or self.high < null)

    def above(self, null: float) -> bool:
        """Whether the whole interval lies above `null`."""
        return self.low is not None and self.low > null


def level_of_each(comparisons: int) -> float:
    """The level of each of several intervals such that all of them hold together at LEVEL (Bonferroni)."""
    return 1 - (1 - LEVEL) / max(comparisons, 1)


def over_prompts(
    values: Sequence[float],
    seed: int,
    null: float = 0.0,
    limits: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> Estimate:
    """Mean of one value per prompt (P,), with a bootstrap interval over prompts (BCa, Efron 1987).

    Widened about the mean by t / z at P - 1 degrees of freedom times sqrt(P / (P - 1)), as a bootstrap of few is too
    sure of itself (Hesterberg 2015, "What Teachers Should Know About the Bootstrap"): 1.10 for 20 prompts, 1.01 for
    128. `limits`: what the mean can be at all. `level`: of the interval.

    No interval for a single prompt. Where all values are equal there is nothing to resample: one more prompt is
    imagined that says the opposite, seen from `null` (what no difference is).
    """
    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if len(values) < 2 or not np.isfinite(mean):
        return Estimate(mean)
    if np.ptp(values) == 0:
        if mean == null:
            return Estimate(mean, mean, mean)
        values = np.append(values, 2 * null - mean)
    found = _bootstrapped(values, "BCa", seed, level)
    if not np.isfinite(found).all():
        found = _bootstrapped(values, "percentile", seed, level)
    count = len(values)
    return _widened(mean, found, np.sqrt(count / (count - 1)) * _student(count - 1, level), limits)


def _bootstrapped(values: np.ndarray, method: str, seed: int, level: float) -> np.ndarray:
    """Both ends of scipy's interval of the mean; nan where the method has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # said by its nan
        rng = np.random.default_rng(seed)
        found = stats.bootstrap(
            (values,), np.mean, n_resamples=RESAMPLES, confidence_level=level, method=method, rng=rng
        )
    return np.array(found.confidence_interval)


def _student(freedom: float, level: float) -> float:
    """How much wider an interval is with Student's t than with the normal distribution."""
    return float(stats.t.ppf((1 + level) / 2, freedom) / stats.norm.ppf((1 + level) / 2))


def _widened(mean: float, interval: np.ndarray, factor: float, limits: tuple[float, float] | None) -> Estimate:
    """An interval drawn out about the mean, and cut off at what is possible."""
    low, high = mean + (interval - mean) * factor
    if limits is not None:
        low, high = max(low, limits[0]), min(high, limits[1])
    return Estimate(mean, float(low), float(high))


def over_seeds(
    values: np.ndarray, seed: int, limits: tuple[float, float] | None = None, level: float = LEVEL
) -> Estimate | None:
    """Mean of values (S, T, P): training seeds of one side, of the other, prompts; hierarchical bootstrap interval.

    Seeds of either side and prompts (which all models share) are drawn with replacement, independently (Saravanan et
    al. 2020, "Application of the hierarchical bootstrap"; Agarwal et al. 2021, arXiv 2108.13264, for few runs). A side
    of one level is a fixed model, such as the start; None where both are.

    Of few seeds a plain bootstrap is too sure of itself: (1) it finds their variance too small by (S - 1) / S, so
    their deviations are scaled up by sqrt(S / (S - 1)); (2) it has normal tails, so the interval is widened by t / z
    at Satterthwaite's degrees of freedom of the parts' variances (seeds: S - 1, prompts: P - 1). `limits` as in
    over_prompts. No interval from one prompt, or where all values are equal and not 0.
    """
    if max(values.shape[:2]) < 2:
        return None
    values = np.asarray(values, dtype=float)
    mean, prompts = float(values.mean()), values.shape[2]
    if prompts < 2 or not np.isfinite(mean):
        return Estimate(mean)
    rng = np.random.default_rng(seed)
    parts, widened = [], values.copy()  # (variance of the mean, degrees of freedom)
    for axis in (0, 1):
        count = values.shape[axis]
        if count > 1:
            of_seed = values.mean(axis=1 - axis, keepdims=True)  # (S, 1, P) or (1, T, P)
            widened += (np.sqrt(count / (count - 1)) - 1) * (of_seed - of_seed.mean(axis=axis, keepdims=True))
            parts.append((of_seed.mean(axis=2).var(ddof=1) / count, count - 1))
    drawn = [rng.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n if n > 1 else np.ones((RESAMPLES, 1))
             for n in values.shape]  # fmt: skip
    means = np.einsum("rs,rt,rp,stp->r", *drawn, widened, optimize=True)
    parts.append((values.mean(axis=(0, 1)).var(ddof=1) / prompts, prompts - 1))
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return Estimate(mean, mean, mean) if mean == 0 else Estimate(mean)
    freedom = total**2 / sum(variance**2 / df for variance, df in parts)
    ends = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return _widened(mean, ends, _student(freedom, level), limits)


def over_seeds_if_any(
    values: np.ndarray,
    seed: int,
    fixed_other: bool = False,
    null: float = 0.0,
    limits: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> tuple[Estimate, str]:
    """Mean of values (S, T, P) as in over_seeds, with the widest interval that there are runs for, and its name.

    Over seeds and prompts where every side that was trained has at least two seeds (`fixed_other`: the second one was
    not trained); else over the prompts within these very runs.
    """
    if values.shape[0] < 2 or (values.shape[1] < 2 and not fixed_other):
        return over_prompts(values.mean(axis=(0, 1)), seed, null, limits, level), OVER_PROMPTS
    return over_seeds(values, seed, limits, level), OVER_SEEDS


def win_rates(one: np.ndarray, another: np.ndarray) -> np.ndarray:
    """Per prompt, the share of all pairs of completions that ours (P, K) win against theirs (P, L); ties half. (P,)"""
    a, b = np.asarray(one)[:, :, None], np.asarray(another)[:, None, :]
    return ((a > b) + 0.5 * (a == b)).mean(axis=(1, 2))


def ranks(scores: Sequence[float]) -> list[tuple[int, str]]:
    """Of one prompt's completions, each one's rank (1 is the best; equals share it) and BEST, MEDIUM or WORST.

    All that share the highest score are BEST, all others that share the lowest are WORST.
    """
    places = stats.rankdata([-s for s in scores], method="min").astype(int).tolist()
    last = max(places)
    return [(place, "BEST" if place == 1 else "WORST" if place == last else "MEDIUM") for place in places]


def correlation(scores: Sequence[float], lengths: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None where one side does not vary."""
    if np.ptp(scores) == 0 or np.ptp(lengths) == 0:
        return None
    return float(stats.spearmanr(scores, lengths).statistic)


def percent(level: float) -> str:
    """An interval's level as text: "95%", "98.3%"."""
    return f"{100 * level:.3g}%"


def interval(low: float, high: float, sign: str = "+") -> str:
    """An interval as text."""
    return f"{low:{sign}.3f} to {high:{sign}.3f}"


def interval_of(found: dict[str, float | None], sign: str = "+") -> str:
    """An estimate, as a plain object, with its interval if it has one."""
    within = "" if found["low"] is None else f" ({interval(found['low'], found['high'], sign)})"
    return f"{found['value']:{sign}.3f}{within}"


# --- texts -----------------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Words and single signs, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.casefold())


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def distinct(texts: Sequence[str], n: int) -> float:
    """Distinct-n (Li et al. 2016, arXiv 1510.03055): different n-grams of words / all n-grams, over all texts.

    Falls by itself with the amount of text: compare equal amounts. 0 where there is none.
    """
    grams = [gram for text in texts for gram in _grams(words_of(text), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(text: str, n: int = 4) -> float:
    """The share of a text's n-grams of words that it had said before (seq-rep-n, Welleck et al. 2020, arXiv
    1908.04319); 0 for fewer than n words."""
    grams = _grams(words_of(text), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0

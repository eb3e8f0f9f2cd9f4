"""Win rates, confidence intervals over prompts and over seeds, and text statistics."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

RESAMPLES = 5000
LEVEL = 0.95
A_SHARE = (0.0, 1.0)  # range of a win rate
EVEN = 0.5  # win rate of two equal models
OVER_SEEDS, OVER_PROMPTS = "seeds and prompts", "prompts"  # what was resampled


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


def level_of_each(comparisons: int) -> float:
    """Returns the level of each of several intervals such that all hold together at LEVEL (Bonferroni correction)."""
    return 1 - (1 - LEVEL) / max(comparisons, 1)


def over_prompts(
    values: Sequence[float],
    seed: int,
    null: float = 0.0,
    limits: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> Estimate:
    """Returns the mean of one value per prompt (P,) with a bootstrap interval over prompts (BCa, Efron 1987).

    A bootstrap interval of few values is too narrow (Hesterberg 2015, "What Teachers Should Know About the
    Bootstrap"), so its distance from the mean is multiplied by t / z at P - 1 degrees of freedom and by
    sqrt(P / (P - 1)): 1.10 for 20 prompts, 1.01 for 128. A single prompt has no interval. If all values are equal, one
    prompt with the opposite value is added, because a bootstrap of equal values has no width.

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
        if mean == null:
            return Estimate(mean, mean, mean)
        values = np.append(values, 2 * null - mean)
    found = _bootstrapped(values, "BCa", seed, level)
    if not np.isfinite(found).all():
        found = _bootstrapped(values, "percentile", seed, level)
    count = len(values)
    return _widened(mean, found, np.sqrt(count / (count - 1)) * _student(count - 1, level), limits)


def _bootstrapped(values: np.ndarray, method: str, seed: int, level: float) -> np.ndarray:
    """Returns both ends of scipy's bootstrap interval of the mean; nan if the method fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # the result is nan then
        rng = np.random.default_rng(seed)
        found = stats.bootstrap(
            (values,), np.mean, n_resamples=RESAMPLES, confidence_level=level, method=method, rng=rng
        )
    return np.array(found.confidence_interval)


def _student(freedom: float, level: float) -> float:
    """Returns t / z: the ratio of an interval's width with Student's t to that with the normal distribution."""
    return float(stats.t.ppf((1 + level) / 2, freedom) / stats.norm.ppf((1 + level) / 2))


def _widened(mean: float, interval: np.ndarray, factor: float, limits: tuple[float, float] | None) -> Estimate:
    """Multiplies the interval's distance from the mean by `factor` and cuts it off at `limits`."""
    low, high = mean + (interval - mean) * factor
    if limits is not None:
        low, high = max(low, limits[0]), min(high, limits[1])
    return Estimate(mean, float(low), float(high))


def over_seeds(
    values: np.ndarray, seed: int, limits: tuple[float, float] | None = None, level: float = LEVEL
) -> Estimate | None:
    """Returns the mean of `values` with a hierarchical bootstrap interval over seeds and prompts.

    The seeds of each group and the prompts, which all models share, are resampled independently with replacement
    (Saravanan et al. 2020, "Application of the hierarchical bootstrap"; Agarwal et al. 2021, arXiv 2108.13264, for few
    runs). A group with one seed is treated as a fixed model, for example the start model.

    With few seeds a plain bootstrap interval is too narrow. It underestimates the variance by (S - 1) / S, so the
    deviations are multiplied by sqrt(S / (S - 1)). It has normal tails, so the interval is widened by t / z at
    Satterthwaite's degrees of freedom of the variance components (seeds: S - 1, prompts: P - 1).

    `values` is (S, T, P): seeds of the first group, seeds of the second group, prompts. Returns None if both groups
    have one seed. There is no interval for one prompt, or if all values are equal and not 0.
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
    """Returns the mean of values (S, T, P) with its interval, and the name of what was resampled.

    Seeds and prompts are resampled if each trained group has at least two seeds. `fixed_other` means that the second
    group was not trained. Otherwise only prompts are resampled, and the interval holds for these runs only. The other
    arguments are those of `over_prompts`.
    """
    if values.shape[0] < 2 or (values.shape[1] < 2 and not fixed_other):
        return over_prompts(values.mean(axis=(0, 1)), seed, null, limits, level), OVER_PROMPTS
    return over_seeds(values, seed, limits, level), OVER_SEEDS


def win_rates(one: np.ndarray, another: np.ndarray) -> np.ndarray:
    """Returns per prompt (P,) the share of pairs in which `one` (P, K) beats `another` (P, L); a tie counts half."""
    a, b = np.asarray(one)[:, :, None], np.asarray(another)[:, None, :]
    return ((a > b) + 0.5 * (a == b)).mean(axis=(1, 2))


def ranks(scores: Sequence[float]) -> list[tuple[int, str]]:
    """Returns the rank (1 is the best; equal scores share a rank) and BEST, MEDIUM or WORST for each completion.

    All completions with the highest score are BEST. All others with the lowest score are WORST.
    """
    places = stats.rankdata([-s for s in scores], method="min").astype(int).tolist()
    last = max(places)
    return [(place, "BEST" if place == 1 else "WORST" if place == last else "MEDIUM") for place in places]


def correlation(scores: Sequence[float], lengths: Sequence[float]) -> float | None:
    """Returns Spearman's rank correlation; None if all scores or all lengths are equal."""
    if np.ptp(scores) == 0 or np.ptp(lengths) == 0:
        return None
    return float(stats.spearmanr(scores, lengths).statistic)


def percent(level: float) -> str:
    """Formats an interval's level, such as "95%" or "98.3%"."""
    return f"{100 * level:.3g}%"


def interval(low: float, high: float, sign: str = "+") -> str:
    """Formats an interval."""
    return f"{low:{sign}.3f} to {high:{sign}.3f}"


def interval_of(found: dict[str, float | None], sign: str = "+") -> str:
    """Formats an estimate, given as a dictionary, with its interval if it has one."""
    within = "" if found["low"] is None else f" ({interval(found['low'], found['high'], sign)})"
    return f"{found['value']:{sign}.3f}{within}"


# --- texts -----------------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Returns words and single punctuation characters in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.casefold())


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def distinct(texts: Sequence[str], n: int) -> float:
    """Returns distinct-n (Li et al. 2016, arXiv 1510.03055): unique word n-grams / all word n-grams, over all texts.

    It falls with the amount of text, so compare equal amounts. It is 0 if there are no n-grams.
    """
    grams = [gram for text in texts for gram in _grams(words_of(text), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(text: str, n: int = 4) -> float:
    """Returns the share of a text's word n-grams that are repetitions; 0 for fewer than n words.

    This is seq-rep-n of Welleck et al. 2020, arXiv 1908.04319.
    """
    grams = _grams(words_of(text), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0

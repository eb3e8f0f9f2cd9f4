"""Win rates, confidence intervals over prompts and over seeds, and text statistics.

NaN means that a completion has no score, because no function applies to it. It is left out of every figure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rlhf.utils.intervals import LEVEL, RESAMPLES, Estimate, interval, over_prompts, student_ratio, widened_interval

A_SHARE = (0.0, 1.0)  # range of a win rate
EVEN = 0.5  # win rate of two equal models
ROUNDING = 1e-9  # largest relative difference of values that are equal
FEW_SCORED = ("no prompt has a score in every run", "only one prompt has a score in every run")  # no interval
OVER_SEEDS, OVER_PROMPTS = "seeds and prompts", "prompts"  # what was resampled


def scored(values: np.ndarray) -> np.ndarray:
    """Returns the values of the completions that have a score, in one dimension."""
    return values[~np.isnan(values)]


def per_prompt(values: np.ndarray) -> np.ndarray:
    """Returns the mean of each prompt's scored completions: (P, K) -> (P,); NaN for a prompt without any."""
    missing = np.isnan(values)
    with np.errstate(invalid="ignore"):  # 0 / 0
        return np.where(missing, 0, values).sum(axis=1) / (~missing).sum(axis=1)


def paired(values: np.ndarray) -> np.ndarray:
    """Returns the values (..., P) of the prompts that have a value everywhere."""
    known = ~np.isnan(values).any(axis=tuple(range(values.ndim - 1)))
    return np.ascontiguousarray(values[..., known])  # sums depend on the order in memory, in their last bits


def level_of_each(comparisons: int) -> float:
    """Returns the level of each of several intervals such that all hold together at LEVEL (Bonferroni correction)."""
    return 1 - (1 - LEVEL) / max(comparisons, 1)


def over_seeds(
    values: np.ndarray,
    seed: int,
    null: float = 0.0,
    limits: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> Estimate | None:
    """Returns the mean of `values` with a hierarchical bootstrap interval over seeds and prompts.

    The seeds of each group and the prompts, which all models share, are resampled independently with replacement
    (Saravanan et al. 2020, "Application of the hierarchical bootstrap"; Agarwal et al. 2021, arXiv 2108.13264, for few
    runs). A group with one seed is treated as a fixed model, for example the start model.

    With few seeds a plain bootstrap interval is too narrow. It underestimates the variance by (S - 1) / S, so the
    deviations are multiplied by sqrt(S / (S - 1)). It has normal tails, so the interval is widened by t / z at
    Satterthwaite's degrees of freedom of the variance components (seeds: S - 1, prompts: P - 1).

    `values` is (S, T, P): seeds of the first group, seeds of the second group, prompts. Returns None if both groups
    have one seed. There is no interval for one prompt. If neither seeds nor prompts differ, the interval is that of
    `over_prompts`, whose arguments the others are.
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
    if total <= (ROUNDING * mean) ** 2:
        return over_prompts(np.full(prompts, mean), seed, null, limits, level)
    freedom = total**2 / sum(variance**2 / df for variance, df in parts)
    ends = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return widened_interval(mean, ends, student_ratio(freedom, level), limits)


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
    return over_seeds(values, seed, null, limits, level), OVER_SEEDS


def win_rates(one: np.ndarray, another: np.ndarray) -> np.ndarray:
    """Returns per prompt (P,) the share of pairs in which `one` (P, K) beats `another` (P, L); a tie counts half.

    NaN for a prompt without a pair of scored completions.
    """
    a, b = np.asarray(one)[:, :, None], np.asarray(another)[:, None, :]
    pairs = (~np.isnan(a) & ~np.isnan(b)).sum(axis=(1, 2))
    with np.errstate(invalid="ignore"):  # 0 / 0
        return ((a > b) + 0.5 * (a == b)).sum(axis=(1, 2)) / pairs


def ranks(scores: Sequence[float]) -> list[tuple[int | None, str | None]]:
    """Returns the rank (1 is the best; equal scores share a rank) and BEST, MEDIUM or WORST for each completion.

    All completions with the highest score are BEST. All others with the lowest score are WORST. (None, None) for a
    completion without a score.
    """
    known = [-s for s in scores if not np.isnan(s)]
    places = stats.rankdata(known, method="min").astype(int).tolist()
    last = max(places, default=0)
    labels = ((place, "BEST" if place == 1 else "WORST" if place == last else "MEDIUM") for place in places)
    return [(None, None) if np.isnan(s) else next(labels) for s in scores]


def correlation(scores: Sequence[float], lengths: Sequence[float]) -> float | None:
    """Returns Spearman's rank correlation over the scored completions; None if all scores or all lengths are equal, or
    there is no score."""
    known = ~np.isnan(scores)
    scores, lengths = np.asarray(scores)[known], np.asarray(lengths)[known]
    if len(scores) == 0 or np.ptp(scores) == 0 or np.ptp(lengths) == 0:
        return None
    return float(stats.spearmanr(scores, lengths).statistic)


def percent(level: float) -> str:
    """Formats an interval's level, such as "95%" or "98.3%"."""
    return f"{100 * level:.3g}%"


def interval_of(found: dict[str, float | None], sign: str = "+") -> str:
    """Formats an estimate, given as a dictionary, with its interval if it has one."""
    if found["value"] is None:
        return "-"
    within = "" if found["low"] is None else f" ({interval(found['low'], found['high'], sign)})"
    return f"{found['value']:{sign}z.3f}{within}"


RESULTS = {
    "better": "better than",
    "worse": "worse than",
    "equal": "no significant difference to",
    "unknown": "not comparable with",
}


@dataclass(frozen=True)
class Contrast:
    """The difference between a group and another group or the start model, by one of GenerationResults.measures."""

    name: str  # "ONE - OTHER"
    measure: str
    difference: Estimate
    win_rate: Estimate
    over: str  # what was resampled for the intervals
    level: float  # confidence level of the intervals

    @property
    def text(self) -> str:
        """The difference with its interval, as text."""
        value, low, high = self.difference.value, self.difference.low, self.difference.high
        if low is None:
            return FEW_SCORED[not np.isnan(value)]
        of = f"{percent(self.level)} confidence interval over {self.over}"
        return f"{value:+z.3f} ({of}: {interval(low, high)})"

    @property
    def result(self) -> str:
        """One of the keys of RESULTS; "unknown" for fewer than two prompts, which have no interval."""
        if not self.difference.excludes(0):
            return "unknown" if self.difference.low is None else "equal"
        return "better" if self.difference.value > 0 else "worse"

    @property
    def where(self) -> str:
        """The beginning of a sentence on a difference that holds for these runs only; otherwise empty."""
        return "In these runs " if self.result in ("better", "worse") and self.over == OVER_PROMPTS else ""


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

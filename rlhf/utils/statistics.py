"""Statistics of scores: means over prompts and over seeds with their intervals, power, pass@k, ranks.

Scores are numpy arrays: (P, K) for K completions of each of P prompts, (S, T, P) for seeds of two groups and prompts.
NaN means that a completion has no score, because no function applies to it. It is left out of every figure.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np

from rlhf.utils.console import number

LEVEL = 0.95
RESAMPLES = 5000
QUANTILES = 2.80158  # 1.95996 + 0.84162, those of the normal distribution at 97.5% and 80%
A_SHARE = (0.0, 1.0)  # range of a share or a win rate
ROUNDING = 1e-9  # largest relative difference of values that are equal
# what intervals are over
OVER_SEEDS = "seeds and prompts"
OVER_PROMPTS = "prompts"
FOUND = 0.8  # power: the share of comparisons that find a difference
MOST_SEEDS = 100  # per group
MOST_PROMPTS = 100_000


def few_scored(prompts: int, measure: str) -> str:
    """Return why there is no interval: 0 or 1 `prompts` have values of the measure."""
    which = "only one prompt has" if prompts else "no prompt has"
    return f"{which} a {'score' if measure == 'score' else 'rating'} in every run"


def scored(values: np.ndarray) -> np.ndarray:
    """Return the values of the completions that have a score, in one dimension."""
    return values[~np.isnan(values)]


def is_binary(values: np.ndarray) -> bool:
    """Return True if there are scores, and all are 0 or 1, as those of a checker."""
    known = scored(values)
    return bool(known.size and np.isin(known, (0, 1)).all())


def per_prompt(values: np.ndarray, exact: bool = False) -> np.ndarray:
    """Return the mean of each prompt's scored completions: (P, K) -> (P,); NaN for a prompt without any.

    Training stores `exact` means, whose sums are rounded once. Comparisons store numpy's, which can differ in the last
    bit, and an interval then in its fourth digit, because prompts with equal changes have different ones.
    """
    if exact:
        return np.array([fmean(known) if known.size else math.nan for known in map(scored, values)])
    missing = np.isnan(values)
    with np.errstate(invalid="ignore"):  # 0 / 0
        return np.where(missing, 0, values).sum(axis=1) / (~missing).sum(axis=1)


def paired(values: np.ndarray) -> np.ndarray:
    """Return the values (..., P) of the prompts that have a value everywhere."""
    known = ~np.isnan(values).any(axis=tuple(range(values.ndim - 1)))
    return np.ascontiguousarray(values[..., known])  # sums depend on the order in memory, in their last bits


# --- intervals over prompts ------------------------------------------------------------------------------------------


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
    if is_constant(values):
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


# --- intervals over seeds and prompts ------------------------------------------------------------------------------


def level_of_each(comparisons: int) -> float:
    """Return the level of each of several intervals such that all hold together at LEVEL (Bonferroni correction)."""
    return 1 - (1 - LEVEL) / max(comparisons, 1)


class Sources(NamedTuple):
    """What a mean over seeds and prompts varies with: seeds of each trained group, then prompts. All are (G + 1,)."""

    variances: np.ndarray  # of the mean; those of seeds include their noise
    noise: np.ndarray  # the part of `variances` that comes from differences between seeds on single prompts
    freedom: np.ndarray  # degrees of freedom

    @property
    def of_prompts(self) -> float:
        """The variance of the mean over prompts alone."""
        return self.variances[-1] + self.noise.sum()

    def half_width(self, level: float) -> float:
        """Return half the width of the interval of the mean.

        Each source alone has the half-width t(df) x standard error. The squares are added, which is never too narrow
        for independent normal sources (Banerjee 1961, Sankhya A 23), but too wide if several sources matter. So each
        source's degrees of freedom are divided by the root of its share in the sum: nothing changes if it dominates.
        The interval is at least as wide as over prompts alone.
        """
        from scipy import special  # slow, and a plan needs none of it

        quantile = (1 + level) / 2
        alone = self.variances * special.stdtrit(self.freedom, quantile) ** 2  # stdtrit: Student's t
        known = alone > 0
        freedom = self.freedom[known] / np.sqrt(alone[known] / alone.sum())
        together = (self.variances[known] * special.stdtrit(freedom, quantile) ** 2).sum()
        return float(np.sqrt(max(together, self.of_prompts * special.stdtrit(self.freedom[-1], quantile) ** 2)))

    def visible(self, level: float) -> float:
        """Return the true difference that the interval excludes 0 for in 80% of comparisons (noncentral t)."""
        from scipy import special, stats  # slow, and a plan needs none of it

        total = self.of_prompts
        freedom = self.freedom[-1]
        if self.variances.sum() > total:
            total = self.variances.sum()
            freedom = total**2 / (self.variances**2 / self.freedom).sum()
        error = np.sqrt(total)
        typical = np.sqrt(freedom / stats.chi2.median(freedom))  # most estimated variances are too small
        return float(typical * error * special.nctdtrinc(freedom, 1 - FOUND, self.half_width(level) / error))

    def with_seeds(self, seeds: int) -> Sources:
        """Return the sources with another number of seeds in each trained group."""
        ratio = np.append((self.freedom[:-1] + 1) / seeds, 1.0)
        freedom = np.append(np.full(len(ratio) - 1, seeds - 1), self.freedom[-1])
        return Sources(self.variances * ratio, self.noise * ratio, freedom)

    def with_prompts(self, prompts: int) -> Sources:
        """Return the sources with another number of prompts. Of the seeds' variance only the noise depends on it."""
        ratio = (self.freedom[-1] + 1) / prompts
        variances = self.variances - np.minimum(self.noise, self.variances) * (1 - ratio)
        variances[-1] = self.variances[-1] * ratio
        return Sources(variances, self.noise * ratio, np.append(self.freedom[:-1], prompts - 1))


def sources_of(values: np.ndarray) -> Sources:
    """Return the sources of variance of the mean of values (S, T, P); an axis of length 1 is a fixed model.

    The variance of the prompts' means also contains the seeds' noise, which is subtracted, so that it counts once.
    """
    prompts = values.shape[2]
    found = []
    for axis in (0, 1):
        of_seed = values.mean(axis=1 - axis)  # (S, P) or (T, P)
        if (count := len(of_seed)) > 1:
            rest = of_seed - of_seed.mean(axis=0) - of_seed.mean(axis=1, keepdims=True) + of_seed.mean()
            noise = (rest**2).sum() / (count - 1) / (prompts - 1) / prompts / count
            found.append((of_seed.mean(axis=1).var(ddof=1) / count, noise, count - 1))
    of_prompts = values.mean(axis=(0, 1)).var(ddof=1) / prompts
    found.append((max(of_prompts - sum(noise for _, noise, _ in found), 0), 0, prompts - 1))
    return Sources(*np.array(found, dtype=float).T)


def over_seeds(
    values: np.ndarray,
    seed: int,
    trained: tuple[bool, bool] = (True, True),
    limits: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> tuple[Estimate, str]:
    """Return the mean of `values` with its interval, and the name of what the interval is over.

    `values` is (S, T, P): seeds of the first group, seeds of the second group, prompts. `trained` tells whether these
    groups are trained; a baseline is not, and one model stands for it. If each trained group has at least two seeds,
    the interval is over seeds and prompts, which are independent sources of variance; otherwise it is over prompts,
    and holds for these runs only. It is also over prompts, and has the other name, if neither seeds nor prompts
    differ. There is no interval for one prompt. The other arguments are those of `over_prompts`.

    In simulations of two equal groups of 2 to 5 seeds, at most 5.2% of the intervals exclude 0 (level 95%; see
    docs/decisions/evaluation.md), also if one group's spread is ten times the other's.
    """
    if of_runs_only(values, trained):
        return over_prompts(values.mean(axis=(0, 1)), seed, limits, level), OVER_PROMPTS
    mean = float(values.mean())
    prompts = values.shape[2]
    if prompts < 2 or not np.isfinite(mean) or is_constant(values):
        return over_prompts(np.full(prompts, mean), seed, limits, level), OVER_SEEDS
    half = sources_of(values).half_width(level)
    return cut_off(mean, mean - half, mean + half, limits), OVER_SEEDS


def is_constant(values: np.ndarray) -> bool:
    """True if all values are equal up to rounding."""
    return bool(np.ptp(values) <= ROUNDING * np.abs(values).max())


def of_runs_only(values: np.ndarray, trained: tuple[bool, bool]) -> bool:
    """True if values (S, T, P) hold for these runs only: no group is trained, or a trained one has a single seed."""
    return min((n for n, is_trained in zip(values.shape, trained, strict=False) if is_trained), default=1) < 2


# --- power -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Power:
    """What a comparison can find, and what a new run would give."""

    # smallest difference found with 80% power; infinite: none that is possible; None: fewer than two prompts, or all
    # values 0
    visible: float | None
    seeds: int | None  # per trained group, with which the observed difference is found with 80% power; None: above 100
    first_wins: float | None  # probability that a new run of the first group has the higher mean on these prompts
    prompts: int | None = None  # with which the observed difference is found with 80% power; None: above 100,000


def power_of(
    values: np.ndarray, trained: tuple[bool, bool], level: float, limits: tuple[float, float] | None = None
) -> Power:
    """Return the power of the comparison with values (S, T, P) and an interval as in `over_seeds`.

    The variances are estimates, so with few seeds all figures are rough (docs/decisions/evaluation.md).

    If a trained group has one seed, only prompts vary: `visible` then holds for these runs, and the others are None,
    as they are for two baselines. If all values are equal, one prompt with the opposite value is added. `limits` is
    the range of possible differences.
    """
    values = np.asarray(values, dtype=float)
    if values.shape[2] < 2 or not np.isfinite(values).all() or not values.any():
        return Power(None, None, None)
    mean = values.mean()
    only = of_runs_only(values, trained)
    if only:
        values = values.mean(axis=(0, 1), keepdims=True)
    if is_constant(values):
        values = np.append(values, -values[:, :, :1], axis=2)
    found = sources_of(values)
    visible = found.visible(level)
    if limits is not None and visible > limits[1]:
        visible = math.inf
    prompts = _enough(mean, range(2, MOST_PROMPTS + 1), lambda n: found.with_prompts(n).visible(level))
    if only:
        return Power(visible, None, None, prompts)
    seeds = _enough(mean, range(2, MOST_SEEDS + 1), lambda n: found.with_seeds(n).visible(level))
    return Power(visible, seeds, _first_wins(mean, found), prompts)


def _enough(mean: float, counts: range, visible: Callable[[int], float]) -> int | None:
    """Return the smallest of `counts` with which a difference of `mean` is visible; None if none is enough."""
    at = bisect_left(counts, -abs(mean), key=lambda count: -visible(count))
    return counts[at] if at < len(counts) else None


def _first_wins(mean: float, found: Sources) -> float:
    """Return the probability that the difference of two new runs is above 0, from Student's predictive distribution.

    Its variance is that of the observed mean, plus that of one new run per trained group without its noise (clipped at
    0). The degrees of freedom are those of the smaller group.
    """
    from scipy import stats  # slow, and a plan needs none of it

    variances = found.variances[:-1]
    noise = found.noise[:-1]
    freedom = found.freedom[:-1]
    total = max(variances.sum(), noise.sum())
    if total == 0:
        return float((np.sign(mean) + 1) / 2)
    of_new = (np.maximum(variances - noise, 0) * (freedom + 1)).sum()
    return float(stats.t.cdf(mean / np.sqrt(total + of_new), freedom.min()))


def win_rates(one: np.ndarray, another: np.ndarray) -> np.ndarray:
    """Return per prompt (P,) the share of pairs in which `one` (P, K) beats `another` (P, L); a tie counts half.

    NaN for a prompt without a pair of scored completions.
    """
    a = np.asarray(one)[:, :, None]
    b = np.asarray(another)[:, None, :]
    pairs = (~np.isnan(a) & ~np.isnan(b)).sum(axis=(1, 2))
    with np.errstate(invalid="ignore"):  # 0 / 0
        return ((a > b) + 0.5 * (a == b)).sum(axis=(1, 2)) / pairs


# --- the completions of a prompt -------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for one prompt: the probability that at least one of k completions is
    right.

    pass@k = 1 - C(n - c, k) / C(n, k)        (Chen et al. 2021, arXiv 2107.03374, eq. 1)

    It is the share of all subsets of k of the n completions that contain a right one. It is computed as a product of
    ratios below 1, because the binomial coefficients may be larger than the largest float. Raises ValueError if k is
    not in 1..n or c is not in 0..n.

    Args:
        n: number of completions of the prompt.
        c: number of right ones among them.
        k: number of attempts.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    # C(n - c, k) / C(n, k) = prod_{i = n - c + 1}^{n} (1 - k / i)
    none_right = 1.0
    for i in range(n - c + 1, n + 1):
        none_right *= 1 - k / i
    return 1 - none_right


def mean_pass_at_k(values: np.ndarray, samples: int) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, ... and `samples`: the mean over the prompts with at least k scored completions.

    Args:
        values: 0 or 1 of each completion (P, K).
        samples: the largest k.
    """
    counts = [(row.size, int(row.sum())) for row in map(scored, values)]
    found = {k: [pass_at_k(n, c, k) for n, c in counts if n >= k] for k in attempts(samples)}
    return {k: fmean(values) for k, values in found.items() if values}


def attempts(n: int) -> list[int]:
    """Return the k for which pass@k of n completions is reported: 1, 2, 4, ... and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


def learning_signal(scores: Sequence[float]) -> float:
    """Return the variance of the score within a prompt. For scores 0 and 1 with a pass rate p it estimates p (1 - p):
    with c of n solved it is c (n - c) / (n (n - 1)).

    The policy can improve by at least an amount that grows with p (1 - p) (Bae et al. 2025, "Online Difficulty
    Filtering for Reasoning Oriented Reinforcement Learning", arXiv 2504.03380).
    """
    return variance(scores)


def no_difference(scores: Sequence[float], size: int) -> float:
    """Return the probability that all scores of a group of `size` completions are equal: sum over the distinct scores
    of C(c, size) / C(n, size), if c of n completions have that score. For 0 and 1 with c solved:
    [C(c, K) + C(n - c, K)] / C(n, K). Needs n >= size."""
    return sum(math.comb(count, size) for count in Counter(scores).values()) / math.comb(len(scores), size)


def all_equal_to(scores: Sequence[float], value: float, size: int) -> float:
    """Return the probability that all completions of a group of `size` have this score. Needs n >= size."""
    return math.comb(sum(score == value for score in scores), size) / math.comb(len(scores), size)


def ranks(scores: Sequence[float]) -> list[tuple[int | None, str | None]]:
    """Return the rank (1 is the best; equal scores share a rank) and a label for each completion.

    All completions with the highest score are BEST. All others with the lowest score are WORST. If all scores of
    several completions are equal, they are EQUAL. (None, None) for a completion without a score.
    """
    from scipy import stats  # slow, and a plan needs none of it

    known = [-s for s in scores if not np.isnan(s)]
    places = stats.rankdata(known, method="min").astype(int).tolist()
    last = max(places, default=0)
    best = "EQUAL" if last == 1 and len(known) > 1 else "BEST"
    labels = ((place, best if place == 1 else "WORST" if place == last else "MEDIUM") for place in places)
    return [(None, None) if np.isnan(s) else next(labels) for s in scores]


def correlation(scores: Sequence[float], lengths: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation over the scored completions; None if all scores or all lengths are equal, or
    there is no score."""
    from scipy import stats  # slow, and a plan needs none of it

    known = ~np.isnan(scores)
    scores = np.asarray(scores)[known]
    lengths = np.asarray(lengths)[known]
    if len(scores) == 0 or is_constant(scores) or is_constant(lengths):
        return None
    return float(stats.spearmanr(scores, lengths).statistic)


# --- as text ---------------------------------------------------------------------------------------------------------


def interval(low: float, high: float, sign: str = "+") -> str:
    """Formats an interval."""
    return f"{number(low, 3, sign)} to {number(high, 3, sign)}"


def percent(level: float) -> str:
    """Formats an interval's level, such as "95%" or "98.3%"."""
    return f"{100 * level:.3g}%"


def interval_of(found: dict[str, float | None], sign: str = "+") -> str:
    """Formats an estimate, given as a dictionary, with its interval if it has one."""
    if found["value"] is None:
        return "-"
    within = "" if found["low"] is None else f" ({interval(found['low'], found['high'], sign)})"
    return f"{number(found['value'], 3, sign)}{within}"


# --- differences -----------------------------------------------------------------------------------------------------

RESULTS = {
    "better": "better than",
    "worse": "worse than",
    "equal": "no significant difference to",
    "unknown": "not comparable with",
}


@dataclass(frozen=True)
class Contrast:
    """The difference between two groups, or a group and a baseline, by one of Evaluation.measures."""

    name: str  # "ONE - OTHER"
    measure: str
    difference: Estimate
    win_rate: Estimate
    power: Power  # of the difference
    over: str  # what the intervals are over
    level: float  # confidence level of the intervals

    @property
    def text(self) -> str:
        """The difference with its interval, as text."""
        value = self.difference.value
        low = self.difference.low
        high = self.difference.high
        if low is None:
            same = "the difference is 0 on every prompt, so there is no interval"
            return same if value == 0 else few_scored(int(not np.isnan(value)), self.measure)
        of = f"{percent(self.level)} confidence interval over {self.over}"
        return f"{number(value, 3, '+')} ({of}: {interval(low, high)})"

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


def contrast_of(
    name: str,
    measure: str,
    one: Sequence[np.ndarray],
    other: Sequence[np.ndarray],
    seed: int,
    trained: tuple[bool, bool] = (True, True),
    level: float = LEVEL,
) -> Contrast:
    """Computes the difference and the win rate of two groups, with intervals as in `over_seeds`.

    Prompts without a scored completion in every model are left out; without any prompt the values are NaN. `one` and
    `other` are the scores or ratings (P, K) of each model; the other arguments are those of `over_seeds`.
    """
    gaps = paired(np.array([[_gaps(a, b) for b in other] for a in one]))  # (S, T, P)
    wins = paired(np.array([[win_rates(a, b) for b in other] for a in one]))
    difference = Estimate(math.nan)
    win_rate = Estimate(math.nan)
    over = OVER_PROMPTS
    limits = None
    if gaps.size:
        limits = share_limits(np.hstack([*one, *other]))
        difference, over = over_seeds(gaps, seed, trained, limits, level)
        win_rate, _ = over_seeds(wins, seed, trained, A_SHARE, level)
    return Contrast(name, measure, difference, win_rate, power_of(gaps, trained, level, limits), over, level)


def _gaps(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the difference of two models' means of each prompt (P,): 0 for means that are equal up to rounding, which
    depends on the order of the completions."""
    gaps = per_prompt(one) - per_prompt(other)
    largest = np.fmax.reduce(np.abs(np.hstack([one, other])), axis=1)  # without NaN
    return np.where(np.abs(gaps) <= ROUNDING * largest, 0, gaps)

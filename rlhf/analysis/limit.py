"""The best score that a policy can reach at a KL from the start model, and best-of-n, from the start model's samples.

For one prompt, the policy with the best mean score at a KL is the start model tilted by exp(r / beta) (arXiv
2605.07105). One beta for all prompts gives the best mean over prompts. The limit tilts each prompt separately: it is
an upper bound without generalization to other prompts.

Scores are (P, N): prompts, completions. A prompt with a completion without a score (NaN) is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from rlhf.utils.intervals import LEVEL

EFFECTIVE = 20  # smallest effective sample size per prompt; for 0/1 rewards half of n is enough
STEP = 1.02  # ratio of neighbouring values of 1 / beta; 1.06 makes the score too high by more than a narrow interval
POINTS = 61  # of a line


@dataclass(frozen=True)
class Limit:
    """The best mean score for each KL. All arrays are (G,)."""

    kl: np.ndarray  # mean over prompts, nats per sequence, ascending from 0
    score: np.ndarray
    low: np.ndarray  # 95% interval of the score, from the uncertainty of the n samples of each of these prompts
    high: np.ndarray
    samples: int  # n per prompt
    exact: bool  # 0/1 rewards: log Z = log(1 - p + p e^(1 / beta)), with each prompt's pass rate p
    effective: np.ndarray  # effective sample size per prompt, see `jackknife`

    def at(self, kl: float) -> float | None:
        """Returns the best score at a KL; None beyond the line. A negative estimate of the KL counts as 0."""
        return float(np.interp(kl, self.kl, self.score)) if kl <= self.kl[-1] else None

    def share(self, start: float, score: float, kl: float) -> float | None:
        """Returns the share of the possible gain over the start model's score `start` that `score` reached.

        None beyond the line, and if `low` is not above `start`: the samples do not show that a gain is possible.
        """
        best = self.at(kl)
        if best is None or np.interp(kl, self.kl, self.low) <= start:
            return None
        return (score - start) / (best - start)


def log_partition(scores: np.ndarray, log_weights: np.ndarray, inverse_beta: float) -> np.ndarray:
    """Returns log Z = log E[e^(r / beta)] of each prompt (P,): self-normalized importance sampling (Owen, "Monte Carlo
    theory", 9.2). It is too low on average, because E[log mean] <= log E[mean]."""

    def log_sum(exponent: np.ndarray) -> np.ndarray:  # in less than half of the time of scipy's
        largest = exponent.max(axis=1, keepdims=True)
        return largest[:, 0] + np.log(np.exp(exponent - largest).sum(axis=1))

    return log_sum(log_weights + inverse_beta * scores) - log_sum(log_weights)


def best_scores(log_z: np.ndarray, inverse_beta: np.ndarray, kl: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best score at each KL (G,) and the index of its beta, from log Z (B,), the mean over prompts.

    No policy scores more than beta (KL + log Z), for any beta (Gibbs' variational principle). The tilted policy of one
    beta reaches this bound, so the smallest bound is the limit.
    """
    bounds = (kl[:, None] + log_z) / inverse_beta  # (G, B)
    index = bounds.argmin(axis=1)
    return bounds[np.arange(len(kl)), index], index


def jackknife(scores: np.ndarray, log_weights: np.ndarray, inverse_beta: float) -> tuple[float, float, float]:
    """Returns the mean log Z without its bias in 1 / n, its standard error, and the effective sample size.

    Delete-one jackknife (Efron 1982) in closed form. The effective sample size (sum w)^2 / sum w^2 of a prompt gives
    its bias, about -1/2 (1 / effective - 1 / n). So the mean over prompts is the harmonic one.
    """
    tilted, share = (special.softmax(log_weights + tilt * scores, axis=1) for tilt in (inverse_beta, 0))
    # log Z without one sample - log Z: one sample may have all the weight
    change = np.subtract(*(np.log(np.maximum(1 - weights, np.finfo(float).eps)) for weights in (tilted, share)))
    last = scores.shape[1] - 1
    log_z = log_partition(scores, log_weights, inverse_beta) - last * change.mean(axis=1)
    error = np.sqrt(last * change.var(axis=1).sum()) / len(scores)
    return log_z.mean(), error, 1 / (tilted**2).sum(axis=1).mean()


def sweep(scores: np.ndarray, log_weights: np.ndarray, least: float) -> np.ndarray:
    """Returns 1 / beta and the results of `jackknife` (4, B), down to an effective sample size of `least`.

    1 / beta begins where the policy is the start model, and ends at the latest where it is each prompt's best sample.
    """
    spread = np.ptp(scores, axis=1)
    widest = spread.max() or 1.0
    smallest = spread[spread > 1e-6 * widest].min(initial=np.inf)
    tilt, rows = 0.01 / widest, []
    while not rows or (rows[-1][-1] >= least and tilt * smallest < 30):
        rows.append((tilt, *jackknife(scores, log_weights, tilt)))
        tilt *= STEP
    return np.transpose(rows)


def limit_of(scores: np.ndarray, log_weights: np.ndarray | None = None) -> Limit | None:
    """Returns the limit, estimated from n samples per prompt (P, n); None if no prompt has all scores.

    The line ends at the beta where the effective sample size falls below EFFECTIVE. It has KL 0 alone if n is 20 or
    less, except for 0/1 rewards.

    Args:
        scores: of samples of the start model, or of the start model and other policies.
        log_weights: log pi_start(y) - log mixture(y), if there are other policies; the mixture is the mean density of
            all policies, by their shares of the n samples (balance heuristic, Owen 9.11).
    """
    known, n = ~np.isnan(scores).any(axis=1), scores.shape[1]
    if not known.any():
        return None
    log_weights = np.zeros(scores.shape)[known] if log_weights is None else log_weights[known]
    scores = scores[known]
    exact = bool(np.isin(scores, (0, 1)).all())
    least = min(EFFECTIVE, n / 2) if exact else EFFECTIVE
    inverse_beta, log_z, error, effective = sweep(scores, log_weights, least)
    end, inside = 0.0, effective >= least
    if inside.sum() > 1:
        # KL = score / beta - log Z, score = d log Z / d(1 / beta)
        end = (inverse_beta**2 * np.gradient(log_z / inverse_beta, inverse_beta))[inside].max()
    kl = end * np.linspace(0, 1, POINTS if end else 1) ** 2  # the score is about linear in the root of the KL
    score, index = best_scores(log_z, inverse_beta, kl)
    score[0] = (special.softmax(log_weights, axis=1) * scores).sum(axis=1).mean()
    half = stats.norm.ppf((1 + LEVEL) / 2) * (error / inverse_beta)[index]
    return Limit(kl, score, score - half, score + half, n, exact, effective[index])


@dataclass(frozen=True)
class BestOf:
    """Best-of-n of the start model: of n completions, the one with the highest score. Arrays are (N,)."""

    n: np.ndarray  # 1, 2, ... N
    kl: np.ndarray  # mean over prompts, nats per sequence; "at most" unless `exact`
    exact: bool  # 0/1 rewards
    measures: dict[str, np.ndarray]  # "score" and each judge: mean over prompts of the chosen completion

    def worth(self, measure: str, value: float) -> int | None:
        """Returns the smallest n whose mean by `measure` is at least `value`; None if there is none up to N."""
        return next((int(n) for n, mean in zip(self.n, self.measures[measure], strict=True) if mean >= value), None)


def best_of_n(scores: np.ndarray, judged: dict[str, np.ndarray]) -> BestOf | None:
    """Returns best-of-n by the scores (P, N), and by judges (P, N) of the completions that the score chooses.

    Each is the mean over all choices of n of the N samples, which is unbiased; equal scores share their chance. The KL
    is at most log n - (n - 1) / n (Beirami et al. 2024, arXiv 2401.01879); for 0/1 rewards, see `kl_of_passes`. None
    if no prompt has all scores and ratings.
    """
    values = np.stack([scores, *judged.values()])  # (J, P, N)
    values = values[:, ~np.isnan(values).any(axis=(0, 2))]
    if not values.size:
        return None
    scores, most = values[0], values.shape[2]
    n, drawn = np.arange(1, most + 1), np.arange(most)[:, None]
    # all n are from the j lowest samples in C(j, n) of C(N, n) choices; (N, N + 1): n, j
    below = np.cumprod(np.maximum(np.arange(most + 1) - drawn, 0) / (most - drawn), axis=0)
    means = np.zeros((len(values), most))
    for prompt, row in enumerate(scores):
        lower, upper = (np.searchsorted(np.sort(row), row, side) for side in ("left", "right"))
        chance = (below[:, upper] - below[:, lower]) / (upper - lower)  # (N, N): n, sample
        means += values[:, prompt] @ chance.T / len(scores)
    exact = bool(np.isin(scores, (0, 1)).all())
    kl = kl_of_passes(scores.sum(axis=1), most) if exact else np.log(n) - (n - 1) / n
    return BestOf(n, kl, exact, dict(zip(("score", *judged), means, strict=True)))


def kl_of_passes(passes: np.ndarray, most: int) -> np.ndarray:
    """Returns the mean KL (N,) of best-of-n for 0/1 rewards, from each prompt's passes (P,) of N samples.

    q = 1 - (1 - p)^n, KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), without the bias in 1 / N (jackknife).
    """

    def kl(p: np.ndarray) -> np.ndarray:
        q = 1 - (1 - p) ** np.arange(1, most + 1)[:, None]
        return special.rel_entr(q, p) + special.rel_entr(1 - q, 1 - p)

    p, fewer = passes / most, max(most - 1, 1)
    without = p * kl(np.maximum(passes - 1, 0) / fewer) + (1 - p) * kl(np.minimum(passes / fewer, 1))
    return (most * kl(p) - (most - 1) * without).mean(axis=1)


def best_of_blocks(scores: np.ndarray, n: int) -> np.ndarray:
    """Returns the index of the best completion of each block of n (P, N // n), the first of equal ones: samples of
    best-of-n. Samples after the last block are ignored. A block without scores (NaN) gives its first completion."""
    prompts, blocks = len(scores), scores.shape[1] // n
    cut = np.nan_to_num(scores, nan=-np.inf)[:, : blocks * n].reshape(prompts, blocks, n)
    return cut.argmax(axis=2) + n * np.arange(blocks)

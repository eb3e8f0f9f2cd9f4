"""The best score that any policy can reach at a KL from the start model, and best-of-n, from start model's samples.

For one prompt, the policy with the best mean score at a KL is the start model tilted by exp(r / beta) (arXiv
2605.07105; Gao et al. 2022, arXiv 2210.10760, compares with best-of-n). One beta for all prompts gives the best mean
over prompts. So the limit tilts each prompt separately: it is an upper bound without generalization to other prompts.

Scores are (P, N): prompts, completions. Prompts with a completion that has no score (NaN) are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from rlhf.utils.intervals import LEVEL

EFFECTIVE = 20  # smallest effective sample size per prompt; for 0/1 rewards half of n is enough
STEP = 1.06  # ratio of neighbouring values of 1 / beta
POINTS = 61  # of a line


@dataclass(frozen=True)
class Limit:
    """The best mean score for each KL. All arrays are (G,); there are none if no prompt has all scores."""

    kl: np.ndarray  # mean over prompts, nats per sequence, ascending from 0
    score: np.ndarray  # best mean score at that KL
    low: np.ndarray  # ends of the 95% interval: uncertainty of the n samples per prompt, for these prompts
    high: np.ndarray
    samples: int  # n per prompt
    exact: bool  # 0/1 rewards: E[e^(r / beta)] = 1 - p + p e^(1 / beta), with each prompt's pass rate p
    plug_in: dict[int, np.ndarray]  # other rewards: n -> uncorrected score at `kl` from n samples; shows the bias
    effective: np.ndarray  # effective sample size per prompt: harmonic mean over prompts

    def at(self, kl: float) -> float | None:
        """Returns the best score at a KL; None beyond the line. A negative estimate of a KL counts as 0."""
        return float(np.interp(kl, self.kl, self.score)) if self._within(kl) else None

    def share(self, start: float, score: float, kl: float) -> float | None:
        """Returns the share of the possible gain over the score `start` of the start model that `score` reached.

        None beyond the line, and if no gain is possible, or none that the samples show: `low` is not above `start`.
        """
        if not self._within(kl) or not np.interp(kl, self.kl, self.low) > start:
            return None
        return (score - start) / (self.at(kl) - start)

    def _within(self, kl: float) -> bool:
        return len(self.kl) > 0 and bool(kl <= self.kl[-1])


def log_partition(scores: np.ndarray, log_weights: np.ndarray, inverse_beta: float) -> np.ndarray:
    """Returns log Z = log E[e^(r / beta)] of each prompt (P,), by self-normalized importance sampling.

    Owen, "Monte Carlo theory, methods and examples", 9.2. The estimate is too low on average (Jensen's inequality).
    """
    tilted = special.logsumexp(log_weights + inverse_beta * scores, axis=1)
    return tilted - special.logsumexp(log_weights, axis=1)


def best_scores(log_z: np.ndarray, inverse_beta: np.ndarray, kl: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best score at each KL (G,), and the index of its beta, from log Z (B,), a mean over prompts.

    No policy scores more than beta (KL + log Z), for any beta (Gibbs' variational principle). The tilted
    policy reaches this bound for one beta, so the smallest bound is the limit, and an error of beta changes it little.
    """
    bounds = (kl[:, None] + log_z) / inverse_beta  # (G, B)
    index = bounds.argmin(axis=1)
    return bounds[np.arange(len(kl)), index], index


def jackknife(scores: np.ndarray, log_weights: np.ndarray, inverse_beta: float) -> tuple[float, float, float]:
    """Returns the mean log Z over prompts without its bias in 1 / n, its standard error, the effective sample size.

    Delete-one jackknife (Quenouille 1956; Efron 1982) in closed form. The effective sample size of a prompt is
    (sum w)^2 / sum w^2 (Kong 1992). The bias of log Z is about -1 / 2 (1 / effective - 1 / n), so the mean over
    prompts, whose bias is the curve's, is the harmonic one.
    """
    n = scores.shape[1]
    base = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    exponent = log_weights + inverse_beta * scores
    tilted = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    total, rest = tilted.sum(axis=1, keepdims=True), tilted.sum(axis=1, keepdims=True) - tilted
    largest = tilted.argmax(axis=1)[:, None]  # total - tilted cancels there
    others = np.where(np.arange(n) == largest, 0, tilted).sum(axis=1, keepdims=True)
    np.put_along_axis(rest, largest, np.maximum(others, np.finfo(float).tiny), axis=1)
    kept = 1 - base / base.sum(axis=1, keepdims=True)
    change = np.log(rest / total) - np.log(kept)  # (P, N): log Z without a sample - log Z
    mean = change.mean(axis=1)
    log_z = log_partition(scores, log_weights, inverse_beta) - (n - 1) * mean
    variance = (n - 1) * ((change - mean[:, None]) ** 2).mean(axis=1)
    effective = total[:, 0] ** 2 / (tilted**2).sum(axis=1)
    return log_z.mean(), np.sqrt(variance.sum()) / len(scores), 1 / np.mean(1 / effective)


def limit_of(scores: np.ndarray, log_weights: np.ndarray | None = None, seed: int = 0) -> Limit:
    """Returns the limit, estimated from M samples per prompt.

    The line ends at the beta where the effective sample size falls below EFFECTIVE. With 20 or fewer samples per
    prompt, it has KL 0 alone, except for 0/1 rewards.

    Args:
        scores: (P, M).
        log_weights: (P, M), log pi_start(y) - log mixture(y), if the samples are from the start model and from other
            policies; the mixture's density is the mean of theirs, by their shares of the M samples (balance
            heuristic, Owen 9.11). None: all samples are from the start model.
        seed: of the random division into parts, for `plug_in`.
    """
    known, n = ~np.isnan(scores).any(axis=1), scores.shape[1]
    if not known.any():
        return Limit(*[np.empty(0)] * 4, n, False, {}, np.empty(0))
    log_weights = np.zeros(scores.shape)[known] if log_weights is None else log_weights[known]
    scores = scores[known]
    exact = bool(np.isin(scores, (0, 1)).all())
    least = min(EFFECTIVE, n / 2) if exact else EFFECTIVE
    inverse_beta, log_z, error, effective = sweep(scores, log_weights, least)
    end = 0.0
    if (effective >= least).sum() > 1:
        # KL = r / beta - log Z = 1 / beta^2 d(beta log Z) / d(1 / beta)
        kl = inverse_beta**2 * np.gradient(log_z / inverse_beta, inverse_beta)
        end = kl[effective >= least].max()
    kl = end * np.linspace(0, 1, POINTS if end else 1) ** 2  # the score is about linear in the root of the KL
    score, index = best_scores(log_z, inverse_beta, kl)
    score[0] = (special.softmax(log_weights, axis=1) * scores).sum(axis=1).mean()
    half = stats.norm.ppf((1 + LEVEL) / 2) * (error / inverse_beta)[index]
    order, plug_in = np.random.default_rng(seed).permutation(n), {}
    for parts in () if exact else (4, 2, 1):
        blocks = order[: n - n % parts].reshape(parts, -1)
        uncorrected = [[log_partition(scores[:, b], log_weights[:, b], tilt).mean() for tilt in inverse_beta]
                       for b in blocks]  # fmt: skip
        plug_in[blocks.shape[1]] = best_scores(np.mean(uncorrected, axis=0), inverse_beta, kl)[0]
    return Limit(kl, score, score - half, score + half, n, exact, plug_in, effective[index])


def sweep(scores: np.ndarray, log_weights: np.ndarray, least: float) -> np.ndarray:
    """Returns 1 / beta and the three results of `jackknife` as rows (4, B), up to an effective sample size of `least`.

    1 / beta begins where the tilted policy is the start model, and grows by STEP. It ends at the latest where every
    prompt's policy chooses its best sample alone.
    """
    spread = np.ptp(scores, axis=1)
    widest = spread.max() or 1.0
    smallest = spread[spread > 1e-6 * widest].min(initial=np.inf)
    tilt, rows = 0.01 / widest, []
    while not rows or (rows[-1][-1] >= least and tilt * smallest < 30):
        rows.append((tilt, *jackknife(scores, log_weights, tilt)))
        tilt *= STEP
    return np.transpose(rows)


@dataclass(frozen=True)
class BestOf:
    """Best-of-n of the start model: the completion with the highest score of n, for n = 1, 2, ... N."""

    n: np.ndarray  # (N,)
    kl: np.ndarray  # (N,) mean over prompts, nats per sequence; an upper bound unless `exact`
    exact: bool  # 0/1 rewards
    measures: dict[str, np.ndarray]  # "scores" and each judge: (N,) means over prompts of the chosen completion

    def worth(self, measure: str, value: float) -> int | None:
        """Returns the smallest n whose mean by `measure` is at least `value`; None if there is none."""
        reached = np.flatnonzero(self.measures[measure] >= value)
        return int(self.n[reached[0]]) if len(reached) else None


def best_of_n(scores: np.ndarray, judged: dict[str, np.ndarray]) -> BestOf:
    """Returns best-of-n by the scores (P, N), and what judges (P, N) think of the chosen completions.

    The mean over all choices of n of the N samples: the sample with rank j is the best of C(j - 1, n - 1) of C(N, n)
    choices. Samples with equal scores share their ranks. It is unbiased.

    The KL is at most log n - (n - 1) / n (Beirami et al. 2024, arXiv 2401.01879). For 0/1 rewards it is that of the
    pass rates p and q = 1 - (1 - p)^n, without the bias in 1 / N (delete-one jackknife).
    """
    values = np.stack([scores, *judged.values()])  # (J, P, N)
    values = values[:, ~np.isnan(values).any(axis=(0, 2))]
    scores, prompts, most = values[0], values.shape[1], values.shape[2] if values.size else 0
    n = np.arange(1, most + 1)
    # a choice of n from N has none but the j lowest in C(j, n) of C(N, n) cases: (N, N + 1), n, j
    within = np.exp(_log_choose(np.arange(most + 1), n[:, None]) - _log_choose(most, n[:, None]))
    means = np.zeros((len(values), most))
    for prompt in range(prompts):
        ordered = np.sort(scores[prompt])
        lower, upto = (np.searchsorted(ordered, scores[prompt], side) for side in ("left", "right"))
        chosen = (within[:, upto] - within[:, lower]) / (upto - lower)  # (N, N): n, sample
        means += values[:, prompt] @ chosen.T / prompts
    exact = bool(np.isin(scores, (0, 1)).all())
    kl = _kl_of_passes(scores.sum(axis=1), most) if exact and most else np.log(n) - (n - 1) / n
    return BestOf(n, kl, exact, dict(zip(("scores", *judged), means, strict=True)))


def _log_choose(total: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns the log of the binomial coefficient; -inf if it is 0."""
    return special.gammaln(total + 1) - special.gammaln(chosen + 1) - special.gammaln(total - chosen + 1)


def kl_of_best_of(p: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Returns the KL of best-of-n for 0/1 rewards with pass rate p, in nats."""
    q = 1 - (1 - p) ** n
    return special.rel_entr(q, p) + special.rel_entr(1 - q, 1 - p)


def _kl_of_passes(passes: np.ndarray, most: int) -> np.ndarray:
    """Returns the mean KL (N,) of best-of-n for n up to N, from the passes of N samples per prompt (P,)."""
    n, fewer, p = np.arange(1, most + 1)[:, None], max(most - 1, 1), passes / most
    without = p * kl_of_best_of(np.maximum(passes - 1, 0) / fewer, n)
    without += (1 - p) * kl_of_best_of(np.minimum(passes / fewer, 1), n)
    return (most * kl_of_best_of(p, n) - (most - 1) * without).mean(axis=1)


def best_of_blocks(scores: np.ndarray, n: int) -> np.ndarray:
    """Returns the indices (P, N // n) of the best completion of each block of n: the first of equal ones.

    So best-of-n has N // n independent completions per prompt, as a model has. A block without any score (NaN) has
    its first completion; the samples that remain after the last block are ignored.
    """
    blocks = scores.shape[1] // n
    cut = np.where(np.isnan(scores), -np.inf, scores)[:, : blocks * n].reshape(-1, blocks, n)
    return cut.argmax(axis=2) + n * np.arange(blocks)

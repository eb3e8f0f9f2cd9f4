"""Best-of-n of the start model, from its samples.

Scores are (P, N): prompts, completions. A prompt with a completion without a score (NaN) is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from rlhf.utils.statistics import is_binary, paired


@dataclass(frozen=True)
class BestOf:
    """Best-of-n of the start model: of n completions, the one with the highest score."""

    n: np.ndarray  # (N,) 1, 2, ... N
    kl: np.ndarray  # (N,) mean over prompts, nats per sequence; "at most" unless `exact`
    exact: bool  # 0/1 rewards
    # "score" and each judge: mean of the chosen completion (P, N); NaN for a prompt without all scores and ratings
    by_prompt: dict[str, np.ndarray]

    @property
    def measures(self) -> dict[str, np.ndarray]:
        """The means over prompts (N,)."""
        return {measure: np.nanmean(values, axis=0) for measure, values in self.by_prompt.items()}

    def worth(self, measure: str, values: np.ndarray) -> int | None:
        """Return the smallest n whose mean by `measure` is at least the mean of `values` (P,), both over the prompts
        that have a value in both; N + 1 if there is none up to N, None if no prompt has both."""
        both = paired(np.vstack([values, self.by_prompt[measure].T]))  # (1 + N, prompts)
        value, *means = both.mean(axis=1) if both.size else [np.nan]
        if not means:
            return None
        return next((int(n) for n, mean in zip(self.n, means, strict=True) if mean >= value), len(means) + 1)


def best_of_n(scores: np.ndarray, judged: dict[str, np.ndarray]) -> BestOf | None:
    """Return best-of-n by the scores (P, N), and by judges (P, N) of the completions that the score chooses.

    Each is the mean over all choices of n of the N samples, which is unbiased; equal scores share their chance. The KL
    is at most log n - (n - 1) / n (Beirami et al. 2024, arXiv 2401.01879); for 0/1 rewards, see `kl_of_passes`. None
    if no prompt has all scores and ratings.
    """
    values = np.stack([scores, *judged.values()])  # (J, P, N)
    known = ~np.isnan(values).any(axis=(0, 2))
    if not known.any():
        return None
    most = values.shape[2]
    n = np.arange(1, most + 1)
    drawn = np.arange(most)[:, None]
    # all n are from the j lowest samples in C(j, n) of C(N, n) choices; (N, N + 1): n, j
    below = np.cumprod(np.maximum(np.arange(most + 1) - drawn, 0) / (most - drawn), axis=0)
    means = np.full(values.shape, np.nan)
    for prompt in np.flatnonzero(known):
        row = scores[prompt]
        lower, upper = (np.searchsorted(np.sort(row), row, side) for side in ("left", "right"))
        chance = (below[:, upper] - below[:, lower]) / (upper - lower)  # (N, N): n, sample
        means[:, prompt] = values[:, prompt] @ chance.T
    scores = scores[known]
    exact = is_binary(scores)
    kl = kl_of_passes(scores.sum(axis=1), most) if exact else np.log(n) - (n - 1) / n
    return BestOf(n, kl, exact, dict(zip(("score", *judged), means, strict=True)))


def kl_of_passes(passes: np.ndarray, most: int) -> np.ndarray:
    """Return the mean KL (N,) of best-of-n for 0/1 rewards, from each prompt's passes (P,) of N samples.

    q = 1 - (1 - p)^n, KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), without the bias in 1 / N (jackknife).
    """

    def kl(p: np.ndarray) -> np.ndarray:
        q = 1 - (1 - p) ** np.arange(1, most + 1)[:, None]
        return special.rel_entr(q, p) + special.rel_entr(1 - q, 1 - p)

    p = passes / most
    fewer = max(most - 1, 1)
    without = p * kl(np.maximum(passes - 1, 0) / fewer) + (1 - p) * kl(np.minimum(passes / fewer, 1))
    return (most * kl(p) - (most - 1) * without).mean(axis=1)


def best_of_blocks(scores: np.ndarray, n: int) -> np.ndarray:
    """Return the index of the best completion of each block of n (P, N // n), the first of equal ones: samples of
    best-of-n. Samples after the last block are ignored. A block without scores (NaN) gives its first completion."""
    prompts = len(scores)
    blocks = scores.shape[1] // n
    cut = np.nan_to_num(scores, nan=-np.inf)[:, : blocks * n].reshape(prompts, blocks, n)
    return cut.argmax(axis=2) + n * np.arange(blocks)

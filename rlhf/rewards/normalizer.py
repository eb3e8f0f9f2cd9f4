"""Score normalisation by running estimates: floats only, saveable, the same for every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, variance


class ScoreNormalizer:
    """Scores by running estimates of their mean and variance, so that a drift of the scores does not move the
    advantages' scale.

    mean <- d * mean + (1 - d) * mean of the batch; var likewise, from the batch's (unbiased) variance around its own
    mean: a drift of the mean does not count as variance. Both are divided by 1 - d^t (Kingma & Ba 2015, sec. 3), so
    that early estimates are averages of the batches so far and not of the zeros before them. Until a batch has
    variance, scores are only shifted.
    """

    def __init__(self, decay: float):
        """`decay` d in [0, 1) is the weight of the old estimate."""
        self.decay = decay
        self.mean, self.var, self.batches = 0.0, 0.0, 0

    def __call__(self, scores: Sequence[float]) -> list[float]:
        """Update the estimates with one batch, then return it as (score - mean) / standard deviation."""
        d = self.decay
        self.mean = d * self.mean + (1 - d) * fmean(scores)
        self.var = d * self.var + (1 - d) * (variance(scores) if len(scores) > 1 else 0.0)
        self.batches += 1
        bias_correction = 1 - d**self.batches
        std = (self.var / bias_correction) ** 0.5 or 1.0
        return [(score - self.mean / bias_correction) / std for score in scores]

    def state_dict(self) -> dict[str, float]:
        return {"m": self.mean, "v": self.var, "batches": self.batches}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean, self.var, self.batches = float(state["m"]), float(state["v"]), int(state["batches"])

"""Normalises scores with running estimates of their mean and variance, for every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, variance


class ScoreNormalizer:
    """Running mean and variance of the scores, so that a drift of the scores does not change the advantages' scale.

    mean <- d * mean + (1 - d) * batch mean; the same for var with the batch's unbiased variance around the batch mean,
    so that a drift of the mean does not count as variance. Both estimates are divided by 1 - d^t (bias correction of
    Kingma & Ba 2015, sec. 3). As long as the variance is 0, scores are only shifted.
    """

    def __init__(self, decay: float):
        """`decay` is d in [0, 1), the weight of the old estimate."""
        self.decay = decay
        self.mean = 0.0
        self.var = 0.0
        self.batches = 0

    def __call__(self, scores: Sequence[float]) -> list[float]:
        """Update the estimates with one batch, then return its scores as (score - mean) / standard deviation."""
        d = self.decay
        self.mean = d * self.mean + (1 - d) * fmean(scores)
        self.var = d * self.var + (1 - d) * (variance(scores) if len(scores) > 1 else 0.0)
        self.batches += 1
        return self.normalized(scores)

    def normalized(self, scores: Sequence[float]) -> list[float]:
        """Return (score - mean) / standard deviation with the present estimates, which must have seen a batch."""
        # detail 16: as in Adam (arXiv 1412.6980). Otherwise the first estimates are too close to 0, where they start.
        bias_correction = 1 - self.decay**self.batches
        std = (self.var / bias_correction) ** 0.5 or 1.0
        return [(score - self.mean / bias_correction) / std for score in scores]

    def state_dict(self) -> dict[str, float]:
        return {"m": self.mean, "v": self.var, "batches": self.batches}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean = float(state["m"])
        self.var = float(state["v"])
        self.batches = int(state["batches"])

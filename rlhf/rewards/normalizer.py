"""Score normalisation by running estimates: floats only, saveable, the same for every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, variance


class ScoreNormalizer:
    """Scores by running estimates of their mean and spread, so that a drift of the scores does not move the
    advantages' scale.

    m <- d * m + (1 - d) * mean of the batch, v likewise of its (unbiased) variance around its own mean: a drift of the
    mean is no spread. Both are divided by 1 - d^t (Kingma & Ba 2015, sec. 3), so that early estimates are averages of
    the batches so far and not of the zeros before them. Until a batch has spread, scores are only shifted.
    """

    def __init__(self, decay: float):
        """`decay` d in [0, 1) is the weight of the old estimate."""
        self.decay = decay
        self.m, self.v, self.batches = 0.0, 0.0, 0

    def __call__(self, scores: Sequence[float]) -> list[float]:
        """Take note of one batch, then return it as (score - mean) / standard deviation."""
        d = self.decay
        self.m = d * self.m + (1 - d) * fmean(scores)
        self.v = d * self.v + (1 - d) * (variance(scores) if len(scores) > 1 else 0.0)
        self.batches += 1
        debt = 1 - d**self.batches
        spread = (self.v / debt) ** 0.5 or 1.0
        return [(score - self.m / debt) / spread for score in scores]

    def state_dict(self) -> dict[str, float]:
        return {"m": self.m, "v": self.v, "batches": self.batches}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.m, self.v, self.batches = float(state["m"]), float(state["v"]), int(state["batches"])

"""One update's scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Scored:
    """One update's scores. B episodes."""

    raw: Tensor  # (B,) the weighted sum of the reward functions
    used: Tensor  # (B,) less the missing-EOS penalty, normalised if asked: what the algorithm takes
    means: dict[str, float]  # of each reward function, before its weight

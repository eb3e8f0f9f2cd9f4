"""One update's scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Scores:
    """One update's scores. B episodes."""

    raw: Tensor  # (B,) the weighted sum of the reward functions
    shaped: Tensor  # (B,) less the missing-EOS penalty, normalised if asked: the algorithm's input
    per_function: dict[str, float]  # mean of each reward function, before its weight

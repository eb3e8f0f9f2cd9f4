"""One update's scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Scores:
    """One update's scores. B episodes."""

    raw: Tensor  # (B,) weighted sum of the reward functions
    shaped: Tensor  # (B,) raw minus the missing-EOS penalty, normalized if configured; input of the algorithm
    per_function: dict[str, float]  # mean of each reward function, before its weight

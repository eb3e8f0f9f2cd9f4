"""One update's scores."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Scores:
    """One update's scores. B episodes. NaN marks a completion to which no reward function applies."""

    raw: Tensor  # (B,) weighted sum of the reward functions
    shaped: Tensor  # (B,) raw minus the missing-EOS penalty, normalized if configured; input of the algorithm
    # mean of each of several reward functions over the completions to which it applies, before its weight
    per_function: dict[str, float]
    extra: dict[str, list] = field(default_factory=dict)  # columns logged with log_extra, B values each
    logged: dict[str, float] = field(default_factory=dict)  # metrics logged with log_metric

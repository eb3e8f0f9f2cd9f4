"""One update's scores, and its batch as the optimizer takes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf.rollout.completions import Rollout


@dataclass
class Scored:
    """One update's scores. B episodes."""

    raw: Tensor  # (B,) the weighted sum of the reward functions
    used: Tensor  # (B,) less the missing-EOS penalty, normalised if asked: what the algorithm takes
    means: dict[str, float]  # of each reward function, before its weight


@dataclass
class Batch:
    """A rollout with what the optimizer needs. B episodes, T reply tokens."""

    rollout: Rollout
    kl: Tensor  # (B, T) k1 to the reference, nats
    advantages: Tensor  # (B, T) before whitening
    weights: Tensor  # (B, T) advantages as the loss takes them: whitened if asked
    # where there is a critic
    returns: Tensor | None = None  # (B, T) its target
    rewards: Tensor | None = None  # (B, T) score units, as GAE took them

"""The clip of the policy ratio, which every policy loss uses: its limits, and the clipped term."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Clip(NamedTuple):
    """Limits of the ratio r = p_new / p_old.

    The clipped branch limits r to [1 - low, 1 + high]. `high` above `low` is "clip-higher" (Yu et al. 2025, DAPO,
    arXiv 2503.14476, sec. 3.1): it lets unlikely tokens with a positive advantage become more likely.

    `delta` limits r in the other branch, from above; None: no limit. It must be above 1 + high. So it acts on negative
    advantages only: the loss is at most delta * |A|. Source: two-sided clipping (Prime Intellect 2025, INTELLECT-2,
    arXiv 2505.07291), as in TRL's GRPOTrainer; the same as dual-clip (Ye et al. 2020, arXiv 1912.09729, eq. 5) and
    verl's `clip_ratio_c`.
    """

    low: float
    high: float
    delta: float | None = None


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Computes PPO-clip per element, as a loss (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

    `ratio` and `advantages` are (n, T), or (n,) with one ratio per completion. Returns the loss, and True where the
    clipped branch is the larger one, in the same shape.
    """
    # max(-A * min(r, delta), -A * clip(r, 1 - low, 1 + high))
    limited = ratio if clip.delta is None else ratio.clamp(max=clip.delta)
    costs = -advantages
    # the clipped branch is the larger one only if r is outside the limits, so it has no gradient
    unclipped = costs * limited
    clipped = costs * ratio.detach().clamp(1 - clip.low, 1 + clip.high)
    is_clipped = clipped > unclipped
    return torch.where(is_clipped, clipped, unclipped), is_clipped

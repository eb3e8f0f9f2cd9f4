"""What an algorithm makes of a rollout and its scores, and what its loss reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.rollout.completions import Rollout


@dataclass
class Experience:
    """A rollout with advantages. B episodes, T completion tokens."""

    rollout: Rollout
    kl_coef: float  # beta of this update, score units per nat
    kl: Tensor  # (B, T) k1 to the reference, nats
    advantages: Tensor  # (B, T) before whitening
    weights: Tensor  # (B, T) advantages as the loss takes them: whitened if asked
    # only if the algorithm has a critic
    returns: Tensor | None = None  # (B, T) its target
    rewards: Tensor | None = None  # (B, T) score units, as GAE took them


class PolicyOutputs(NamedTuple):
    """The policy as it is now on some rows: each (n, T)."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None  # None without a critic


def policy_stats(
    loss: Tensor, clipfrac: Tensor, outputs: PolicyOutputs, experience: Experience, rows: Tensor, tokens: Tensor
) -> dict[str, Tensor]:
    """Statistics of the policy on some rows, detached: its term of the loss, the share of clipped tokens, and how far
    it has moved from the rollout policy. Means are over the minibatch's `tokens`, so that parts add up."""
    mask, old, logprobs = experience.rollout.mask[rows], experience.rollout.logprobs[rows], outputs.logprobs
    figures = {
        "policy/loss": loss,
        "policy/clipfrac": clipfrac,
        "policy/approx_kl": objectives.approximate_kl(logprobs, old, mask, tokens),
        "policy/entropy": objectives.masked_mean(outputs.entropy, mask, tokens),
        "policy/ratio": objectives.masked_mean(torch.exp(logprobs - old), mask, tokens),
    }
    return {name: value.detach() for name, value in figures.items()}

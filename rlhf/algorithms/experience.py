"""What an algorithm learns from: the rollout, the scores and what the algorithm made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.data.prompts import Prompt
from rlhf.rollout.completions import Completions, Rollout


@dataclass
class Experience:
    """One update's batch. B episodes, T completion tokens; tensors are 0 off the mask unless noted."""

    # what was sampled
    prompts: list[Prompt]
    completions: Completions  # ids, lengths and groups
    mask: Tensor  # (B, T) True on completion tokens, EOS included
    # log pi(a|s), nats; undefined off the mask
    logprobs: Tensor  # (B, T) rollout policy
    ref_logprobs: Tensor  # (B, T) frozen reference
    # the KL to the reference
    kl: Tensor  # (B, T) k1, nats
    kl_coef: float  # beta of this update, score units per nat
    # what is learned from, score units
    raw_advantages: Tensor  # (B, T) before whitening
    advantages: Tensor  # (B, T) as the loss takes them: whitened and corrected for the sampler, if asked
    # only if the algorithm has a critic, score units
    values: Tensor | None = None  # (B, T) at rollout time; undefined off the mask
    returns: Tensor | None = None  # (B, T) the critic's target
    rewards: Tensor | None = None  # (B, T) as GAE took them

    @classmethod
    def of(cls, rollout: Rollout, *, advantages: Tensor, one_action: bool = False, **learned: Any) -> Experience:
        """The experience of a rollout. If another program sampled, `advantages` are corrected by truncated importance
        sampling: token by token, or completion by completion if a completion is `one_action`."""
        sampled = rollout.completions.sampled_logprobs
        if sampled is not None:
            advantages = advantages * objectives.truncated_importance_weights(
                rollout.logprobs, sampled, rollout.mask, one_action
            )
        return cls(
            prompts=rollout.prompts,
            completions=rollout.completions,
            mask=rollout.mask,
            logprobs=rollout.logprobs,
            ref_logprobs=rollout.ref_logprobs,
            values=rollout.values,
            advantages=advantages,
            **learned,
        )


class PolicyOutputs(NamedTuple):
    """The present policy's outputs on some rows: each (n, T)."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None  # None without a critic


def policy_stats(
    loss: Tensor, clipfrac: Tensor, outputs: PolicyOutputs, experience: Experience, rows: Tensor, tokens: Tensor
) -> dict[str, Tensor]:
    """Statistics of the policy on some rows, detached: its term of the loss, the clipped share, and how far it has
    moved from the rollout policy. Means are over the minibatch's `tokens`, so that micro-batches add up."""
    mask, old, logprobs = experience.mask[rows], experience.logprobs[rows], outputs.logprobs
    figures = {
        "policy/loss": loss,
        "policy/clipfrac": clipfrac,
        "policy/approx_kl": objectives.approximate_kl(logprobs, old, mask, tokens),
        "policy/entropy": objectives.masked_mean(outputs.entropy, mask, tokens),
        "policy/ratio": objectives.masked_mean(torch.exp(logprobs - old), mask, tokens),
    }
    return {name: value.detach() for name, value in figures.items()}

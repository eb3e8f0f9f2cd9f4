"""The batch that an algorithm trains on: the rollout and the advantages, returns and rewards computed from it."""

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
    """One update's batch: B episodes, T completion tokens. Tensors are 0 where `mask` is False, unless noted."""

    # sampled
    prompts: list[Prompt]
    completions: Completions  # ids, lengths and groups
    mask: Tensor  # (B, T) True on completion tokens, EOS included
    loss_mask: Tensor  # (B, T) the same, but False on truncated completions with --mask-truncated-completions
    scored_mask: Tensor  # (B, T) the same as loss_mask, but False on completions without a score
    # log pi(a|s), nats; undefined where `mask` is False
    logprobs: Tensor  # (B, T) rollout policy
    ref_logprobs: Tensor  # (B, T) frozen reference
    # KL to the reference
    kl: Tensor  # (B, T) k1 estimate, nats
    kl_coef: float  # beta of this update, score units per nat
    # score units, unless whitened or divided by a standard deviation
    raw_advantages: Tensor  # (B, T) before whitening and importance weights
    advantages: Tensor  # (B, T) used by the loss: after whitening (PPO) and importance weights (vLLM)
    # score units; None without a critic
    values: Tensor | None = None  # (B, T) at rollout time; undefined where `mask` is False
    returns: Tensor | None = None  # (B, T) target of the critic
    rewards: Tensor | None = None  # (B, T) input of GAE

    @classmethod
    def of(
        cls,
        rollout: Rollout,
        *,
        advantages: Tensor,
        scores: Tensor | None = None,
        loss_mask: Tensor | None = None,
        one_action: bool = False,
        **learned: Any,
    ) -> Experience:
        """Builds the experience of a rollout.

        Args:
            rollout: B completions.
            advantages: (B, T). If vLLM sampled the completions, they are multiplied by truncated importance weights.
            scores: (B,) NaN marks completions without a score; None: all have one.
            loss_mask: (B, T) as `tokens_of_loss` returns it; None: all completion tokens.
            one_action: one importance weight per completion, not per token.
            learned: the remaining fields.
        """
        loss_mask = rollout.mask if loss_mask is None else loss_mask
        sampled = rollout.completions.sampled_logprobs
        if sampled is not None:
            advantages = advantages * objectives.truncated_importance_weights(
                rollout.logprobs, sampled, rollout.mask, one_action
            )
        return cls(
            prompts=rollout.prompts,
            completions=rollout.completions,
            mask=rollout.mask,
            loss_mask=loss_mask,
            scored_mask=scored_mask(loss_mask, scores),
            logprobs=rollout.logprobs,
            ref_logprobs=rollout.ref_logprobs,
            values=rollout.values,
            advantages=advantages,
            **learned,
        )


def tokens_of_loss(rollout: Rollout, mask_truncated: bool) -> Tensor:
    """Returns the mask (B, T) of the tokens in the loss: all completion tokens, or with `mask_truncated` only those of
    completions that end with EOS.

    Source: overlong filtering (Yu et al. 2025, DAPO, arXiv 2503.14476, sec. 3.4); `mask_truncated_completions` in TRL.
    """
    return rollout.mask & rollout.completions.ended.unsqueeze(1) if mask_truncated else rollout.mask


def scored_mask(mask: Tensor, scores: Tensor | None) -> Tensor:
    """Returns `mask` (B, T) without the completions whose score (B,) is NaN."""
    return mask if scores is None else mask & ~scores.isnan().unsqueeze(1)


class PolicyOutputs(NamedTuple):
    """Outputs of the current policy for n rows, each (n, T)."""

    logprobs: Tensor  # nats
    entropy: Tensor  # nats
    values: Tensor | None  # score units; None without a critic


@torch.no_grad()
def policy_stats(
    loss: Tensor, clipfrac: Tensor, outputs: PolicyOutputs, experience: Experience, rows: Tensor, tokens: Tensor
) -> dict[str, Tensor]:
    """Returns detached statistics of the policy for some rows, by TensorBoard tag.

    `loss` and `clipfrac` are returned as given. The approximate KL to the rollout policy (k2, nats per token), the
    entropy and the ratio are sums over the rows' tokens in the loss, divided by `tokens`, their number in the
    minibatch. The values of its micro-batches therefore add up to the minibatch's mean.
    """
    mask, old = experience.loss_mask[rows], experience.logprobs[rows]
    log_ratio = objectives.log_ratios(outputs.logprobs, old, mask)
    sums = torch.stack([0.5 * log_ratio.square(), outputs.entropy * mask, log_ratio.exp() * mask]).sum((1, 2)) / tokens
    return {
        "policy/loss": loss.detach(),
        "policy/clipfrac": clipfrac.detach(),
        **dict(zip(("policy/approx_kl", "policy/entropy", "policy/ratio"), sums.unbind(), strict=True)),
    }

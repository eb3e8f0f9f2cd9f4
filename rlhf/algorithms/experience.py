"""The batch that an algorithm trains on: the rollout and the advantages, returns and rewards computed from it."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    scores: Tensor  # (B,) score units, as the algorithm received them; NaN: no score
    mask: Tensor  # (B, T) True on completion tokens, EOS included
    loss_mask: Tensor  # (B, T) the same, but False on truncated completions with --mask-truncated-completions
    scored_mask: Tensor  # (B, T) the same as loss_mask, but False on completions without a score
    # log pi(a|s), nats; undefined where `mask` is False
    logprobs: Tensor  # (B, T) rollout policy
    ref_logprobs: Tensor  # (B, T) frozen reference; NaN in rows that it has not scored (`Config.reference_every`)
    kl_coef: float  # beta of this update, score units per nat
    # score units, unless whitened or divided by a standard deviation
    raw_advantages: Tensor  # (B, T) before whitening and importance weights
    advantages: Tensor  # (B, T) used by the loss: after whitening (PPO) and importance weights (vLLM)
    # score units
    values: Tensor | None = None  # (B, T) at rollout time, undefined where `mask` is False; None without a critic
    returns: Tensor | None = None  # (B, T) sum of the rewards to go, target of a critic; None: one per completion
    rewards: Tensor | None = None  # (B, T) per token, with the KL in the reward; None: one per completion
    counted: list[bool] | None = None  # of each completion: it can have a gradient; None: all of them can
    stale: list[int] = field(default_factory=list)  # rows that were not sampled with the present weights
    assumed: int = 0  # of these, those with the present log-probs, because theirs are unknown
    # True: the pass of the first optimizer step computes `logprobs`, because the policy has the weights that sampled
    deferred: bool = False

    @property
    def kl(self) -> Tensor:
        """The KL to the reference, k1 estimate, (B, T) in nats."""
        return objectives.kl_k1(self.logprobs, self.ref_logprobs, self.mask)

    @classmethod
    def of(
        cls,
        rollout: Rollout,
        scores: Tensor,
        *,
        kl_coef: float,
        loss_mask: Tensor,
        raw_advantages: Tensor,
        advantages: Tensor | None = None,
        returns: Tensor | None = None,
        rewards: Tensor | None = None,
        one_action: bool = False,
    ) -> Experience:
        """Builds the experience of a rollout.

        Args:
            rollout: B completions.
            scores: (B,) NaN marks completions without a score.
            kl_coef, raw_advantages, returns, rewards: the fields of these names.
            loss_mask: (B, T) as `tokens_of_loss` returns it.
            advantages: (B, T) after whitening; None: the raw ones. If vLLM sampled the completions, they are
                multiplied by truncated importance weights.
            one_action: one importance weight per completion, not per token.
        """
        advantages = raw_advantages if advantages is None else advantages
        sampled = rollout.completions.sampled_logprobs
        if sampled is not None:
            advantages = advantages * objectives.truncated_importance_weights(
                rollout.logprobs, sampled, rollout.mask, one_action
            )
        return cls(
            prompts=rollout.prompts,
            completions=rollout.completions,
            scores=scores,
            mask=rollout.mask,
            loss_mask=loss_mask,
            scored_mask=scored_mask(loss_mask, scores),
            logprobs=rollout.logprobs,
            ref_logprobs=rollout.ref_logprobs,
            kl_coef=kl_coef,
            raw_advantages=raw_advantages,
            advantages=advantages,
            values=rollout.values,
            returns=returns,
            rewards=rewards,
            stale=rollout.stale,
            assumed=sum(rollout.episodes[row].logprobs is None for row in rollout.stale),
        )


def tokens_of_loss(rollout: Rollout, mask_truncated: bool) -> Tensor:
    """Return the mask (B, T) of the tokens in the loss: all completion tokens, or with `mask_truncated` only those of
    completions that end with EOS.

    Source: overlong filtering (Yu et al. 2025, DAPO, arXiv 2503.14476, sec. 3.4); `mask_truncated_completions` in TRL.
    """
    return rollout.mask & rollout.completions.ended.unsqueeze(1) if mask_truncated else rollout.mask


def scored_mask(mask: Tensor, scores: Tensor) -> Tensor:
    """Return `mask` (B, T) without the completions whose score (B,) is NaN."""
    return mask & ~scores.isnan().unsqueeze(1)

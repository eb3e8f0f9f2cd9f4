"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300): groups of completions, and no critic."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience, PolicyOutputs, policy_stats
from rlhf.rollout.completions import Rollout
from rlhf.settings.training import Config


class GRPO:
    """Advantages relative to the group's mean score; the clipped policy loss under one of several divisors."""

    def __init__(self, config: Config):
        self.config = config

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        """Group advantages of scores (B,), less beta x each completion's KL if the reward is charged with it."""
        kl = objectives.kl_k1(rollout.logprobs, rollout.ref_logprobs, rollout.mask)
        rewards = scores - self.config.kl.coef_in("reward", kl_coef) * kl.sum(1)
        groups = objectives.group_advantages(rewards, self.config.group_size, self.config.grpo.scale_rewards)
        advantages = torch.where(rollout.mask, groups.unsqueeze(1), 0.0)
        return Experience.of(rollout, kl=kl, kl_coef=kl_coef, raw_advantages=advantages, advantages=advantages)

    def loss(
        self, experience: Experience, rows: Tensor, outputs: PolicyOutputs, total_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The GRPO loss of some rows, so that parts add up to the minibatch's, and its statistics, detached."""
        config, loss_type = self.config, self.config.grpo.loss_type
        mask, old = experience.mask[rows], experience.logprobs[rows]
        weights = objectives.grpo_token_weights(
            loss_type,
            mask.sum(1),
            config.minibatch_size,
            experience.mask.sum() / config.batch.minibatches,
            config.sampling.max_new_tokens,
        )
        per_token, clipped = objectives.grpo_policy_loss(
            outputs.logprobs, old, experience.advantages[rows], mask, config.batch.clip_range, loss_type
        )
        policy_loss = (per_token * weights).sum()
        clipfrac = objectives.masked_mean(clipped.float(), mask, total_tokens)
        loss = policy_loss - config.batch.entropy_coef * objectives.masked_mean(outputs.entropy, mask, total_tokens)
        beta = config.kl.coef_in("loss", experience.kl_coef)
        if beta:
            kl = objectives.kl_loss_per_token(outputs.logprobs, old, experience.ref_logprobs[rows], mask)
            loss = loss + beta * (kl * weights).sum()
        return loss, {
            "loss": loss.detach(),
            **policy_stats(policy_loss, clipfrac, outputs, experience, rows, total_tokens),
        }

"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): a completion is one action; no critic."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience, PolicyOutputs, policy_stats
from rlhf.rollout.completions import Rollout
from rlhf.settings.training import Config


class RLOO:
    """Advantages relative to the mean of the other completions; the clipped loss on whole-completion ratios."""

    def __init__(self, config: Config):
        self.config = config

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        """Leave-one-out advantages of scores (B,), less beta x each completion's KL if the reward is charged with
        it."""
        kl = objectives.kl_k1(rollout.logprobs, rollout.ref_logprobs, rollout.mask)
        rewards = scores - self.config.kl.coef_in("reward", kl_coef) * kl.sum(1)
        of_completions = objectives.leave_one_out_advantages(rewards, self.config.group_size)
        advantages = torch.where(rollout.mask, of_completions.unsqueeze(1), 0.0)
        return Experience.of(
            rollout, kl=kl, kl_coef=kl_coef, raw_advantages=advantages, advantages=advantages, one_action=True
        )

    def loss(
        self, experience: Experience, rows: Tensor, outputs: PolicyOutputs, total_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The RLOO loss of some rows, a mean over the minibatch's completions, and its statistics, detached."""
        config, mask, old = self.config, experience.mask[rows], experience.logprobs[rows]
        of_completions, clipped, ratio = objectives.rloo_policy_loss(
            outputs.logprobs, old, experience.advantages[rows, 0], mask, config.batch.clip_range
        )
        policy_loss = of_completions.sum() / config.minibatch_size
        clipfrac = clipped.float().sum() / config.minibatch_size
        loss = policy_loss - config.batch.entropy_coef * objectives.masked_mean(outputs.entropy, mask, total_tokens)
        beta = config.kl.coef_in("loss", experience.kl_coef)
        if beta:
            kl = objectives.kl_loss_per_token(outputs.logprobs, old, experience.ref_logprobs[rows], mask)
            loss = loss + beta * kl.sum() / config.minibatch_size
        return loss, {
            "loss": loss.detach(),
            **policy_stats(policy_loss, clipfrac, outputs, experience, rows, total_tokens),
            "policy/ratio": ratio.detach().sum() / config.minibatch_size,  # the one that the loss multiplies by
        }

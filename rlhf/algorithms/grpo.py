"""Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300): groups of completions, no critic."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience
from rlhf.algorithms.policy_gradient import PolicyGradient, policy_stats
from rlhf.models.actor_critic import PolicyOutputs
from rlhf.rollout.completions import Rollout


class GRPO(PolicyGradient):
    """Advantages relative to the mean reward of the group, and the clipped policy loss in one of several forms."""

    compares_groups = True

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        """Computes one advantage per completion, the same for all its tokens.

        Args:
            rollout: B completions; the `group_size` completions of one prompt are neighbours.
            scores: (B,) score units. NaN: no score, so the completion's advantage is 0.
            kl_coef: beta, score units per nat. It is charged here only if kl_placement is "reward".
        """
        kl, loss_mask = self.kl_and_loss_mask(rollout)
        rewards = objectives.completion_rewards(kl, scores, loss_mask, self.beta_in_reward(kl_coef))
        # A_it = (R_i - mean of the group's R) / scale
        groups = objectives.group_advantages(rewards, self.config.group_size, self.config.grpo.scale_rewards)
        advantages = torch.where(loss_mask, groups.unsqueeze(1), 0.0)
        return Experience.of(rollout, scores, kl_coef=kl_coef, loss_mask=loss_mask, raw_advantages=advantages)

    def loss(
        self, experience: Experience, rows: Tensor, outputs: PolicyOutputs, total_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the GRPO loss of a micro-batch, `rows` (n,), and its detached statistics by TensorBoard tag.

            L = sum_it w_i * (L_policy_it + beta * KL_it) - entropy_coef * mean entropy

        The weights w are `objectives.grpo_token_weights`. The mean entropy is a sum over the rows' tokens, divided by
        the tokens of the minibatch in the loss, `total_tokens`. The losses of the minibatch's micro-batches therefore
        add up to its loss. `outputs` are those of the current policy. beta is 0 here unless kl_placement is "loss".
        """
        config = self.config
        loss_type = self.config.grpo.loss_type
        mask = experience.loss_mask[rows]
        old = experience.logprobs[rows]
        weights = objectives.grpo_token_weights(
            loss_type,
            mask.sum(1),
            config.minibatch_size,
            # detail 29: DAPO (arXiv 2503.14476). Otherwise a token counts more in a minibatch with fewer tokens.
            experience.loss_mask.sum().clamp(min=1) / config.batch.minibatches,
            config.episode_tokens,
        )
        per_token, clipped = objectives.grpo_policy_loss(
            outputs.logprobs, old, experience.advantages[rows], mask, self.clip, loss_type
        )
        policy_loss = (per_token * weights).sum()
        clipfrac = objectives.masked_share(clipped, mask, total_tokens)
        beta, kl = self.kl_in_loss(experience, rows, outputs)
        loss = policy_loss - self.entropy_bonus(outputs, mask, total_tokens) + beta * (kl * weights).sum()
        return loss, policy_stats(
            experience, rows, outputs, total_tokens, loss=loss, policy_loss=policy_loss, clipfrac=clipfrac
        )

"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): no critic, no groups, advantages normalized over the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience, scored_mask
from rlhf.algorithms.policy_gradient import PolicyGradient, policy_stats
from rlhf.models.actor_critic import PolicyOutputs
from rlhf.rollout.completions import Rollout


class ReinforcePlusPlus(PolicyGradient):
    """The rewards to go of each token, normalized over the tokens of the batch, and PPO's clipped policy loss."""

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        """Computes rewards per token from the scores and the KL, as in PPO, then one advantage per token.

        Args:
            rollout: B completions, the whole batch of the update.
            scores: (B,) score units. NaN: no score, so the completion's advantages are 0, as those of a truncated
                completion with mask_truncated_completions. Neither counts in the mean and the standard deviation.
            kl_coef: beta, score units per nat. It is charged here only if kl_placement is "reward".
        """
        kl, loss_mask = self.kl_and_loss_mask(rollout)
        mask = scored_mask(loss_mask, scores)
        beta = self.beta_in_reward(kl_coef)
        rewards = objectives.shape_rewards(kl, scores, mask, beta, token_scores=rollout.token_scores)
        # G_t = sum of gamma^(s - t) r_s over s >= t: GAE with V = 0 and lambda = 1
        returns, _ = objectives.generalized_advantage_estimate(
            rewards, torch.zeros_like(rewards), mask, self.config.critic.gamma, 1.0, self.turn_ends(rollout)
        )
        # A_t = (G_t - mean) / std, both over all tokens of the batch
        return Experience.of(
            rollout, scores, kl_coef=kl_coef, loss_mask=loss_mask, raw_advantages=returns,
            advantages=objectives.whiten(returns, mask), returns=returns, rewards=rewards,
        )  # fmt: skip

    def loss(
        self, experience: Experience, rows: Tensor, outputs: PolicyOutputs, total_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss of a micro-batch, `rows` (n,), and its detached statistics by TensorBoard tag.

            L = L_policy - entropy_coef * mean entropy + beta * mean KL

        Every term is a sum over the rows' tokens, divided by the tokens of the minibatch in the loss, `total_tokens`.
        `outputs` are those of the current policy. beta is 0 here unless kl_placement is "loss".
        """
        mask = experience.loss_mask[rows]
        old = experience.logprobs[rows]
        policy_loss, clipfrac = objectives.clipped_policy_loss(
            outputs.logprobs, old, experience.advantages[rows], mask, self.clip, total_tokens
        )
        beta, kl = self.kl_in_loss(experience, rows, outputs)
        kl_loss = beta * objectives.masked_mean(kl, mask, total_tokens)
        loss = policy_loss - self.entropy_bonus(outputs, mask, total_tokens) + kl_loss
        return loss, policy_stats(
            experience, rows, outputs, total_tokens, loss=loss, policy_loss=policy_loss, clipfrac=clipfrac
        )

"""Proximal Policy Optimization (Schulman et al. 2017, arXiv 1707.06347) with a critic and GAE."""

from __future__ import annotations

from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience, scored_mask
from rlhf.algorithms.policy_gradient import PolicyGradient, policy_stats
from rlhf.models.actor_critic import PolicyOutputs
from rlhf.rollout.completions import Rollout


class PPO(PolicyGradient):
    """Advantages by GAE from one reward per token, and the clipped policy and value losses."""

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        """Computes rewards per token from the scores and the KL, then advantages and returns by GAE.

        Args:
            rollout: B completions with their values.
            scores: (B,) score units. NaN: no score, so the completion's advantages are 0, as those of a truncated
                completion with mask_truncated_completions. Neither counts when rewards and advantages are whitened.
            kl_coef: beta, score units per nat. It is charged here only if kl_placement is "reward".
        """
        ppo = self.config.ppo
        critic = self.config.critic
        kl, loss_mask = self.kl_and_loss_mask(rollout)
        mask = scored_mask(loss_mask, scores)
        rewards = objectives.shape_rewards(
            kl, scores, mask, self.beta_in_reward(kl_coef), ppo.kl_penalty_at, rollout.token_scores
        )
        if ppo.whiten_rewards:
            rewards = objectives.whiten(rewards, mask, shift_mean=False)
        ends = self.turn_ends(rollout)
        advantages, returns = objectives.generalized_advantage_estimate(
            rewards, rollout.values, mask, critic.gamma, critic.lam, ends
        )
        if critic.critic_lam is not None:
            # decoupled GAE (VC-PPO, arXiv 2503.01491): the targets have their own lambda
            _, returns = objectives.generalized_advantage_estimate(
                rewards, rollout.values, mask, critic.gamma, critic.critic_lam, ends
            )
        # detail 25: over the whole update (N details). Otherwise the step size depends on the unit of the score.
        whitened = objectives.whiten(advantages, mask) if ppo.whiten_advantages else advantages
        return Experience.of(
            rollout, scores, kl_coef=kl_coef, loss_mask=loss_mask, raw_advantages=advantages,
            advantages=whitened, returns=returns, rewards=rewards,
        )  # fmt: skip

    def loss(
        self, experience: Experience, rows: Tensor, outputs: PolicyOutputs, total_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the PPO loss of a micro-batch, `rows` (n,), and its detached statistics by TensorBoard tag.

            L = L_policy + value_coef * L_value - entropy_coef * mean entropy + beta * mean KL

        Every term is a sum over the rows' tokens, divided by the tokens of the minibatch in the loss, `total_tokens`.
        The losses of the minibatch's micro-batches therefore add up to its loss. `outputs` are those of the current
        policy. beta is 0 here unless kl_placement is "loss".
        """
        config = self.config
        mask = experience.loss_mask[rows]
        old = experience.logprobs[rows]
        policy_loss, clipfrac = objectives.clipped_policy_loss(
            outputs.logprobs, old, experience.advantages[rows], mask, self.clip, total_tokens
        )
        value_loss, value_clipfrac = objectives.clipped_value_loss(
            outputs.values,
            experience.values[rows],
            experience.returns[rows],
            experience.scored_mask[rows],
            config.critic.value_clip_range,
            total_tokens,
        )
        beta, kl = self.kl_in_loss(experience, rows, outputs)
        loss = policy_loss + config.critic.value_coef * value_loss - self.entropy_bonus(outputs, mask, total_tokens)
        loss = loss + beta * objectives.masked_mean(kl, mask, total_tokens)
        stats = policy_stats(
            experience, rows, outputs, total_tokens, loss=loss, policy_loss=policy_loss, clipfrac=clipfrac
        )
        return loss, {**stats, "value/loss": value_loss.detach(), "value/clipfrac": value_clipfrac.detach()}

"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): a whole completion is one action, no critic."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.algorithms.clipping import clipped_surrogate
from rlhf.algorithms.experience import Experience
from rlhf.algorithms.policy_gradient import PolicyGradient, policy_stats
from rlhf.models.actor_critic import PolicyOutputs
from rlhf.rollout.completions import Rollout


class RLOO(PolicyGradient):
    """Advantages relative to the mean of the group's other completions, and PPO-clip on whole-completion ratios."""

    compares_groups = True
    per_completion = ("policy/clipfrac", "policy/ratio")

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        """Computes one advantage per completion, the same for all its tokens.

        Args:
            rollout: B completions; the `group_size` completions of one prompt are neighbours.
            scores: (B,) score units. NaN: no score, so the completion's advantage is 0.
            kl_coef: beta, score units per nat. It is charged here only if kl_placement is "reward".
        """
        kl, loss_mask = self.kl_and_loss_mask(rollout)
        rewards = objectives.completion_rewards(kl, scores, loss_mask, self.beta_in_reward(kl_coef))
        # A_i = R_i - mean of the group's other R_j
        per_completion = objectives.leave_one_out_advantages(rewards, self.config.group_size)
        advantages = torch.where(loss_mask, per_completion.unsqueeze(1), 0.0)
        return Experience.of(
            rollout, scores, kl_coef=kl_coef, loss_mask=loss_mask, raw_advantages=advantages, one_action=True
        )

    def loss(
        self, experience: Experience, rows: Tensor, outputs: PolicyOutputs, total_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the RLOO loss of a micro-batch, `rows` (n,), and its detached statistics by TensorBoard tag.

            L = sum_i (L_policy_i + beta * sum_t KL_it) / minibatch_size - entropy_coef * mean entropy

        The mean entropy is a sum over the rows' tokens, divided by the tokens of the minibatch in the loss,
        `total_tokens`. The losses of the minibatch's micro-batches therefore add up to its loss. `outputs` are those
        of the current policy. beta is 0 here unless kl_placement is "loss".
        """
        config = self.config
        mask = experience.loss_mask[rows]
        old = experience.logprobs[rows]
        ratio = objectives.completion_ratio(outputs.logprobs, old, mask)
        # PPO-clip with the whole completion as one action (sec. 3.2), clipped as in TRL's RLOOTrainer; every token has
        # its completion's advantage, so the first one is enough
        per_completion, clipped = clipped_surrogate(ratio, experience.advantages[rows, 0], self.clip)
        policy_loss = per_completion.sum() / config.minibatch_size
        clipfrac = clipped.float().sum() / config.minibatch_size
        beta, kl = self.kl_in_loss(experience, rows, outputs)
        loss = policy_loss - self.entropy_bonus(outputs, mask, total_tokens) + beta * kl.sum() / config.minibatch_size
        stats = policy_stats(
            experience, rows, outputs, total_tokens, loss=loss, policy_loss=policy_loss, clipfrac=clipfrac
        )
        # of completions, as the loss uses it
        return loss, {**stats, "policy/ratio": ratio.detach().sum() / config.minibatch_size}

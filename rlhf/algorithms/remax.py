"""ReMax (Li et al. 2023, arXiv 2310.10505): the score of the prompt's greedy completion is the baseline, no critic."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience, scored_mask
from rlhf.algorithms.reinforce_pp import ReinforcePlusPlus
from rlhf.rollout.completions import Rollout


class ReMax(ReinforcePlusPlus):
    """The rewards to go of each token minus the score of the greedy completion, and PPO's clipped policy loss."""

    compares_groups = True

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        """Computes rewards per token from the scores and the KL, as in PPO, then one advantage per token.

        Args:
            rollout: B completions; the `group_size` completions of one prompt are neighbours, the greedy one is last.
            scores: (B,) score units. NaN: no score, so the completion's advantages are 0, and if it is the greedy one,
                those of its group.
            kl_coef: beta, score units per nat. It is charged here only if kl_placement is "reward".
        """
        kl, loss_mask = self.kl_and_loss_mask(rollout)
        # R_i - R of the greedy completion (Algorithm 1)
        groups = scores.view(-1, self.config.group_size)
        relative = (groups - groups[:, -1:]).flatten()
        mask = scored_mask(loss_mask, relative)
        rewards = objectives.shape_rewards(kl, relative, mask, self.beta_in_reward(kl_coef))
        # A_t = sum of r_s over s >= t: GAE with V = 0, gamma = 1 and lambda = 1
        returns, _ = objectives.generalized_advantage_estimate(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)
        return Experience.of(
            rollout, scores, kl_coef=kl_coef, loss_mask=loss_mask, raw_advantages=returns, returns=returns
        )

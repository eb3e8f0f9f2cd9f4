"""GDPO (arXiv 2601.05242) in a file of one's own: GRPO that normalizes the scores of each reward function separately.

    python train.py --algorithm examples/gdpo.py:GDPO --reward-func exact_match length_penalty --rm-model none ...

With several reward functions, GRPO compares their weighted sum: a function with a large spread decides alone. GDPO
first gives each function mean 0 and variance 1 in every group. docs/adding_an_algorithm.md explains each line.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience
from rlhf.algorithms.grpo import GRPO
from rlhf.algorithms.table import Algorithm
from rlhf.rollout.completions import Rollout


def normalized(values: Tensor, dim: int) -> Tensor:
    """Return values with mean 0 and standard deviation 1 along `dim`. NaN, which is no score, stays NaN."""
    centred = values - values.nanmean(dim, keepdim=True)
    freedom = (~values.isnan()).sum(dim, keepdim=True) - 1
    variance = centred.square().nansum(dim, keepdim=True) / freedom.clamp(min=1)
    return centred / (variance.sqrt() + 1e-4)


class GDPO(GRPO):
    """GRPO's loss, with the advantages of arXiv 2601.05242, eq. 4 to 6."""

    row = Algorithm(
        name="gdpo",
        label="GDPO",
        title="GRPO with each reward normalized separately",
        group_size=8,
        settings=("loss_type",),
        refuses=("missing_eos_penalty", "normalize_scores", "score_ema"),  # they change the sum of the scores
    )
    compares_groups = False  # equal sums of scores can have advantages

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        """As in GRPO, but from the scores of each function, (B, F)."""
        kl, loss_mask = self.kl_and_loss_mask(rollout)
        groups = rollout.function_scores.unflatten(0, (-1, self.config.group_size))
        # A_if = (R_if - mean of the group's) / std of the group's; summed with the weights
        each = normalized(groups, 1).flatten(0, 1) * torch.tensor(rollout.function_weights, device=groups.device)
        total = torch.where(scores.isnan(), torch.nan, each.nansum(1))
        rewards = objectives.completion_rewards(kl, total, loss_mask, self.beta_in_reward(kl_coef))
        # over the batch: the scale does not depend on the number of functions
        per_completion = normalized(rewards, 0).nan_to_num()
        advantages = torch.where(loss_mask, per_completion.unsqueeze(1), 0.0)
        return Experience.of(rollout, scores, kl_coef=kl_coef, loss_mask=loss_mask, raw_advantages=advantages)

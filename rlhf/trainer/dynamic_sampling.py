"""Dynamic sampling: groups whose scores are all equal are replaced by groups of other prompts.

Such a group teaches nothing about the score: its advantages are 0, or with the KL penalty in the reward they contain
only the KL. The same holds if all its completions are left out of the loss (--mask-truncated-completions).

Source: DAPO (Yu et al. 2025, arXiv 2503.14476, sec. 3.2, eq. 11); verl's `filter_groups`; OpenRLHF's
`dynamic_filtering`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf.algorithms.experience import tokens_of_loss
from rlhf.data.sampler import PromptSampler
from rlhf.rewards.scores import Scores
from rlhf.rollout.completions import Rollout
from rlhf.settings.training import Config
from rlhf.trainer.collect import RolloutCollector


@dataclass
class DynamicSampler:
    """Replaces the groups with equal scores in an update's rollout."""

    config: Config
    sampler: PromptSampler
    collector: RolloutCollector

    def replace_equal_groups(self, rollout: Rollout, scores: Scores, update: int) -> tuple[Rollout, Scores]:
        """Return the rollout with other prompts in place of the groups with equal scores, and its scores.

        The new groups are one rollout. Those whose scores are equal, too, are dropped. If too few remain, groups with
        equal scores stay. Raises SkipUpdate, with the new groups, for a score that is not finite.
        """
        equal = self._without_signal(rollout, scores) if self.config.group.dynamic_sampling else []
        count = self._groups_to_draw(len(equal))
        if not count:
            return rollout, scores
        size = self.config.group_size
        self.collector.progress.resampled_episodes += count * size
        prompts = self.sampler.other_prompts(update, count, rollout.prompts[::size])
        episodes = list(enumerate(prompt for prompt in prompts for _ in range(size)))
        new = self.collector.sample(episodes, update, "draw")
        given = self.collector.score(new, drawn_again=True)
        useless = self._without_signal(new, given)
        groups = list(range(self.config.batch.batch_size))
        useful = (len(groups) + group for group in range(count) if group not in useless)
        for group, other in zip(equal, useful, strict=False):
            groups[group] = other
        rows = [group * size + k for group in groups for k in range(size)]
        both = [*rollout.episodes, *new.episodes]
        return self.collector.rollout([both[row] for row in rows]), scores.joined(given, rows)

    def _without_signal(self, rollout: Rollout, scores: Scores) -> list[int]:
        """Return the groups that have equal scores, or no token in the loss."""
        size = self.config.group_size
        in_loss = tokens_of_loss(rollout, self.config.batch.mask_truncated_completions).any(1)
        without = scores.equal_groups(size) | ~in_loss.view(-1, size).any(1)
        return without.nonzero().flatten().tolist()

    def _groups_to_draw(self, equal: int) -> int:
        """Return how many groups to draw in place of `equal` ones; 0 after --episodes is spent.

        It is the number that `dynamic_sampling` draws would sample on average, one after the other, each in place of
        the groups that are still equal. So it is at most this many times `equal`.
        """
        # the share of equal groups among the new ones is about that of the batch; 1 more: never all of them
        share = equal / (self.config.batch.batch_size + 1)
        count = math.ceil(sum(equal * share**draw for draw in range(self.config.group.dynamic_sampling)))
        budget = self.config.run.episodes
        if budget is None:
            return count
        return max(0, min(count, -(-(budget - self.collector.progress.episodes) // self.config.group_size)))

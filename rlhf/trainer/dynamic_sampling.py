"""Dynamic sampling: groups whose scores are all equal are replaced by groups of other prompts.

Such a group teaches nothing about the score: its advantages are 0, or with the KL penalty in the reward they contain
only the KL. The same holds if all its completions are left out of the loss (--mask-truncated-completions).

Source: DAPO (Yu et al. 2025, arXiv 2503.14476, sec. 3.2, eq. 11); verl's `filter_groups`; OpenRLHF's
`dynamic_filtering`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf.algorithms.experience import tokens_of_loss
from rlhf.data.prompts import Prompt
from rlhf.data.sampler import PromptSampler
from rlhf.rewards.scores import Scores
from rlhf.rollout.completions import Rollout
from rlhf.settings.training import Config
from rlhf.trainer.collect import RolloutCollector
from rlhf.trainer.safety import SkipUpdate, check_finite


@dataclass
class DynamicSampler:
    """Replaces the groups with equal scores in an update's rollout, and counts what it sampled in that update."""

    config: Config
    sampler: PromptSampler
    collector: RolloutCollector

    def __post_init__(self):
        self.progress = self.collector.progress
        self.limit = self.config.group.dynamic_sampling
        self._start()

    def _start(self) -> None:
        """Start the counters of an update."""
        self.groups = self.episodes = 0  # sampled in addition to the batch
        self.replaced_tokens = 0  # of completions that were sampled and replaced

    def replace_equal_groups(self, rollout: Rollout, scores: Scores, update: int) -> tuple[Rollout, Scores]:
        """Return the rollout with other prompts in place of the groups with equal scores, and its scores.

        At most `dynamic_sampling` draws are made, and none after --episodes is spent. Groups that still have equal
        scores stay. Only the new groups are sampled, computed and scored. Raises SkipUpdate,
        with the rollout, for values that are not finite.
        """
        self._start()
        size = self.config.group_size
        budget = self.config.run.episodes
        drawn = list(rollout.prompts[:: self.config.group_size])
        logged = []
        logged.append((len(rollout.prompts), scores.logged))
        for number in range(1, self.limit + 1):
            equal = self._without_signal(rollout, scores).nonzero().flatten().tolist()
            if not equal or (budget is not None and self.progress.episodes >= budget):
                break
            prompts = self.sampler.other_prompts(update, number, len(equal), drawn)
            drawn += prompts
            rows = [group * size + k for group in equal for k in range(size)]
            self._count(rollout, equal, rows)
            rollout, new = self._draw(rollout, rows, prompts, update, number)
            scores = scores.replaced(rows, new)
            logged.append((len(rows), new.logged))
        scores.logged = _means(logged) if len(logged) > 1 else scores.logged
        return rollout, scores

    def _without_signal(self, rollout: Rollout, scores: Scores) -> Tensor:
        """Return which groups have equal scores, or no token in the loss, (B / group_size,)."""
        in_loss = tokens_of_loss(rollout, self.config.batch.mask_truncated_completions).any(1)
        equal = scores.equal_groups(self.config.group_size)
        return equal | ~in_loss.view(-1, self.config.group_size).any(1).to(equal.device)

    def _draw(
        self, rollout: Rollout, rows: list[int], prompts: list[Prompt], update: int, number: int
    ) -> tuple[Rollout, Scores]:
        """Return the rollout with completions of `prompts` in `rows`, and the scores of these completions."""
        size = self.config.group_size
        batch = self.config.episodes_per_update
        episodes = [((update - 1) * batch + row, prompts[at // size]) for at, row in enumerate(rows)]
        new = self.collector.collect(episodes, update, f"draw {number}", keep_pass=False)
        place = dict(zip(rows, range(batch, batch + len(rows)), strict=True))
        order = [place.get(row, row) for row in range(batch)]
        try:
            check_finite(logprobs=new.logprobs, ref_logprobs=new.ref_logprobs, values=new.values)
            scores = self.collector.score(new, drawn_again=True)
        except SkipUpdate as reason:
            joined = self._joined(rollout, new, order)
            raise SkipUpdate(str(reason), reason.rows, reason.by_score, joined) from None
        return self._joined(rollout, new, order), scores

    def _joined(self, rollout: Rollout, new: Rollout, order: list[int]) -> Rollout:
        return Rollout.concatenate([rollout, new], self.collector.tokenizer.pad_token_id).select(order)

    def _count(self, rollout: Rollout, groups: list[int], rows: list[int]) -> None:
        self.groups += len(groups)
        self.episodes += len(rows)
        self.progress.resampled_episodes += len(rows)
        self.replaced_tokens += sum(rollout.completions.completion_lengths[row] for row in rows)

    def metrics(self) -> dict[str, float]:
        """Return how much was sampled in addition to the batches; {} if dynamic sampling is off."""
        if not self.limit:
            return {}
        return {"rewards/resampled_groups": float(self.groups), "episodes": float(self.progress.episodes)}


def _means(logged: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Return the mean of each metric over draws of different numbers of completions."""
    names = dict.fromkeys(name for _, metrics in logged for name in metrics)
    known = {name: [(count, metrics[name]) for count, metrics in logged if name in metrics] for name in names}
    return {name: sum(n * v for n, v in of) / sum(n for n, _ in of) for name, of in known.items()}

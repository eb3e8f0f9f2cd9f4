"""The value warm-up: the first updates of a run, in which only the critic is trained."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from rlhf.settings.training import Config
from rlhf.trainer.progress import Progress

MEASURE = "value/explained_variance"


class CriticWarmup:
    """Decides in which updates the policy is frozen: in the first `critic_warmup`, or in fewer with a patience P.

    With P, the warm-up also ends after the first update at which

        mean EV of the last P updates <= mean EV of the P updates before them

    EV is the explained variance of new completions, by the values before the critic learns from them. It is noisy,
    therefore means. VC-PPO (Yuan et al. 2025, arXiv 2503.01491) also trains the critic alone until its explained
    variance is good; the rule is this project's. Its only state is `progress.explained`.
    """

    def __init__(self, config: Config, progress: Progress):
        self.most, self.patience = config.critic.critic_warmup, config.critic.critic_warmup_patience
        self.progress = progress

    def covers(self, update: int) -> bool:
        """True if an update, counted from 1, trains only the critic."""
        last, before = self.means()
        return update <= self.most and last > before

    def means(self) -> tuple[float, float]:
        """Return the mean EV of the last P updates and of the P before them; 0 and -inf if there are fewer."""
        count, explained = self.patience, self.progress.explained
        if count is None or len(explained) < 2 * count:
            return 0.0, float("-inf")
        return fmean(explained[-count:]), fmean(explained[-2 * count : -count])

    def after_update(self, update: int, metrics: dict[str, float]) -> Iterator[str]:
        """Receive the metrics of an update. Yields a line if the warm-up ends before its full length."""
        if self.patience is not None and self.covers(update) and MEASURE in metrics:
            self.progress.explained.append(metrics[MEASURE])
            if not self.covers(update):
                last, before = self.means()
                yield (
                    f"the critic warm-up ended after update {update}: the mean explained variance of the last "
                    f"{self.patience} updates is {last:.3f}, that of the {self.patience} before them {before:.3f}"
                )

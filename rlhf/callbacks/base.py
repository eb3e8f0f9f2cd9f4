"""The callback interface: what a trainer reports, and when.

Most callbacks only watch. Those that change a run: KLControl and KLGuard set the next update's beta, KLGuard may load
the weights of an older checkpoint, and Checkpoints ends a run that was asked to stop.
"""

from __future__ import annotations

from typing import Any

from rlhf.algorithms.experience import Experience
from rlhf.rollout.completions import Rollout
from rlhf.trainer.evaluation import Evaluation
from rlhf.trainer.safety import SkipUpdate
from rlhf.trainer.scores import Scores


class Callback:
    """What a trainer reports, and when. Everything is optional: any object with one of these methods will do."""

    def on_train_begin(self, trainer: Any) -> None:
        """Before the first evaluation."""

    def on_batch(self, update: int, batch: Experience, scores: Scores) -> None:
        """Before an update's optimizer steps, with what they will be made from."""

    def on_update_end(self, update: int, metrics: dict[str, float]) -> None:
        """After an update's optimizer steps, with what was logged of it."""

    def on_update_skipped(self, update: int, rollout: Rollout, batch: Experience | None, reason: SkipUpdate) -> None:
        """In place of on_update_end, if the rest of an update is skipped. `batch` is None if the reason was found
        before the advantages. A callback with `on_drop`, the earlier name of this method, receives the event there."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """After an evaluation; the start model's comes first, with update 0."""

    def on_epoch_end(self, epoch: int, metrics: dict[str, float]) -> None:
        """After a pass over the training prompts, with the means of its updates' metrics."""

    def on_update_done(self, update: int) -> None:
        """After all of an update, its evaluation among it: between two updates, where checkpoints are made.

        A callback that remembers something gives it out as JSON-ready data by `state_dict()`, and takes it back by
        `load_state_dict(state)`: then checkpoints hold it.
        """

    def on_train_end(self) -> None:
        """After the last evaluation."""

"""The callback interface: the events of a trainer.

Callbacks observe, so their order changes nothing. They may ask for another beta (`set_kl_coef`) or for the end of the
run (`request_stop`); the loop applies both after the update (`apply_requests`).
"""

from __future__ import annotations

from typing import Any

from rlhf.algorithms.experience import Experience
from rlhf.rewards.scores import Scores
from rlhf.rollout.completions import Rollout
from rlhf.trainer.evaluation import Evaluation
from rlhf.trainer.safety import SkipUpdate


class Callback:
    """The events of a trainer. All methods are optional: a callback is any object with at least one of them."""

    def on_train_begin(self, trainer: Any) -> None:
        """Called before the first evaluation."""

    def on_update_begin(self, update: int) -> None:
        """Called before an update samples its rollout."""

    def on_batch(self, update: int, batch: Experience, scores: Scores) -> None:
        """Called before an update's optimizer steps, with the experience that they use."""

    def on_update_end(self, update: int, metrics: dict[str, float]) -> None:
        """Called after an update's optimizer steps, with the logged metrics."""

    def on_update_skipped(self, update: int, rollout: Rollout, batch: Experience | None, reason: SkipUpdate) -> None:
        """Called instead of on_update_end if the rest of an update is skipped.

        `batch` is None if the update was skipped before its advantages were computed.
        """

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Called after an evaluation. The first one is the start model's, with update 0."""

    def on_epoch_end(self, epoch: int, metrics: dict[str, float]) -> None:
        """Called after a pass over the training prompts, with the mean metrics of its updates."""

    def on_update_done(self, update: int) -> None:
        """Called at the end of an update, after its evaluation and before its checkpoint is saved.

        To save a callback's state in checkpoints, define `state_dict()`, which returns JSON-serializable data, and
        `load_state_dict(state)`.
        """

    def on_save(self, update: int) -> None:
        """Called after a checkpoint is saved."""

    def on_train_end(self) -> None:
        """Called after the last evaluation."""

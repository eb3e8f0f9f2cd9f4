"""The events of a training run, and the callbacks that receive them."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from rlhf.utils.errors import UserError

# in the order of a run; rlhf.callbacks.base.Callback describes each
EVENTS = (
    "on_train_begin",
    "on_batch",
    "on_update_end",
    "on_update_skipped",  # in place of on_update_end
    "on_epoch_end",
    "on_evaluation",
    "on_update_done",
    "on_train_end",
)
EARLIER_NAMES = {"on_update_skipped": "on_drop"}  # of events: callbacks with such a method still receive them


class Events:
    """Calls the methods of callbacks, in the order in which the callbacks were added."""

    def __init__(self):
        self.callbacks: list[Any] = []

    def add(self, callback: Any) -> None:
        """Add an object with a method for some of EVENTS, or a function of (epoch, metrics): on_epoch_end. Raises
        UserError for anything else."""
        if not callable(callback) and not any(
            hasattr(callback, event) for event in (*EVENTS, *EARLIER_NAMES.values())
        ):
            raise UserError(
                f"callback without an event method: {callback!r:.60}. Define at least one of {', '.join(EVENTS)}"
            )
        self.callbacks.append(callback)

    def call(self, event: str, *details: Any) -> None:
        """Call `event` on every callback that has it, under its name or an earlier one."""
        for callback in self.callbacks:
            is_function = event == "on_epoch_end" and callable(callback)
            earlier = getattr(callback, EARLIER_NAMES.get(event, event), None)
            method = earlier or getattr(callback, event, callback if is_function else None)
            if method is not None:
                method(*details)


def is_of_transformers(callback: Any) -> bool:
    """Whether this is a callback of transformers, or the class of one."""
    return isinstance(callback, TrainerCallback) or (
        isinstance(callback, type) and issubclass(callback, TrainerCallback)
    )

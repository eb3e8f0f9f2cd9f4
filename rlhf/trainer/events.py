"""The events of a training run, and the callbacks that receive them: this project's, and those of transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from rlhf.distributed.group import agree, gather
from rlhf.utils.errors import UserError

# in the order of a run; rlhf.callbacks.base.Callback documents each one
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
EARLIER_NAMES = {"on_update_skipped": "on_drop"}  # former names of events; such methods are still called


class Events:
    """Calls the event methods of callbacks, in the order in which the callbacks were added."""

    def __init__(self):
        self.callbacks: list[Any] = []

    def add(self, callback: Any) -> None:
        """Add a callback: an object with a method for at least one of EVENTS, or a function (epoch, metrics), which is
        called at on_epoch_end. Raises UserError for anything else."""
        if not callable(callback) and not any(
            hasattr(callback, event) for event in (*EVENTS, *EARLIER_NAMES.values())
        ):
            raise UserError(
                f"callback without an event method: {callback!r:.60}. Define at least one of {', '.join(EVENTS)}"
            )
        self.callbacks.append(callback)

    def call(self, event: str, *details: Any) -> None:
        """Call the method `event`, or its former name, on every callback that has it. If a callback fails in one
        process, its error is raised in all of them."""
        agree(lambda: self._call(event, *details))

    def _call(self, event: str, *details: Any) -> None:
        for callback in self.callbacks:
            is_function = event == "on_epoch_end" and callable(callback)
            earlier = getattr(callback, EARLIER_NAMES.get(event, event), None)
            method = earlier or getattr(callback, event, callback if is_function else None)
            if method is not None:
                method(*details)


class HostEvents:
    """Calls the TrainerCallbacks of transformers that TRL's trainer has."""

    def __init__(self, host: Any):
        """`host` is a trainer of transformers: it has the arguments, the state and the control of the callbacks."""
        self.host = host

    def call(self, event: str, **details: Any) -> None:
        """Call the method `event` of every TrainerCallback. If one sets `control.should_training_stop` in any process,
        it is set in all of them."""
        host = self.host
        host.control = getattr(host.callback_handler, event)(host.args, host.state, host.control, **details)
        host.control.should_training_stop = any(gather(host.control.should_training_stop))

    @property
    def stopped(self) -> bool:
        """True if a callback has requested the end of the training."""
        return self.host.control.should_training_stop


def is_of_transformers(callback: Any) -> bool:
    """True if `callback` is a TrainerCallback of transformers, or a subclass of it."""
    return isinstance(callback, TrainerCallback) or (
        isinstance(callback, type) and issubclass(callback, TrainerCallback)
    )

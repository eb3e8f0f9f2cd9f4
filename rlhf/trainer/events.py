"""The events of a training run, and the callbacks that receive them: this project's, and those of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from rlhf.distributed.group import gather
from rlhf.utils.errors import UserError
from rlhf.utils.user_code import settings_restored

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


class Events:
    """Calls the event methods of callbacks, in the order in which the callbacks were added."""

    def __init__(self):
        self.callbacks: list[Any] = []
        self.check: Callable[[], None] | None = None

    def add(self, callback: Any) -> None:
        """Add a callback, as `check_callback` describes it."""
        check_callback(callback)
        self.callbacks.append(callback)

    @contextmanager
    def extended(self, callbacks: Sequence[Any], check: Callable[[], None] | None) -> Iterator[None]:
        """Context manager that calls these callbacks, too, before the others, and `check` before each event. At the
        end, also after an error, those with a method `close` are closed."""
        others = self.callbacks
        self.callbacks = [*callbacks, *self.callbacks]
        self.check = check
        try:
            yield
        finally:
            self.callbacks = others
            self.check = None
            for callback in callbacks:
                if hasattr(callback, "close"):
                    callback.close()

    @settings_restored()
    def call(self, event: str, *details: Any) -> None:
        """Call the method `event` of every callback that has it."""
        if self.check is not None:  # not once per callback: it reads a file, perhaps on a network disk
            self.check()
        for callback in self.callbacks:
            is_function = event == "on_epoch_end" and callable(callback)
            method = getattr(callback, event, callback if is_function else None)
            if method is not None:
                method(*details)


class HostEvents:
    """Calls the TrainerCallbacks of transformers that TRL's trainer has."""

    def __init__(self, host: Any):
        """`host` is a trainer of transformers: it has the arguments, the state and the control of the callbacks."""
        self.host = host

    @settings_restored()
    def log(self, metrics: dict[str, float]) -> None:
        """Append metrics to the log history, and call the method `on_log` of every TrainerCallback."""
        self.host.log(metrics)

    @settings_restored()
    def call(self, event: str, **details: Any) -> None:
        """Call the method `event` of every TrainerCallback. If one sets `control.should_training_stop` in any process,
        it is set in all of them."""
        host = self.host
        host.control = getattr(host.callback_handler, event)(host.args, host.state, host.control, **details)
        self.agree_on_stop()

    def agree_on_stop(self) -> None:
        """Request the end of the training in all processes if it is requested in one."""
        self.host.control.should_training_stop = any(gather(self.host.control.should_training_stop))

    @property
    def stopped(self) -> bool:
        """True if a callback has requested the end of the training."""
        return self.host.control.should_training_stop


def check_callback(callback: Any) -> None:
    """Raise UserError if `callback` is neither a TrainerCallback of transformers, nor an object with a method for at
    least one of EVENTS, nor a function (epoch, metrics), which is called at on_epoch_end."""
    if is_of_transformers(callback):
        return
    if isinstance(callback, type):
        name = callback.__name__
        raise UserError("a class and not an object", f"callbacks, {name}", f"Give an object of it, such as {name}()")
    if any(hasattr(callback, event) for event in EVENTS):
        return
    if not callable(callback):
        raise UserError(
            "no event method", f"callbacks, {callback!r:.60}", f"Define at least one of {', '.join(EVENTS)}"
        )
    try:
        inspect.signature(callback).bind(1, {})
    except TypeError:
        raise UserError(
            "not a function of (epoch, metrics)", f"callbacks, {callback!r:.60}", "Give it these two parameters"
        ) from None
    except ValueError:  # a function in C without a signature
        return


def is_of_transformers(callback: Any) -> bool:
    """True if `callback` is a TrainerCallback of transformers, or a subclass of it."""
    return issubclass(callback if isinstance(callback, type) else type(callback), TrainerCallback)

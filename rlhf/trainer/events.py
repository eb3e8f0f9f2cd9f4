"""The events of a training run, and the callbacks that receive them: this project's, and those of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainerControl

from rlhf.distributed.group import gather
from rlhf.utils.errors import UserError
from rlhf.utils.user_code import settings_restored

# in the order of a run; rlhf.callbacks.base.Callback documents each one
EVENTS = (
    "on_train_begin",
    "on_update_begin",
    "on_batch",
    "on_update_end",
    "on_update_skipped",  # in place of on_update_end
    "on_epoch_end",
    "on_evaluation",
    "on_update_done",
    "on_save",
    "on_train_end",
)


class Events:
    """Calls the event methods of callbacks: first of those of transformers, then in the order of their addition."""

    def __init__(self, host: Any):
        """`host` is a trainer of transformers."""
        self.of_transformers = TransformersCallbacks(host)
        self.callbacks: list[Any] = []
        self.read_batches = False  # a callback of the program reads batches before the optimizer steps
        self.check: Callable[[], None] | None = None

    def add(self, callback: Any) -> None:
        """Add a callback, as `check_callback` describes it."""
        check_callback(callback)
        if is_of_transformers(callback):
            self.of_transformers.host.add_callback(callback)
        else:
            self.callbacks.append(callback)
            self.read_batches |= hasattr(callback, "on_batch")

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
        for callback in (self.of_transformers, *self.callbacks):
            is_function = event == "on_epoch_end" and callable(callback)
            method = getattr(callback, event, callback if is_function else None)
            if method is not None:
                method(*details)


@dataclass
class TransformersCallbacks:
    """One callback for all TrainerCallbacks of transformers. It also appends metrics to the log history."""

    host: Any  # a trainer of transformers: it has the callbacks, their arguments, the state and the control

    def on_train_begin(self, trainer):
        self._call("on_train_begin")

    def on_update_begin(self, update):
        self._call("on_step_begin")

    def on_update_end(self, update, metrics):
        self.host.log(dict(metrics))
        self._call("on_step_end")

    def on_update_skipped(self, update, rollout, batch, reason):
        self._call("on_step_end")

    def on_epoch_end(self, epoch, metrics):
        self._call("on_epoch_end")

    def on_evaluation(self, evaluation):
        self.host.log(evaluation.metrics())
        self._call("on_evaluate", metrics=evaluation.metrics())

    def on_save(self, update):
        self._call("on_save")

    def on_train_end(self):
        self._call("on_train_end")

    def _call(self, event: str, **details: Any) -> None:
        """Call the method `event` of every TrainerCallback."""
        host = self.host
        host.control = getattr(host.callback_handler, event)(host.args, host.state, host.control, **details)
        agree_on_stop(host.control)


def agree_on_stop(control: TrainerControl) -> None:
    """Request the end of the training in all processes if it is requested in one."""
    control.should_training_stop = any(gather(control.should_training_stop))


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

"""Ctrl-C and SIGTERM: the first one lets the update come to its end, the second stops at once."""

from __future__ import annotations

import signal
import threading
from types import TracebackType

from rlhf.utils.errors import RunError
from rlhf.utils.system import stop_signals


class TrainingInterrupted(RunError):
    """A run that was asked to stop, and has saved what it had. The exit status is a shell's: 128 + the signal."""

    run_status = "stopped"

    def __init__(self, by: signal.Signals, message: str):
        super().__init__(message)
        self.exit_status = 128 + by

    def report(self) -> str:
        return str(self)


class GracefulStop:
    """While its `with` lasts, the first signal is stored in `by`; the run checks it between two updates."""

    def __init__(self, say=print):
        self.by: signal.Signals | None = None
        self.say, self.before = say, {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            self.before = {which: signal.signal(which, self._on_signal) for which in stop_signals()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for which, handler in self.before.items():
            signal.signal(which, handler)

    def _on_signal(self, number: int, _) -> None:
        if self.by is not None:
            raise KeyboardInterrupt
        self.by = signal.Signals(number)
        self.say(f"{self.by.name}: this update is brought to its end and saved; once more stops at once")

"""Stop signals: the first one stops the run after the current update, the second one immediately."""

from __future__ import annotations

import os
import signal
import threading
import time

from rlhf.utils.errors import RunError, StoppedAtOnce, print_line
from rlhf.utils.processes import size
from rlhf.utils.system import stop_signals

# After a signal, launchers of several processes send SIGTERM, perhaps more than once: this is not a second request.
LAUNCHER_S = 5.0
REPEAT_S = 1.0  # `timeout` sends its signal twice, and so does a shell whose terminal is closed


class TrainingInterrupted(RunError):
    """A signal stopped the run, after a checkpoint was saved. The exit status is 128 + the signal, as in shells."""

    def __init__(self, by: signal.Signals, message: str):
        super().__init__(message)
        self.by = by
        self.exit_status = 128 + by

    def __reduce__(self):
        return type(self), (self.by, str(self)), vars(self)

    def report(self) -> str:
        return str(self)


class GracefulStop:
    """Context manager that stores the first signal in `by`. The run checks it after each update."""

    def __init__(self, say=print_line):
        self.by: signal.Signals | None = None
        self.at = 0.0
        self.several = size() > 1
        self.process: int | None = os.getpid()
        self.say = say
        self.previous_handlers = {}

    def __enter__(self) -> GracefulStop:
        # Python allows signal handlers in the main thread only
        if threading.current_thread() is threading.main_thread():
            self.previous_handlers = {which: signal.signal(which, self._on_signal) for which in stop_signals()}
        return self

    def __exit__(self, *_) -> None:
        self.process = None  # another run may restore this handler later
        for which, handler in self.previous_handlers.items():
            if signal.getsignal(which) == self._on_signal:
                signal.signal(which, handler)

    def _on_signal(self, number: int, _) -> None:
        if os.getpid() != self.process:  # ended, or forked by a reward function, which must be able to end it
            signal.signal(number, self.previous_handlers[number])
            signal.raise_signal(number)
            return
        if self.by is not None:
            if self._is_repeated(number):
                return
            raise StoppedAtOnce(number)
        self.at = time.monotonic()
        self.by = signal.Signals(number)
        message = f"{self.by.name}: finishing and saving this update; a second signal stops immediately"
        printer = threading.Thread(target=self.say, args=(message,), daemon=True)
        printer.start()
        printer.join(1.0)  # on a thread, and not longer: the interrupted code may hold the console's lock

    def _is_repeated(self, number: int) -> bool:
        """Return True if the sender of the first signal may have sent this one, too."""
        seconds = time.monotonic() - self.at
        if number == signal.SIGINT:
            return self.several and seconds < LAUNCHER_S
        return self.several or seconds < REPEAT_S

"""Where the time of this process goes: the seconds of named parts, since the command began. Imports no torch."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """A point in time, also in the work of the GPU if there is one."""

    seconds: float
    event: Any  # torch.cuda.Event; None without a GPU


class Timing:
    """Adds up the seconds of named parts, as a context manager. Time inside an inner part counts for this one only,
    whose name is then `outer/inner`. The parts and "other" add up to the whole time.

    With `record`, a part lasts from the end of the GPU's work before it to the end of its own work.
    """

    def __init__(self, now: Callable[[], float] = perf_counter):
        self.now = now
        self.record: Callable[[], Any] | None = None  # returns an event that was recorded in the GPU's stream
        self.restart()

    def restart(self) -> None:
        """Start again at 0 seconds."""
        self._part = ""
        self._seconds: dict[str, float] = defaultdict(float)
        self._open: deque[tuple[str, Mark, Mark]] = deque()  # the GPU has not reached their ends yet
        self._last = self._mark()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Context manager that adds its time to a part."""
        self._count()
        outer = self._part
        self._part = f"{outer}/{part}" if outer else part
        try:
            yield
        finally:
            self._count()
            self._part = outer

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part so far, without those whose end the GPU has not reached: nothing waits."""
        self._count()
        return defaultdict(float, {part or "other": passed for part, passed in self._seconds.items()})

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """Return the seconds of each part since `seconds` returned `before`."""
        now = self.seconds()
        return defaultdict(float, {part: passed - before.get(part, 0.0) for part, passed in now.items()})

    def _mark(self) -> Mark:
        return Mark(self.now(), self.record and self.record())

    def _count(self) -> None:
        """Count the time since the last mark for the current part."""
        now = self._mark()
        self._open.append((self._part, self._last, now))
        self._last = now
        while self._open and (self._open[0][2].event is None or self._open[0][2].event.query()):
            part, start, end = self._open.popleft()
            on_gpu = start.event is not None and end.event is not None
            passed = start.event.elapsed_time(end.event) / 1_000 if on_gpu else end.seconds - start.seconds
            self._seconds[part] += passed


timed = Timing()

"""How long the parts of an update take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Timer:
    """Adds up the seconds of named parts. The time of a part inside another one counts for the inner one only."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = 0.0  # seconds of the parts inside the current one

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Context manager that adds its time to a part."""
        outer = self._inner
        self._inner = 0.0
        start = perf_counter()
        try:
            yield
        finally:
            passed = perf_counter() - start
            self.seconds[part] += passed - self._inner
            self._inner = outer + passed

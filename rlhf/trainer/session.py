"""What surrounds a training loop: messages, files and stop signals. rlhf.run.session has those of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf.trainer.passes import default_oom_hint
from rlhf.utils.errors import print_line


class Session:
    """A session without files and signals, for a trainer that is used alone. The loop calls all methods itself."""

    @contextmanager
    def opened(self, trainer: Any) -> Iterator[None]:
        """Context manager around the training of a trainer."""
        yield

    def say(self, line: str) -> None:
        """Print a line."""
        print_line(line)

    def save(self, update: int, last: bool) -> None:
        """Save a checkpoint after an update, if one is due. `last`: no update follows. Raises TrainingInterrupted, in
        all processes, if a signal stops the run in one."""

    def roll_back(self, update: int) -> None:
        """Load the weights of the last checkpoint from before an update. Without files there is none."""

    def advice(self, by_score: bool) -> str:
        """Return the end of an error message: what to do. `by_score`: a reward function is the cause."""
        return "Fix the reward function" if by_score else "Train again with a smaller learning_rate"

    def memory_advice(self) -> str:
        """Return the end of an out-of-memory message."""
        return default_oom_hint()

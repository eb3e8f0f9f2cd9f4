"""The size of a micro-batch, and what happens if it does not fit into memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from rlhf.rollout.completions import Replies
from rlhf.utils.errors import Notice, RunError

T = TypeVar("T")


@dataclass
class Limits:
    """How large a micro-batch may be. It changes memory, and not the result."""

    rows: int  # 0: no matter
    tokens: int
    # in words, what helps where one reply is too much
    advise: Callable[[], str] = lambda: "Try --use-lora, --gradient-checkpointing, or half of --reply-length"

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """For what cannot be done in smaller parts. Raises RunError where it is out of memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise RunError(f"out of memory: {phase} ({str(error).splitlines()[0]}). {self.advise()}") from None

    def parts(self, replies: Replies, rows: Sequence[int], packed: bool) -> list[list[int]]:
        """`rows` in micro-batches."""
        return replies.parts(rows, self.rows, self.tokens, packed)

    def fitted(self, phase: str, replies: Replies, rows: Sequence[int], packed: bool, run: Callable[[Limits], T]) -> T:
        """`run` within these limits; each time it is out of memory again with half of them, for good.

        Raises RunError where a micro-batch is one reply already.
        """
        while True:
            try:
                return run(self)
            except torch.OutOfMemoryError as error:
                fault = str(error).splitlines()[0]
            largest = max(map(len, self.parts(replies, rows, packed)))
            if largest == 1:
                raise RunError(f"out of memory with one reply at a time: {phase} ({fault}). {self.advise()}")
            self.rows = -(-largest // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            warnings.warn(
                f"out of memory in {phase}: micro-batches of at most {self.rows} replies from here on; the optimizer "
                "steps stay what they were",
                Notice,
                stacklevel=2,
            )

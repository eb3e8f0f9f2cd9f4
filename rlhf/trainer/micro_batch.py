"""The size of micro-batches, and smaller micro-batches after an out-of-memory error."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from rlhf.models.packing import MicroBatch
from rlhf.rollout.completions import Completions
from rlhf.utils.errors import RLHFWarning, RunError

T = TypeVar("T")


@dataclass
class MicroBatchBudget:
    """How completions are split into forward passes. The split changes memory, not the result."""

    max_rows: int  # largest number of completions; 0: no limit
    max_tokens: int  # largest number of prompt and completion tokens
    packed: bool  # without padding
    # returns advice for an error message
    oom_hint: Callable[[], str] = lambda: "Try --use-lora or --gradient-checkpointing, or halve --max-new-tokens"

    @contextmanager
    def raise_on_oom(self, phase: str) -> Iterator[None]:
        """Context manager for work that cannot be split. Raises RunError if it runs out of memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            failed = RunError(f"out of memory: {phase} ({str(error).splitlines()[0]}). {self.oom_hint()}")
            failed.by_all = getattr(error, "by_all", False)
            raise failed from None

    def split(self, completions: Completions, rows: Sequence[int] | None = None) -> list[list[int]]:
        """Split `rows` (None: all) into micro-batches."""
        return completions.split(
            range(len(completions.mask)) if rows is None else rows, self.max_rows, self.max_tokens, self.packed
        )

    def micro_batch(self, completions: Completions, rows: Sequence[int]) -> MicroBatch:
        """Build the inputs of the forward pass over `rows`."""
        return completions.micro_batch(rows, self.packed)

    def run_with_oom_retry(
        self, phase: str, completions: Completions, run: Callable[[], T], rows: Sequence[int] | None = None
    ) -> T:
        """Return `run()`, which must split `rows` (None: all) with `split`.

        If it runs out of memory, the micro-batch size is halved for the rest of the training run, and `run` is called
        again. Raises RunError if the micro-batches have only one completion.

        Args:
            phase: what `run` does, for messages.
            completions: the completions that `run` processes.
            run: the work; it is called again after an out-of-memory error.
            rows: rows of `completions` that `run` processes.
        """
        while True:
            try:
                return run()
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            largest = max(map(len, self.split(completions, rows)))
            if largest == 1:
                raise RunError(f"out of memory with one completion at a time: {phase} ({reason}). {self.oom_hint()}")
            self.max_rows = -(-largest // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            warnings.warn(
                f"out of memory in {phase}: reduced the micro-batch size to {self.max_rows} for the rest of the run. "
                "The optimizer steps do not change",
                RLHFWarning,
                stacklevel=2,
            )

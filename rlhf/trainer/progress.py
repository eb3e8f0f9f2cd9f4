"""Counters of a training run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Counters over a training run. Checkpoints contain them."""

    optimizer_steps: int = 0
    reply_tokens: int = 0  # of all sampled completions
    resampled_episodes: int = 0  # completions that dynamic sampling drew in addition to the batches
    peak_memory: int = 0  # bytes
    proved: int = 0  # number of the latest update whose weights gave finite gradients in the next update
    skipped: int = 0  # skipped updates
    skipped_in_a_row: int = 0

    def count_update(self, skipped: bool) -> None:
        """Count one update."""
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

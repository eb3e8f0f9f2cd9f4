"""What a training run counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Counts over a training run. Checkpoints contain them."""

    optimizer_steps: int = 0
    reply_tokens: int = 0
    peak_memory: int = 0  # bytes
    proved: int = 0  # the weights after this update gave a finite gradient in the next one
    skipped: int = 0  # updates
    skipped_in_a_row: int = 0

    def count_update(self, skipped: bool) -> None:
        """Count one more update."""
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

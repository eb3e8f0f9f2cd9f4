"""Counters of a training run, and the ranges of its scores."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf.trainer.scores import Scores


@dataclass
class Progress:
    """Counters over a training run. Checkpoints contain them."""

    optimizer_steps: int = 0
    episodes: int = 0  # completions sampled for training, with those that dynamic sampling replaced
    completion_tokens: int = 0  # of these completions
    peak_memory: int = 0  # bytes
    last_good_update: int = 0  # number of the latest update whose weights gave finite gradients in the next update
    skipped: int = 0  # skipped updates
    skipped_in_a_row: int = 0
    scores: list[float] = field(default_factory=list)  # lowest and highest score so far
    functions: dict[str, list[float]] = field(default_factory=dict)  # the same of each function, before its weight

    def count_update(self, scores: Scores | None) -> None:
        """Count one update with these scores (None: it was skipped)."""
        self.skipped += scores is None
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if scores is None else 0
        if scores is not None:
            self.scores = _extended(self.scores, scores.raw[~scores.raw.isnan()].tolist())
            for name, values in scores.by_function.items():
                known = [value for value in values if value is not None]
                self.functions[name] = _extended(self.functions.get(name, []), known)


def _extended(extremes: list[float], values: list[float]) -> list[float]:
    """Return the lowest and the highest of earlier extremes and new values; empty without any."""
    known = [*extremes, *values]
    return [min(known), max(known)] if known else []

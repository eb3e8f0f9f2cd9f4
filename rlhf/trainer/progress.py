"""Counters of a training run, and the ranges of its scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from statistics import median
from time import perf_counter

from rlhf.rewards.scores import Scores
from rlhf.settings.training import SAVE_SECONDS, RunSettings
from rlhf.utils.console import clock

Parts = dict[str, float]  # part of a run -> seconds
Predicted = dict[str, Parts]  # when it was predicted -> the whole run
LATEST = 10  # of a part: completions and the load of the machine change during a run


@dataclass
class Progress:
    """Counters over a training run. Checkpoints contain them."""

    optimizer_steps: int = 0
    episodes: int = 0  # completions sampled for training, with those that dynamic sampling replaced
    completion_tokens: int = 0  # of these completions
    resampled_episodes: int = 0  # of these, those that dynamic sampling drew in addition to the batches
    peak_memory: int = 0  # bytes
    last_good_update: int = 0  # number of the latest update whose weights gave finite gradients in the next update
    skipped: int = 0  # skipped updates
    skipped_in_a_row: int = 0
    scores: list[float] = field(default_factory=list)  # lowest and highest score so far
    functions: dict[str, list[float]] = field(default_factory=dict)  # the same of each function, before its weight
    # part -> seconds of each: the "start" of a new run, and each of its "updates", "evaluations" and "checkpoints"
    seconds: dict[str, list[float]] = field(default_factory=dict)
    predicted: Predicted = field(default_factory=dict)

    def spend(self, part: str, began: float) -> None:
        """Add the seconds of one more of a part that began at this time of `perf_counter`."""
        self.seconds.setdefault(part, []).append(perf_counter() - began)

    def left(self, run: RunSettings, updates: int, update: int) -> Parts:
        """Return the seconds of each part that remain after an update, from the medians of the latest ones. The
        evaluation and the checkpoint that follow the update remain, too."""
        done = update - 1
        save_every = run.save_every or -(-SAVE_SECONDS // median(self.seconds["updates"][-LATEST:]))
        counts = {
            "updates": updates - update,
            "evaluations": sum(due >= update for due in evaluation_updates(run, updates)),
            "checkpoints": -(-updates // save_every) - done // save_every,
        }
        return {part: counts.get(part, 0) * median(each[-LATEST:]) for part, each in self.seconds.items()}

    def count_update(self, scores: Scores | None) -> None:
        """Count one update with these scores (None: it was skipped)."""
        self.skipped += scores is None
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if scores is None else 0
        if scores is not None:
            self.scores = _extended(self.scores, scores.raw[~scores.raw.isnan()].tolist())
            for name, values in scores.by_function.items():
                known = [value for value in values if value is not None]
                self.functions[name] = _extended(self.functions.get(name, []), known)


def evaluation_updates(run: RunSettings, updates: int) -> list[int]:
    """Return after which of a run's `updates` an evaluation is due; 0 is the start model's. Without --eval-every they
    are the quarters of the run."""
    every = run.eval_every or updates / 4
    return sorted({*(ceil(number * every) for number in range(ceil(updates / every))), updates})


def _extended(extremes: list[float], values: list[float]) -> list[float]:
    """Return the lowest and the highest of earlier extremes and new values; empty without any."""
    known = [*extremes, *values]
    return [min(known), max(known)] if known else []


def parts_text(seconds: Parts) -> str:
    """Return the seconds of a run and of its parts."""
    parts = ", ".join(f"{part} {clock(passed)}" for part, passed in seconds.items())
    return f"{clock(sum(seconds.values()))} ({parts})"

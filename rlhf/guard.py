"""What must never reach the weights: numbers that are not finite, and ratios far out of range."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rlhf.rollout.completions import Replies
from rlhf.utils.errors import Notice, RunError

T = TypeVar("T")

MOST_RATIO = (
    10.0  # a minibatch's mean ratio to the rollout policy; TRL's first PPO (ratio_threshold) drew the line here
)


class Dropped(Exception):
    """The rest of an update is skipped. The text names the reason."""

    def __init__(self, what: str, rows: Sequence[int] = (), by_score: bool = False):
        super().__init__(what)
        self.rows = list(rows)  # of the minibatch in which it was found; none: in all
        self.by_score = by_score  # a reward function gave the bad number, so the weights are not the reason


@dataclass
class Drops:
    """Updates that were dropped, over a run."""

    count: int = 0
    in_a_row: int = 0

    def note(self, dropped: bool) -> None:
        self.count += dropped
        self.in_a_row = self.in_a_row + 1 if dropped else 0


def check_finite(**tensors: Tensor | None) -> None:
    """Raises Dropped where one of them holds a number that is not finite. Waits for the device once."""
    known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    bad = torch.stack([(~tensor.isfinite()).sum() for tensor in known.values()]).tolist()
    found = [f"{name.replace('_', ' ')} {n} of {known[name].numel()}" for name, n in zip(known, bad, strict=True) if n]
    if found:
        raise Dropped(f"numbers that are not finite: {', '.join(found)}")


def check_step(stats: dict[str, Tensor], rows: Sequence[int]) -> None:
    """Raises Dropped where a minibatch's loss or gradient is not finite, or its mean ratio out of range. Waits for
    the device once."""
    names = ("loss", "policy/grad_norm", "policy/ratio")
    values = dict(zip(names, torch.stack([stats[name].float() for name in names]).tolist(), strict=True))
    for name in names[:2]:
        if not abs(values[name]) < float("inf"):
            raise Dropped(f"{name} is {values[name]}", rows)
    if not 1 / MOST_RATIO < values["policy/ratio"] < MOST_RATIO:
        raise Dropped(f"policy/ratio is {values['policy/ratio']:.3g}, mean of a minibatch", rows)


# --- memory ----------------------------------------------------------------------------------------------------------


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

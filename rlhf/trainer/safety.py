"""Checks that keep bad numbers from the weights: values that are not finite, and ratios far out of range."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# limit of a minibatch's mean ratio to the rollout policy, above and below 1; ratio_threshold in TRL's first PPO
MOST_RATIO = 10.0


class SkipUpdate(Exception):
    """The rest of an update is skipped. The text names the reason."""

    def __init__(self, what: str, rows: Sequence[int] = (), by_score: bool = False):
        super().__init__(what)
        self.rows = list(rows)  # of the minibatch in which it was found; none: in all
        self.by_score = by_score  # a reward function gave the bad number, so the weights are not the reason


def check_finite(**tensors: Tensor | None) -> None:
    """Raises SkipUpdate where one of them holds a number that is not finite. Waits for the device once."""
    known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    bad = torch.stack([(~tensor.isfinite()).sum() for tensor in known.values()]).tolist()
    found = [
        f"{name.replace('_', ' ')} ({n} of {known[name].numel()})" for name, n in zip(known, bad, strict=True) if n
    ]
    if found:
        raise SkipUpdate(f"NaN or infinity: {', '.join(found)}")


def check_step(stats: dict[str, Tensor], rows: Sequence[int]) -> None:
    """Raises SkipUpdate where a minibatch's loss or gradient is not finite, or its mean ratio out of range. Waits for
    the device once."""
    names = ("loss", "policy/grad_norm", "policy/ratio")
    values = dict(zip(names, torch.stack([stats[name].float() for name in names]).tolist(), strict=True))
    for name in names[:2]:
        if not abs(values[name]) < float("inf"):
            raise SkipUpdate(f"{name} is {values[name]}", rows)
    if not 1 / MOST_RATIO < values["policy/ratio"] < MOST_RATIO:
        limits = f"the limits are {1 / MOST_RATIO:g} and {MOST_RATIO:g}"
        raise SkipUpdate(f"policy/ratio is {values['policy/ratio']:.3g} in a minibatch; {limits}", rows)

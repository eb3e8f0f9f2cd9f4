"""Checks that protect the weights from values that are not finite, and from ratios that are far out of range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerState

from rlhf.models.load import bad_weights
from rlhf.rollout.completions import Rollout
from rlhf.rollout.sampling import BadLogits
from rlhf.utils.errors import RunError

# limit of a minibatch's mean ratio to the rollout policy, also as 1 / MOST_RATIO; ratio_threshold in TRL's first PPO
MOST_RATIO = 10.0


class SkipUpdate(Exception):
    """Raised to skip the rest of an update. The message is the reason."""

    def __init__(self, what: str, rows: Sequence[int] = (), by_score: bool = False, rollout: Rollout | None = None):
        super().__init__(what)
        self.rows = list(rows)  # rows of the minibatch with the bad value; empty: all rows of the update
        self.by_score = by_score  # a reward function returned the bad value, so the weights are not the cause
        self.rollout = rollout  # with the bad value, if it is not the update's first rollout


def check_finite(**tensors: Tensor | None) -> None:
    """Raises SkipUpdate if a tensor contains NaN or infinity. Synchronizes with the device once."""
    known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    bad = torch.stack([(~tensor.isfinite()).sum() for tensor in known.values()]).tolist()
    found = [
        f"{name.replace('_', ' ')} ({n} of {known[name].numel()})" for name, n in zip(known, bad, strict=True) if n
    ]
    if found:
        raise SkipUpdate(f"NaN or infinity: {', '.join(found)}")


def checked_beta(beta: Any) -> float:
    """Return beta. Raises RunError for a value that --kl-coef refuses."""
    if not (isinstance(beta, Real) and 0 <= beta < math.inf):  # NaN fails the comparison
        raise RunError(f"beta is {beta!r:.60}", "set_kl_coef()", "Give a finite number of at least 0")
    return float(beta)


def check_step(stats: dict[str, Tensor], rows: Sequence[int]) -> None:
    """Raises SkipUpdate if a minibatch's loss or gradient norm is not finite, or its mean ratio is out of range.
    Synchronizes with the device once."""
    names = ("loss", "policy/grad_norm", "policy/ratio")
    values = dict(zip(names, torch.stack([stats[name].float() for name in names]).tolist(), strict=True))
    # detail 36: no step with bad numbers (TRL's first PPO). After one step with a NaN, all weights would be NaN.
    for name in names[:2]:
        if not abs(values[name]) < float("inf"):
            raise SkipUpdate(f"{name} is {values[name]}", rows)
    if not 1 / MOST_RATIO < values["policy/ratio"] < MOST_RATIO:
        limits = f"the limits are {1 / MOST_RATIO:g} and {MOST_RATIO:g}"
        raise SkipUpdate(f"policy/ratio is {values['policy/ratio']:.3g} in a minibatch; {limits}", rows)


@contextmanager
def advise_on_bad_logits(state: TrainerState, recovery: Callable[[bool], str]) -> Iterator[None]:
    """Context manager that adds to BadLogits the number of updates made so far and the advice of `recovery`."""
    try:
        yield
    except BadLogits as error:
        advice = recovery(False) if state.global_step else "Check the start model and --temperature"
        place = f"sampling after update {state.global_step}"
        raise RunError(error.problems[0].what, place, advice) from error.__cause__  # perhaps RaisedByAll


def require_finite_weights(model: nn.Module, update: int, recovery: Callable[[bool], str]) -> None:
    """Raise RunError if weights are not finite after this update. No later update can repair them. `recovery` returns
    the advice."""
    bad = bad_weights(model)
    if bad:
        raise RunError(
            f"{len(bad)} weights are not finite, the first is {bad[0]}",
            f"after update {update}",
            f"They are not saved. {recovery(False)}",
        )

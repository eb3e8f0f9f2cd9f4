"""Chooses bfloat16 or float32 for a run on a CPU: CPUs differ, so a short measurement decides."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import linear
from torch.utils.benchmark import Timer

from rlhf.distributed.group import from_first
from rlhf.models.device import autocast
from rlhf.settings.fields import replaced
from rlhf.settings.training import Config
from rlhf.setup.shape import shape_of
from rlhf.utils.console import Screen

CLEARLY = 1.2  # times as fast: at less, norms, attention and rounding use up what the products save
SMALLEST = 2**18  # weights of a feed-forward matrix; a model with smaller ones stays in float32
SECONDS = 0.5  # of the measurement of each precision
# rows of a product: a part of a micro-batch, because a CPU without bfloat16 instructions is up to 30 times slower
MOST_ROWS, FEWEST_ROWS, WORK = 128, 32, 2**28


def choose_precision(config: Config, model: str, device: torch.device, screen: Screen) -> Config:
    """Return the configuration with bf16 set, and print both times, if it is unset, the device is a CPU and the start
    model in the folder `model` is not tiny. Otherwise return the configuration as it is."""
    if config.model.bf16 is not None or device.type != "cpu":
        return config
    shape = shape_of(model)
    if shape.hidden * shape.inner < SMALLEST:
        return config
    float32, bfloat16 = from_first(lambda: measured(shape.hidden, shape.inner))
    chosen = is_clearly_faster(float32, bfloat16)
    screen.say(
        f"precision: {'bfloat16' if chosen else 'float32'}. Matrix products of the start model's sizes take "
        f"{1000 * float32:.3g} ms in float32 and {1000 * bfloat16:.3g} ms in bfloat16 here (measured), so bfloat16 is "
        f"{float32 / bfloat16:.2g}x as fast; from {CLEARLY:g}x on it is used. Set it with --bf16 or --no-bf16"
    )
    return replaced(config, bf16=chosen)


def is_clearly_faster(float32: float, bfloat16: float) -> bool:
    """Return True if the time in bfloat16 is so much shorter than that in float32 that a run should use it."""
    return float32 >= CLEARLY * bfloat16


@cache  # so that all runs of a process use the same precision
def measured(hidden: int, inner: int) -> tuple[float, float]:
    """Return the median seconds in float32 and in bfloat16 of a forward and backward pass through two linear layers,
    hidden -> inner -> hidden, with the casts of autocast. One thread computes them: with more, other processes on the
    same cores would decide the result.
    """
    rows = max(FEWEST_ROWS, min(MOST_ROWS, WORK // (hidden * inner)))
    sizes = ((rows, hidden), (inner, hidden), (hidden, inner))
    tensors = [torch.ones(size, requires_grad=True) for size in sizes]  # uses no random numbers
    return _seconds(*tensors, None), _seconds(*tensors, torch.bfloat16)


def _seconds(states: torch.Tensor, up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype | None) -> float:
    def step() -> None:
        with torch.enable_grad(), autocast(states.device, dtype):
            outputs = linear(linear(states, up), down)
        torch.autograd.grad(outputs, (states, up, down), torch.ones_like(outputs))

    return Timer("step()", globals={"step": step}, num_threads=1).blocked_autorange(min_run_time=SECONDS).median

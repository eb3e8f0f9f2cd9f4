"""Chooses the number of threads and the precision of a run on a CPU: machines differ, so short measurements decide."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import linear
from torch.utils.benchmark import Measurement, Timer

from rlhf.checkpoints.run_record import RunRecord
from rlhf.distributed.group import from_first
from rlhf.models.device import OWN_THREADS, autocast, set_threads
from rlhf.settings.fields import replaced
from rlhf.settings.training import Config
from rlhf.setup.shape import Shape, shape_of
from rlhf.utils.console import Screen
from rlhf.utils.system import threads_variable

CLEARLY = 1.2  # times as fast: at less, norms, attention and rounding use up what the products save
SMALLEST = 2**18  # weights of a feed-forward matrix; a model with smaller ones stays in float32
SECONDS = 0.2  # of the measurement of each precision, and of the products for the plan
# rows of a product: a part of a micro-batch, because a CPU without bfloat16 instructions is up to 30 times slower
MOST_ROWS = 128
FEWEST_ROWS = 32
WORK = 2**28
TWICE = 2  # times as fast: one thread is used from here on
THREADS_S = 0.3  # of the measurement of the threads
TURN_S = 0.05  # longer than the time slices of other programs
TURNS = 3  # at least, of each number of threads


def choose_precision(config: Config, model: str, device: torch.device, screen: Screen) -> Config:
    """Return the configuration with bf16 set, and print both times, if it is unset, the device is a CPU and the start
    model in the folder `model` is not tiny. Otherwise return the configuration as it is."""
    if config.model.bf16 is not None or device.type != "cpu" or config.run.deterministic:
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
    sizes = (rows, hidden, inner)
    return _timed(*sizes, 1, SECONDS).median, _timed(*sizes, 1, SECONDS, torch.bfloat16).median


@cache  # so that all runs of a process have the same prediction
def product_seconds(shape: Shape, dtype: torch.dtype | None) -> float:
    """Return the mean seconds per token and weight in a forward pass, with torch's present threads. A pass as in
    `measured` has two matrices, and twice the products of a forward pass in its backward pass."""
    products = 6 * MOST_ROWS * shape.hidden * shape.inner
    return _timed(MOST_ROWS, shape.hidden, shape.inner, torch.get_num_threads(), SECONDS, dtype).mean / products


def _timed(
    rows: int, hidden: int, inner: int, threads: int, seconds: float, dtype: torch.dtype | None = None
) -> Measurement:
    """Return the times of a forward and backward pass. Torch keeps its number of threads."""
    sizes = ((rows, hidden), (inner, hidden), (hidden, inner))
    states, up, down = (torch.ones(size, requires_grad=True) for size in sizes)  # uses no random numbers

    def step() -> None:
        with torch.enable_grad(), autocast(states.device, dtype):
            outputs = linear(linear(states, up), down)
        torch.autograd.grad(outputs, (states, up, down), torch.ones_like(outputs))

    return Timer("step()", globals={"step": step}, num_threads=threads).blocked_autorange(min_run_time=seconds)


# --- threads ---------------------------------------------------------------------------------------------------------


def choose_threads(config: Config, model: str, device: torch.device, screen: Screen) -> None:
    """Set the number of torch's threads: the setting, or on a CPU that of `_threads_here` in the first process. Prints
    a warning if it is not that of the resumed run. `model`: the folder of the start model."""
    before = RunRecord.require(Path(config.run.output), "--resume").threads if config.run.resume else None
    threads = from_first(lambda: config.speed.threads or _threads_here(config, before, model, device, screen))
    set_threads(threads)
    now = torch.get_num_threads()
    wanted = config.speed.threads
    if wanted and now < wanted:
        screen.say(f"note: this process may use {now} CPU cores, so it uses {now} threads: --threads {wanted}")
    if threads and before not in (None, now):
        screen.say(
            f"warning: the number of threads was {before} in this run and is {now} now, so its last digits differ "
            f"from those of an uninterrupted run. To keep them, resume with --threads {before}"
        )


def _threads_here(config: Config, before: int | None, model: str, device: torch.device, screen: Screen) -> int | None:
    """Return torch's number if the user's variable or program sets it; otherwise `before`, which a resumed run stored;
    otherwise 1, if a measurement finds it clearly faster. None on a GPU. A resumed run of an older version stored no
    number, and measures none."""
    if device.type != "cpu":
        return None
    if before and not threads_variable():
        return before
    most = torch.get_num_threads() if config.in_python else OWN_THREADS
    if most == 1 or threads_variable() or config.in_python or config.run.resume or config.run.deterministic:
        return most
    shape = shape_of(model)
    one, many = thread_seconds(shape.hidden, shape.inner, most)
    chosen = 1 if many >= TWICE * one else most
    screen.say(
        f"threads: {chosen}. Matrix products of the start model's sizes take {1000 * one:.3g} ms with 1 thread and "
        f"{1000 * many:.3g} ms with {most} here (measured), so 1 is {many / one:.1f}x as fast; from {TWICE:g}x on it "
        "is used, as beside programs that use the cores. Set it with --threads"
    )
    return chosen


@cache  # so that all runs of a process use the same number
def thread_seconds(hidden: int, inner: int, most: int) -> tuple[float, float]:
    """Return the seconds with 1 and with `most` threads of a pass as in `measured`, over few rows: small products, as
    in decoding, wait most for other threads.

    Both numbers take turns, because other programs come and go: the medians of the turns. A turn's mean counts its
    waits, of which one may be longer than all of its products.
    """
    found = {1: [], most: []}
    end = time.monotonic() + THREADS_S
    while time.monotonic() < end or len(found[most]) < TURNS:
        for threads, turns in found.items():
            turns.append(_timed(FEWEST_ROWS, hidden, inner, threads, TURN_S).mean)
    return median(found[1]), median(found[most])

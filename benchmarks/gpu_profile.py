"""The section `update-profile` of `benchmarks/on_gpu.py`: where the time of an optimizer step goes.

It decides whether the optimizer steps need CUDA graphs: they help if the GPU is idle between the launches of kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import ours
from benchmarks.gpu_measures import REPEATS, make_shared_models, work_for
from benchmarks.gpu_section import Section
from benchmarks.machine import seconds
from benchmarks.operators import around_calls, counting
from rlhf.algorithms.experience import Experience
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.safety import SkipUpdate

ROWS = (8, 64, 256)  # completions of an optimizer step
# those of the recipe smollm2-sums; K: completions per prompt
K = 8
LENGTHS = {"prompt_length": 64, "reply_length": 24}
STEP = "whole step"
REST = "rest"
COLUMNS = ("part", "wall time, ms", "GPU busy, ms", "kernels")
COLUMNS_ON_CPU = ("part", "wall time, ms", "GPU busy, ms", "operators")
NOT_ON_CPU = "not available on a CPU"
Parts = Mapping[str, Sequence[tuple[Any, str]]]  # part of a step -> its methods, as in `around_calls`


def update_profile(section: Section) -> None:
    """Measure the parts of optimizer steps on the first 8, 64 and 256 completions of one rollout."""
    trainer, experience = after_rollout(section)
    for rows in ROWS:
        section.attempt(f"{rows} rows", partial(profile_step, section, trainer, experience, rows))


def after_rollout(section: Section) -> tuple[OnPolicyLoop, Experience]:
    """Return a trainer and the experience of its first update, without its optimizer steps. GRPO with random weights,
    in bfloat16 also on a CPU, because only then there are cast weights."""
    # two epochs: with one step per rollout, the log-probs of the rollout could come from the step's own pass
    work = work_for(section, algorithm="grpo", batch_size=ROWS[-1] // K, K=K, ppo_epochs=2)
    work = replace(work, dtype="bfloat16", **LENGTHS)
    make_shared_models(work)
    trainer = ours.build(work)
    found = []

    def keep(experience: Experience, update: int) -> None:
        found.append(experience)
        raise SkipUpdate("the profile takes the optimizer steps")

    with patch.object(trainer.policy_optimizer, "run", keep):
        trainer.update_step(1)
    return trainer, found[0]


def parts_of(trainer: OnPolicyLoop) -> Parts:
    """Return the parts of an optimizer step. None of them contains another one."""
    host = trainer.host
    passes = trainer.passes
    return {
        "forward": [(passes, "run"), (host.actor, "forward_heads")],
        "loss": [(type(trainer.algorithm), "loss")],
        "backward": [(torch.Tensor, "backward")],
        "clip": [(host.accelerator, "clip_grad_norm_")],
        "AdamW": [(host.optimizer, "step")],
        "refresh of the cast weights": [(passes.weights, "refresh")],
    }


def profile_step(section: Section, trainer: OnPolicyLoop, experience: Experience, rows: int) -> None:
    """Record the table of one optimizer step. The whole step runs without waits, its parts with a wait before and
    after each, so that they are longer together."""
    optimizer = trainer.policy_optimizer

    def step() -> None:
        optimizer.step(experience, list(range(rows)), 2)

    whole = {STEP: [(optimizer, "step")]}
    parts = parts_of(trainer)
    spent = {}
    count = Launches(section.on_gpu)
    trainer.host.model.train()
    with trainer.passes.weights.in_use():
        step()  # a warm-up, which also allocates the optimizer's state
        for methods in (whole, parts):
            spent |= median_seconds(section, methods, step)
            with around_calls(methods, count):
                step()
    found = {
        name: {
            "seconds": spent[name],
            "busy_seconds": count.busy[name] if section.on_gpu else None,
            "launches": count.launches[name],
        }
        for name in (*parts, STEP)
    }
    found = {**found, REST: rest_of(found)}
    busy = f"GPU busy {count.busy[STEP] / spent[STEP]:.0%}" if section.on_gpu else f"GPU busy: {NOT_ON_CPU}"
    kind = "kernels" if section.on_gpu else "operators"
    tokens = sum(experience.completions.completion_lengths[:rows])
    note = f"{busy}; {count.launches[STEP]} {kind}; {rows // K} prompts, {tokens} completion tokens, bfloat16"
    name = f"{rows} rows, one optimizer step"
    section.figure(name, 1_000 * spent[STEP], "ms", note, parts=found, table=table_of(found, section.on_gpu))


def median_seconds(section: Section, methods: Parts, step: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds of each part in a step: medians of up to REPEATS steps, fewer if the time is short."""
    rounds: list[Counter] = []
    while len(rounds) < REPEATS and (not rounds or section.left > 4 * max(rounds[-1].total(), 1.0)):
        spent: Counter = Counter()

        @contextmanager
        def clock(part: str, spent: Counter = spent) -> Iterator[None]:
            begin = seconds(section.device)
            yield
            spent[part] += seconds(section.device) - begin

        with around_calls(methods, clock):
            step()
        rounds.append(spent)
    return {part: median(one[part] for one in rounds) for part in methods}


@dataclass
class Launches:
    """Counts what a part launches on a GPU, and adds up how long the GPU works on it. On a CPU it counts the operators
    of torch, without views."""

    on_gpu: bool
    launches: Counter = field(default_factory=Counter)  # kernels and copies; on a CPU operators
    busy: Counter = field(default_factory=Counter)  # seconds

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Context manager that counts one call of a part."""
        if not self.on_gpu:
            counter: Counter = Counter()
            with counting(counter):
                yield
            self.launches[part] += sum(count for (kind, _), count in counter.items() if kind == "operator")
            return
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield
            torch.cuda.synchronize()
        self.add(part, profiler.events())

    def add(self, part: str, events: Sequence[Any]) -> None:
        """Add the profiler's events that ran on the GPU, one after the other in one stream."""
        ran = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
        times = [event.time_range.elapsed_us() for event in ran]
        self.launches[part] += len(times)
        self.busy[part] += sum(times) / 1e6


def rest_of(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the whole step minus its parts: preparing micro-batches, checks, zeroing gradients."""
    rest = dict(found[STEP])
    for name, part in found.items():
        if name != STEP:
            rest = {key: None if value is None else value - part[key] for key, value in rest.items()}
    return rest


def table_of(found: Mapping[str, dict[str, Any]], on_gpu: bool) -> list[list[str]]:
    """Return the rows of a Markdown table, the whole step last."""
    rows = [list(COLUMNS if on_gpu else COLUMNS_ON_CPU)]
    for name, part in sorted(found.items(), key=lambda item: (item[0] == STEP, item[0] == REST)):
        busy = NOT_ON_CPU if part["busy_seconds"] is None else f"{1_000 * part['busy_seconds']:.2f}"
        rows.append([name, f"{1_000 * part['seconds']:.2f}", busy, f"{part['launches']:,}"])
    return rows


SECTIONS = {"update-profile": update_profile}

"""Sections of `benchmarks/on_gpu.py` on single updates: their time compared to stock TRL, and their operators."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from benchmarks.against_trl import alternate
from benchmarks.epoch import summarize_epoch
from benchmarks.gpu_limits import gpu_named, shape_of_config, update_flops
from benchmarks.gpu_measures import EPOCH, REPEATS, UPDATE, make_shared_models, work_for
from benchmarks.gpu_section import OutOfTime, Section
from benchmarks.machine import busy, gib
from benchmarks.work import Work, model_config, prompt_lengths
from benchmarks.worker import Worker
from rlhf.utils.console import Screen

PRECISION = {"no": "float32", "bf16": "bfloat16"}  # accelerate's name of the precision -> dtype of the forward pass
UPDATES = 10  # measured updates for an extrapolated epoch
# updates of this project alone. After a second optimizer step, RLOO's ratio of whole completions of random weights is
# above the limit (35 for 64 tokens), so the update would be skipped.
ALONE = {
    "RLOO": {"algorithm": "rloo", "batch_size": 4, "K": 6, "ppo_epochs": 1},
    "PPO, 64 prompts": {"algorithm": "ppo", "batch_size": 64, "minibatches": 16},
    "PPO, 64 prompts of mixed lengths": {"algorithm": "ppo", "batch_size": 64, "minibatches": 16, "varied": True},
}

BOTH = 12 * 2**30  # bytes of GPU memory for this project and stock TRL at the same time

# --- an update against stock TRL -------------------------------------------------------------------------------------


def update(section: Section) -> None:
    """Measure updates of this project alone, then alternate updates of this project and of stock TRL. A GPU that is
    too small for both runs those of this project."""
    for name, more in ALONE.items():
        section.attempt(name, partial(updates_alone, section, name, more))
    if section.on_gpu and torch.cuda.get_device_properties(0).total_memory < BOTH:
        for algorithm, more in UPDATE.items():
            alone = partial(updates_alone, section, algorithm.upper(), {"algorithm": algorithm, **more})
            section.attempt(f"{algorithm.upper()}, one update", alone)
        return
    for number, (algorithm, more) in enumerate(UPDATE.items()):
        until = time.monotonic() + section.left / (len(UPDATE) - number)
        name = f"{algorithm.upper()}, one update"
        section.attempt(name, partial(updates_of_both, section, algorithm, more, until))


def updates_alone(section: Section, name: str, more: dict) -> None:
    """Measure a warm-up and three updates of this project."""
    work = work_for(section, updates=1 + REPEATS, **more)
    make_shared_models(work)
    with Worker("ours", work.write(section.folder(f"workers/{name}") / "work.json")) as worker:
        worker.go()
        worker.go()
        spent = [worker.go()["seconds"] for _ in range(REPEATS)]
    steps = f"{work.ppo_epochs * work.minibatches} optimizer steps"
    note = f"median of {REPEATS}; {work.episodes} episodes, {steps}{share_of_peak(section, work, median(spent))}"
    section.figure(f"{name}, one update, ours", median(spent), "s", note, all=spent)


def share_of_peak(section: Section, work: Work, spent: float) -> str:
    """Return the share of the GPU's peak in bfloat16 that an update of `spent` seconds uses (MFU); "" for an unknown
    GPU."""
    gpu = gpu_named(torch.cuda.get_device_name(0)) if section.on_gpu else None
    if gpu is None:
        return ""
    prompt = sum(prompt_lengths(work)) / len(prompt_lengths(work))
    shape = shape_of_config(model_config(work))
    flops = update_flops(shape, work.episodes, prompt, work.reply_length, work.ppo_epochs, reward=True)
    return f"; MFU {flops / spent / gpu.peak:.1%}"


def updates_of_both(section: Section, algorithm: str, more: dict, until: float) -> None:
    """Measure updates of this project and of stock TRL, which import at the same time."""
    work = work_for(section, algorithm=algorithm, updates=1 + UPDATES, **more)
    work_file = work.write(section.folder(f"workers/{algorithm}") / "work.json")
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(name, work_file)) for name in ("ours", "stock")]
        make_shared_models(work)  # while the workers import
        alternate_until(section, work, workers, until)


def alternate_until(section: Section, work: Work, workers: list[Worker], until: float) -> None:
    """Measure a warm-up and `UPDATES` pairs of updates. Stop earlier when the clock reaches `until`."""
    timings: list[dict[str, dict]] = []
    try:
        facts = {worker.name: worker.go() for worker in workers}
        facts["ours"]["machine"]["busy_before_percent"] = busy()
        for pair in alternate(workers, work.updates, Screen()):
            timings.append(pair)
            if len(timings) > 1:
                record_pairs(section, replace(work, updates=len(timings)), facts, timings)
            if time.monotonic() + sum(update["seconds"] for update in pair.values()) > until:
                break
    finally:
        for worker in workers:  # the next algorithm needs their memory
            worker.process.kill()
            worker.process.wait()
    if len(timings) < 2:
        raise OutOfTime


def record_pairs(section: Section, work: Work, facts: dict[str, dict], timings: list[dict[str, dict]]) -> None:
    found = summarize_epoch(work, EPOCH, facts, timings)
    title = work.algorithm.upper()
    episodes = f"{work.episodes} episodes, {work.ppo_epochs * work.minibatches} optimizer steps"
    names = {"ours": "ours", "stock": "stock TRL"}
    kind = "CUDA tensors" if section.on_gpu else "process"
    for name, figures in found["sides"].items():
        spread = figures["seconds_per_update"]
        forward = PRECISION[found["mixed_precision"][name]]
        section.figure(
            f"{title}, one update, {names[name]}", spread["median"], "s",
            f"median of {len(timings) - 1}, {spread['lowest']:.3g} to {spread['highest']:.3g}; {episodes}; {forward}; "
            f"peak memory {gib(figures['memory']['peak'])} ({kind})"
            + (share_of_peak(section, work, spread["median"]) if name == "ours" else ""),
            all=spread["pairs"],
        )  # fmt: skip
        section.figure(
            f"{title}, one epoch of {EPOCH:,} prompts, {names[name]}", figures["minutes_per_epoch"]["median"], "min",
            f"extrapolated from {len(timings) - 1} of {found['updates']['of_the_epoch']:,} updates",
        )  # fmt: skip
    ratio = found["ratio"]
    section.figure(
        f"{title}, stock TRL's time / ours", ratio["median"], "",
        f"{ratio['lowest']:.3g} to {ratio['highest']:.3g} in {len(timings) - 1} pairs", all=ratio["pairs"],
    )  # fmt: skip


# --- operators -------------------------------------------------------------------------------------------------------


def operators(section: Section) -> None:
    """Count the operators of each part of an update. At this size a GPU waits for their launches."""
    for algorithm, more in {**UPDATE, "rloo": {"batch_size": 4, "K": 6, "ppo_epochs": 1}}.items():
        section.attempt(algorithm.upper(), partial(operators_of, section, algorithm, more))


def operators_of(section: Section, algorithm: str, more: dict) -> None:
    from benchmarks.operators import count, summary

    work = work_for(section, algorithm=algorithm, updates=2, **more)
    make_shared_models(work)
    for part, found in summary(count(work)).items():
        name = f"{algorithm.upper()}, operators: {part}"
        section.figure(name, found["operator"], "", f"{found['view']:.0f} views in addition")


SECTIONS = {"update": update, "operators": operators}

"""Sections of `benchmarks/on_gpu.py` that run the project's commands: the demo, recipes, determinism, the hub."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from benchmarks.constants import SEEDS
from benchmarks.gpu_commands import TO_STOP, Command, run, stand_ins
from benchmarks.gpu_section import OUT_OF_TIME, Section
from benchmarks.real_smollm2 import times_of
from rlhf.algorithms.table import ALGORITHMS as TABLE
from rlhf.analysis.curves import read_scalars
from rlhf.checkpoints.run_record import RunRecord
from rlhf.settings.recipes import DEMOS, shipped_recipes
from rlhf.settings.training import FITTED

ALGORITHMS = tuple(TABLE)
REAL = ("grpo", "ppo", "rloo")  # the shortest first
TOGETHER = "all algorithms at the same time"
RUN_TIMES = ("time/rollout_s", "time/score_s", "time/update_s")
SAVING = ("checkpoints", "best", "final save")  # parts of a run's time in run.json
START_SD = "standard deviations of the start model's scores"


# --- runs in bfloat16 ------------------------------------------------------------------------------------------------

RUN_OF = ["--num-iterations", 3, "--eval-every", 3, "--max-new-tokens", 32, "--bf16"]


def runs(section: Section) -> None:
    """Run --check update, and three updates of each algorithm in bfloat16 with stand-in models. The first section,
    because it shows most of what can be wrong on a new GPU."""
    folder = section.folder("runs")
    flags = [*stand_ins(section, folder), *RUN_OF]
    section.attempt("--check update", partial(checked, section, folder, flags))
    for algorithm in ALGORITHMS:
        name = f"{algorithm.upper()}, three updates"
        section.attempt(name, partial(short_run, section, name, folder, algorithm, flags))


def checked(section: Section, folder: Path, flags: list[object]) -> None:
    command = run(section, ["train_ppo.py", *flags, "--check", "update"], folder)
    passed = [line.split("  ok")[0].strip() for line in command.printed().splitlines() if "  ok" in line]
    section.figure("--check update", f"{len(passed)} passed", "", ", ".join(passed))


def short_run(section: Section, name: str, folder: Path, algorithm: str, flags: list[object]) -> None:
    output = folder / algorithm
    shutil.rmtree(output, ignore_errors=True)
    run(section, [f"train_{algorithm}.py", *flags, "--output", output], folder)
    scalars, _ = read_scalars(output / "logs")
    spent = sum(scalars[tag].values[-1] for tag in RUN_TIMES)
    peak = RunRecord.require(output, "--output").figures["peak_memory_gib"]
    kl = scalars["kl_divergence/token"].values[0]
    ratio = scalars["policy/ratio"].values[0]
    note = f"last update; KL of the first {kl:.2g} nats/token, ratio {ratio:.4f}; peak {peak:.2f} GiB"
    section.figure(name, spent, "s per update", note)


# --- the demo --------------------------------------------------------------------------------------------------------


def demo(section: Section) -> None:
    """Train the demo with all algorithms at the same time, one seed after another. Also records unfinished runs."""
    folder = section.folder("demo")
    if section.plan.demo_parts:
        shutil.copytree(section.plan.demo_parts, folder / "demo_parts", dirs_exist_ok=True)
    section.attempt("demo parts", partial(demo_parts, section, folder))
    if not (folder / "demo_parts" / "stamp.json").is_file():
        return
    for seed in SEEDS if section.plan.full else SEEDS[:1]:
        section.attempt(f"seed {seed}", partial(demo_seed, section, folder, seed))


PREPARE = """
from rlhf.demo.parts import prepare_parts
from rlhf.models.device import start_device
from rlhf.utils.console import Screen
screen = Screen()
prepare_parts("demo", screen, start_device(screen))
"""


def demo_parts(section: Section, folder: Path) -> None:
    start = time.monotonic()
    command = run(section, ["-c", PREPARE], folder)
    record = json.loads((folder / "demo_parts" / "reward_model" / "metrics.json").read_text(encoding="utf-8"))
    note = f"pairs and reward model (accuracy {record['accuracy']:.3f}), in {time.monotonic() - start:.0f} s"
    section.figure("demo parts", "cached" if "demo parts: cached" in command.printed() else "made", "", note)


def demo_seed(section: Section, folder: Path, seed: int) -> None:
    threads = max(1, (psutil.cpu_count(logical=False) or 2) // len(ALGORITHMS))
    outputs = {algorithm: folder / f"{algorithm}_seed{seed}" for algorithm in ALGORITHMS}
    commands: dict[str, Command] = {}
    try:
        for algorithm, output in outputs.items():
            shutil.rmtree(output, ignore_errors=True)  # an output of an earlier call
            words = [f"train_{algorithm}.py", "--recipe", "demo", "--seed", seed, "--output", output]
            commands[algorithm] = Command.start(words, folder, threads)
        statuses = {algorithm: command.wait(section.left - TO_STOP) for algorithm, command in commands.items()}
        for algorithm, status in statuses.items():
            if status is None:
                commands[algorithm].stop()
        for algorithm, command in commands.items():
            command.wait(section.left - TO_STOP / 4)
            name = f"{algorithm.upper()}, seed {seed}"
            report_run(section, name, statuses[algorithm], command, outputs[algorithm])
    finally:
        for command in commands.values():
            command.end()


def report_run(section: Section, name: str, status: int | None, command: Command, output: Path) -> None:
    if status is None:
        report_stopped(section, name, output)
    elif status:
        section.error(name, f"exit status {status}: {command.last_lines()}")
    else:
        report_finished(section, name, RunRecord.require(output, "--output"))


def report_finished(section: Section, name: str, finished: RunRecord) -> None:
    """Record the figures of a finished run of the demo."""
    figures = finished.figures
    spent = finished.spent
    low, high = figures["gold_rise_interval"]
    notes = [
        f"gold quality {figures['gold_before']:.3f} -> {figures['gold_after']:.3f}",
        f"95% interval of the gain {low:+.3f} to {high:+.3f}",
        f"KL {figures['kl_last_10_updates']:.2f} {figures['kl_unit']} (target {figures['kl_target']:g})",
        f"{spent.updates} updates, {spent.episodes:,} episodes in {figures['seconds']:.0f} s, {TOGETHER}",
    ]
    gain = figures["score_rise_in_start_sd"]
    section.figure(f"{name}: score gain", gain, START_SD, "; ".join(notes), figures=figures)
    record_times(section, name, finished.time)


def record_times(section: Section, name: str, time: dict[str, float]) -> None:
    """Record the share of a run's time that is not spent in updates, with the share of saving, and a table of all
    parts in run.json."""
    whole = sum(time.values())
    saving = sum(seconds for part, seconds in time.items() if part.split("/")[0] in SAVING)
    rows = [[part, f"{seconds:.1f}", f"{seconds / whole:.1%}"] for part, seconds in sorted(time.items())]
    section.figure(
        f"{name}: time of all but the updates", 100 * (1 - times_of(time)["learning"] / whole), "%",
        f"of {whole:.0f} s; {', '.join(SAVING)}: {saving / whole:.1%}",
        table=[["part", "seconds", "share"], *rows], time=time,
    )  # fmt: skip


def report_stopped(section: Section, name: str, output: Path) -> None:
    """Record how far an unfinished run came."""
    scalars, _ = read_scalars(output / "logs") if (output / "logs").is_dir() else ({}, [])
    score = scalars.get("eval/score")
    rewards = scalars.get("rewards/mean")
    if score is None or rewards is None:
        return section.error(name, f"{OUT_OF_TIME} before the end of the first update")
    record = RunRecord.read(output)
    planned = "?" if record is None else record.plan.updates
    notes = [
        f"out of time after update {rewards.updates[-1]} of {planned}",
        f"last evaluation after update {score.updates[-1]}, start score {score.values[0]:.3f}",
        f"{rewards.seconds[-1]:.0f} s, {TOGETHER}",
    ]
    section.figure(f"{name}: score of the unfinished run", float(score.values[-1]), "", "; ".join(notes))


# --- --fit -----------------------------------------------------------------------------------------------------------

FITS = {"tiny": ("800MB",), "smollm2": ("4GB", "2GB")}


def fit(section: Section) -> None:
    """Run two updates with --fit, and compare the measured peak memory with the size."""
    folder = section.folder("fit")
    flags = [*stand_ins(section, folder), "--num-iterations", 2]
    section.attempt("--dry-run", partial(timed_dry_run, section, folder, flags))
    for size in FITS[section.plan.size]:
        section.attempt(f"--fit {size}", partial(fitted_run, section, folder, size, flags))


def timed_dry_run(section: Section, folder: Path, flags: list[object]) -> None:
    start = time.monotonic()
    run(section, ["train_ppo.py", *flags, "--dry-run"], folder)
    section.figure("--dry-run", time.monotonic() - start, "s", "until the plan is printed, imports included")


def fitted_run(section: Section, folder: Path, size: str, flags: list[object]) -> None:
    output = folder / size
    shutil.rmtree(output, ignore_errors=True)
    run(section, ["train_ppo.py", *flags, "--fit", size, "--output", output], folder)
    finished = RunRecord.require(output, "--output")
    chosen = ", ".join(f"{name} {finished.flat_settings[name]}" for name in FITTED)
    peak = finished.figures["peak_memory_gib"]
    section.figure(f"--fit {size}", peak, "GiB", f"measured peak of two updates with {chosen}")


# --- recipes ---------------------------------------------------------------------------------------------------------


# 512 prompts with answers and an evaluation file, and a trained teacher, which the stand-ins lack
OWN_INPUTS = ("qwen3-gsm8k", "distill")
RECIPES = sorted(set(shipped_recipes()) - {*DEMOS, *OWN_INPUTS})


def recipes(section: Section) -> None:
    """Run ten updates of each of these recipes with each algorithm on stand-in models."""
    folder = section.folder("recipes")
    models = stand_ins(section, folder)
    for recipe in RECIPES:
        for algorithm in ALGORITHMS:
            name = f"{recipe}, {algorithm.upper()}"
            section.attempt(name, partial(recipe_run, section, name, folder, recipe, algorithm, models))


def recipe_run(section, name: str, folder: Path, recipe: str, algorithm: str, models: list[object]) -> None:
    output = folder / f"{recipe}_{algorithm}"
    script = f"train_{algorithm}.py"
    length = ["--num-iterations", 10]
    shutil.rmtree(output, ignore_errors=True)
    run(section, [script, "--recipe", recipe, *models, *length, "--output", output], folder)
    scalars, _ = read_scalars(output / "logs")
    spent = sum(median(scalars[tag].values) for tag in RUN_TIMES)
    peak = RunRecord.require(output, "--output").figures["peak_memory_gib"]
    section.figure(
        name, spent, "s per update", f"rollout + scoring + update, medians of 10 updates; peak {peak:.2f} GiB"
    )


# --- determinism -----------------------------------------------------------------------------------------------------


def same_seed(section: Section) -> None:
    """Compare two runs with the same seed, with and without --deterministic. Record the first difference, if any."""
    folder = section.folder("same_seed")
    flags = [*stand_ins(section, folder), "--num-iterations", 5, "--max-new-tokens", 32, "--learning-rate", "1e-4"]
    for switch in ("--deterministic", "--no-deterministic"):
        for algorithm in ALGORITHMS:
            name = f"{algorithm.upper()}, {switch}"
            section.attempt(name, partial(two_runs, section, name, folder, algorithm, [*flags, switch]))


def two_runs(section: Section, name: str, folder: Path, algorithm: str, flags: list[object]) -> None:
    from tests.kills import differing, scalars

    outputs = [folder / f"{name.replace(', --', '_')}_{number}" for number in (1, 2)]
    for output in outputs:
        shutil.rmtree(output, ignore_errors=True)
        run(section, [f"train_{algorithm}.py", *flags, "--output", output], folder)
    differences = differing(*outputs)
    first = first_difference(*(scalars(output / "logs") for output in outputs))
    note = f"first difference in update {first[0]}, {first[1]}; " if first else ""
    section.figure(name, "differs" if differences else "bit-identical", "", note + "; ".join(differences[:3]))


def first_difference(one: dict[str, list], other: dict[str, list]) -> tuple[int, str] | None:
    """Return (update, tag) of the first difference between two runs' scalars. Ignores times and memory."""
    differences = [
        (here[0], tag)
        for tag in one.keys() & other.keys()
        if not tag.startswith(("time/", "throughput/", "memory/"))
        for here, there in zip(one[tag], other[tag], strict=False)
        if here != there
    ]
    return min(differences, default=None)


# --- out of memory ---------------------------------------------------------------------------------------------------

# on Windows the run would otherwise set another fraction
CAPPED = """
import sys, torch
torch.cuda.set_per_process_memory_fraction({share})
torch.cuda.set_per_process_memory_fraction = lambda *_: None
sys.argv = sys.argv[1:]
import train_ppo
from rlhf.utils.errors import run_command
run_command(train_ppo.main)
"""
# expected outcome: GPU memory of the process in GiB
CAPS = {"halved micro-batches": 8.0, "one line": 3.0}


def out_of_memory(section: Section) -> None:
    """Limit a run's GPU memory. It must halve its micro-batches, or stop with a one-line error."""
    if not section.on_gpu:
        return section.error("out of memory", "needs a CUDA GPU")
    folder = section.folder("out_of_memory")
    flags = [*stand_ins(section, folder), "--num-iterations", 2, "--batch-size", 64, "--micro-batch-size", 64,
             "--max-new-tokens", 256]  # fmt: skip
    for expected, cap in CAPS.items():
        section.attempt(expected, partial(capped_run, section, folder, expected, cap, flags))


def capped_run(section: Section, folder: Path, expected: str, cap: float, flags: list[object]) -> None:
    import torch

    share = min(1.0, cap * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    output = folder / expected.replace(" ", "_")
    shutil.rmtree(output, ignore_errors=True)
    command = Command.start(["-c", CAPPED.format(share=share), "train_ppo.py", *flags, "--output", output], folder)
    status = command.wait(section.left - TO_STOP)
    command.end()
    reported = [line for line in command.printed().splitlines() if "out of memory" in line]
    traceback = "; with a traceback" if "Traceback" in command.printed() else ""
    note = f"with {cap:g} GiB: {' '.join(reported)[:300] or command.last_lines()}{traceback}"
    section.figure(expected, f"exit status {status}", "", note)


# --- real weights ----------------------------------------------------------------------------------------------------


def real(section: Section) -> None:
    """Train SmolLM2-135M-Instruct with each algorithm of the recipe smollm2-sums. Its weights are in a package."""
    folder = section.folder("real")
    for algorithm in REAL:
        section.attempt(algorithm.upper(), partial(real_run, section, folder, algorithm))


def real_run(section: Section, folder: Path, algorithm: str) -> None:
    """Train, or resume a run that an earlier call did not finish."""
    output = folder / algorithm
    record = RunRecord.read(output)
    how = "--overwrite" if record is None or record.status == "finished" else "--resume"
    run(section, [f"train_{algorithm}.py", "--recipe", "smollm2-sums", "--output", output, how], folder)
    finished = RunRecord.require(output, "--output")
    figures = finished.figures
    section.figure(
        f"{algorithm.upper()}, smollm2-sums, right answers", 100 * figures["score_after"], "%",
        f"{100 * figures['score_before']:.1f}% before; {figures['seconds']:.0f} s, "
        f"KL {figures['kl_last_10_updates']:.2f} {figures['kl_unit']}, peak {figures['peak_memory_gib']:.2f} GiB",
        figures=figures,
    )  # fmt: skip
    record_times(section, f"{algorithm.upper()}, smollm2-sums", finished.time)


SECTIONS = {
    "runs": runs,
    "fit": fit,
    "demo": demo,
    "recipes": recipes,
    "same seed": same_seed,
    "out of memory": out_of_memory,
    "real": real,
}

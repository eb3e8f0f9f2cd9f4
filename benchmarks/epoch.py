"""Estimates time and memory of one epoch: measures some of its updates and extrapolates.

python benchmarks/epoch.py --device cuda --dtype bfloat16 --rollout-batch 64 --stock --write epoch.json

Prompts have different lengths. All completions have the maximum length; with shorter completions an epoch is faster.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.against_trl import alternate
from benchmarks.work import Work, add_flags, at_least, choose_device, make_models, prompt_lengths, work_of
from benchmarks.worker import Worker
from rlhf.utils.errors import RunError, UserError, run_command
from rlhf.utils.files import write_json

MINIBATCH = 4  # prompts per optimizer step, as in the default recipe, for every rollout size
PARTS = ("rollout", "score", "update")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before importing torch, so that --help and errors are fast
    device = choose_device(arguments.device)
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    screen = Screen()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        batch = arguments.rollout_batch
        updates = 1 + arguments.updates
        parts = max(1, batch // MINIBATCH)
        work = work_of(
            arguments, folder=folder, device=device, batch_size=batch, minibatches=parts, varied=True, updates=updates
        )
        found = summarize_epoch(work, arguments.prompts, *measure(work, arguments.stock, screen))
    show(found, screen)
    if arguments.write:
        write_json(arguments.write, found)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Estimate time and memory of one epoch from some of its updates.",
        conflict_handler="resolve",  # some defaults differ from the other benchmarks'
    )
    add_flags(parser)
    parser.set_defaults(size="smollm2")
    parser.add_argument("--prompts", type=at_least(1), default=10_000, help="prompts in the epoch (10000)")
    parser.add_argument("--rollout-batch", type=at_least(1), default=4, help="prompts per update (4)")
    parser.add_argument("--prompt-length", type=at_least(2), default=256, help="longest prompt, in tokens (256)")
    parser.add_argument(
        "--reply-length", type=at_least(2), default=128, help="length of every completion, in tokens (128)"
    )
    parser.add_argument("--ppo-epochs", type=at_least(1), default=4, help="epochs over each rollout (4)")
    parser.add_argument("--updates", type=at_least(1), default=10, help="measured updates, after a warm-up (10)")
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters; TRL trains all weights")
    parser.add_argument("--stock", action="store_true", help="also measure stock TRL on the same work")
    arguments = parser.parse_args(argv)
    batch = arguments.rollout_batch
    if batch > MINIBATCH and batch % MINIBATCH:
        raise UserError(
            f"not a multiple of the minibatch size {MINIBATCH}",
            f"--rollout-batch {batch}",
            f"Use a multiple of {MINIBATCH}",
        )
    if arguments.stock and arguments.algorithm == "grpo" and batch > MINIBATCH:
        raise UserError(
            "TRL's GRPO has no minibatches", f"--rollout-batch {batch}", f"Remove --stock, or use {MINIBATCH}"
        )
    return arguments


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(work: Work, stock: bool, screen) -> tuple[dict[str, dict], list[dict[str, dict]]]:
    """Return the facts of each implementation, and all its updates including the warm-up."""
    from contextlib import ExitStack

    from benchmarks.machine import busy

    work_file = work.write(Path(work.folder, "work.json"))
    with screen, ExitStack() as stack:
        workers = [stack.enter_context(Worker(name, work_file)) for name in ("ours", "stock")[: 1 + stock]]
        make_models(work)  # while the workers import
        facts = {worker.name: worker.go() for worker in workers}
        facts["ours"]["machine"]["busy_before_percent"] = busy()  # by other programs: all workers wait
        return facts, list(alternate(workers, work.updates, screen))


def summarize_epoch(
    work: Work, prompts: int, facts: dict[str, dict], timings: list[dict[str, dict]]
) -> dict[str, Any]:
    """Return the results of all implementations and the estimate of an epoch.

    Raises RunError if the implementations did different work.
    """
    from rlhf.checkpoints.run_record import environment

    names = list(facts)
    whole = -(-prompts // work.batch_size)
    tokens = {name: completion_tokens(work, name, timings) for name in names}
    steps = {name: timings[-1][name]["optimizer_steps"] for name in names}
    if len(set(tokens.values())) > 1 or len(set(steps.values())) > 1:
        raise RunError(
            "the implementations did different work",
            f"completion tokens {tokens}, optimizer steps {steps}",
            "This is a bug, please report it",
        )
    sides = {n: epoch_estimate([t[n] for t in timings[1:]], tokens[n] / work.updates, whole) for n in names}
    settings = {name: value for name, value in work.settings.items() if name not in ("updates", "load_in_4bit")}
    found = {
        **environment(),
        "settings": {**settings, "prompts": prompts},
        "machine": facts["ours"]["machine"],
        "mixed_precision": {name: facts[name]["mixed_precision"] for name in names},
        "updates": {"measured": work.updates - 1, "of_the_epoch": whole},
        "said": f"measured {work.updates - 1} of {whole:,} updates; the rest is extrapolated",
        "completion_tokens": tokens,
        "optimizer_steps": steps,
        "sides": sides,
        "notes": notes(work, facts),
    }
    if "stock" in names:
        found["ratio"] = spread([t["stock"]["seconds"] / t["ours"]["seconds"] for t in timings[1:]])
    return found


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "lowest": min(values), "highest": max(values), "pairs": list(values)}


def completion_tokens(work: Work, name: str, timings: Sequence[dict[str, dict]]) -> int:
    """Return the completion tokens of all updates.

    The worker of TRL subtracts `prompt_length` tokens for every prompt. This function corrects that to the real prompt
    lengths: over all updates each prompt is read once per completion.
    """
    counted = sum(t[name]["completion_tokens"] for t in timings)
    if name == "ours":
        return counted
    real = sum(prompt_lengths(work)) * work.episodes // work.batch_size
    return counted + work.updates * work.episodes * work.prompt_length - real


def epoch_estimate(timings: Sequence[dict[str, Any]], tokens: float, whole: int) -> dict[str, Any]:
    """Return times per update (`tokens` completion tokens each) and per epoch (`whole` updates), and the memory."""
    seconds = spread([t["seconds"] for t in timings])
    found = {
        "seconds_per_update": seconds,
        "minutes_per_epoch": {key: seconds[key] * whole / 60 for key in ("median", "lowest", "highest")},
        "completion_tokens_per_s": tokens / seconds["median"],
        "memory": timings[-1]["memory"],
    }
    if "parts" in timings[0]:
        found["shares"] = {part: median(t["parts"][part] / t["seconds"] for t in timings) for part in PARTS}
    return found


def notes(work: Work, facts: dict[str, dict]) -> list[str]:
    """Return the conditions of the measurement, one sentence each."""
    from benchmarks.comparison import notes as comparison_notes

    lines = [
        "the first update is a warm-up and is excluded; loading, evaluation and saving are excluded, too",
        "prompts have random ids and different lengths, "
        f"{sum(prompt_lengths(work)) / work.updates / work.batch_size:.0f} tokens on average; all completions have "
        "the maximum length",
        f"each optimizer step uses {min(work.batch_size, MINIBATCH)} prompts, independent of the rollout's size",
    ]
    return lines + (comparison_notes(work, facts)[1:] if "stock" in facts else [])


# --- console ---------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any], screen) -> None:
    """Print the table, and below it the settings, versions and machine."""
    from benchmarks.machine import BUSY, busy_line, machine_line

    settings = found["settings"]
    versions = found["versions"]
    sides = found["sides"]
    title = f"one epoch of {settings['prompts']:,} prompts, {settings['algorithm'].upper()}, {settings['size']}, "
    title += f"{settings['device']}, {settings['dtype']}, {settings['batch_size']} prompts per update"
    names = {"ours": "ours", "stock": "TRL"}
    screen.table(title, ["", *(names[name] for name in sides)], rows(sides), lines=False)
    screen.say(found["said"])
    ratio = found.get("ratio")
    if ratio:
        screen.say(f"TRL's time / ours: {ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})")
    screen.facts(
        [
            ("settings", ", ".join(f"{name} {value}" for name, value in settings.items())),
            ("versions", ", ".join(f"{n} {versions[n]}" for n in ("torch", "transformers", "trl", "peft"))),
            ("machine", f"{machine_line(found['machine'])}; {found['platform']}, Python {found['python']}"),
            *(("note", note) for note in found["notes"]),
        ]
    )
    if "stock" not in sides and found["machine"]["busy_before_percent"] > BUSY:
        screen.say(busy_line(found["machine"]))


def rows(sides: dict[str, dict[str, Any]]) -> list[list[str]]:
    from benchmarks.machine import gib

    def line(name: str, show: Callable[[dict[str, Any]], str]) -> list[str]:
        return [name, *(show(side) for side in sides.values())]

    return [
        line("seconds per update, median", lambda s: f"{s['seconds_per_update']['median']:.3f}"),
        line("  lowest to highest", lambda s: between(s["seconds_per_update"], 3)),
        line("minutes per epoch, extrapolated", lambda s: f"{s['minutes_per_epoch']['median']:.1f}"),
        line("  lowest to highest", lambda s: between(s["minutes_per_epoch"], 1)),
        line("completion tokens per second", lambda s: f"{s['completion_tokens_per_s']:,.0f}"),
        *(line(f"  share of {part}", lambda s, part=part: share(s, part)) for part in PARTS),
        line("peak memory", lambda s: gib(s["memory"]["peak"])),
        line("  above the imports", lambda s: gib(s["memory"]["above_imports"])),
    ]


def between(values: dict[str, Any], digits: int) -> str:
    return f"{values['lowest']:,.{digits}f} to {values['highest']:,.{digits}f}"


def share(side: dict[str, Any], part: str) -> str:
    return f"{side['shares'][part]:.0%}" if "shares" in side else ""


if __name__ == "__main__":
    run_command(main)

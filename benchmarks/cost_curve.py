"""Measures the time per completion token as the batch size or the completion length doubles, without stock TRL.

python benchmarks/cost_curve.py --size smollm2 --device cuda --json cost_curve.json --picture cost_curve.png
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.work import Work, add_flags, at_least, choose_device, make_models, work_of
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json

LIMIT = 1.20  # highest accepted ratio of the time per token to that of half the size
SHORTEST = 16  # tokens
LARGEST = {"cpu": (64, 512), "cuda": (256, 1024)}  # batch, length
SETTINGS = {"batch": "batch_size", "length": "reply_length"}
UNITS = {"batch": "prompts per update", "length": "tokens per completion"}


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before importing torch, so that --help and errors are fast
    device = choose_device(arguments.device)
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    screen = Screen()
    with screen, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = work_of(arguments, folder=folder, device=device, updates=1 + arguments.repeats)
        make_models(work)
        found = measure(work, sizes(arguments, device), screen)
    show(found, screen)
    if arguments.json:
        write_json(arguments.json, found)
    if arguments.picture:
        from rlhf.reports.plot_style import save_picture

        save_picture(draw(found), arguments.picture)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure the time per completion token over the batch size and over the completion length."
    )
    add_flags(parser)
    parser.add_argument(
        "--batch-size", type=at_least(1), default=8, help="prompts per update while the length doubles (8)"
    )
    parser.add_argument(
        "--reply-length", type=at_least(2), default=64, help="completion tokens while the batch size doubles (64)"
    )
    parser.add_argument("--ppo-epochs", type=at_least(1), default=1, help="epochs over each rollout (1)")
    parser.add_argument("--max-batch", type=at_least(1), help="largest batch size (CPU 64, CUDA 256)")
    parser.add_argument("--max-length", type=at_least(1), help="longest completion, in tokens (CPU 512, CUDA 1024)")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="updates per size, after a warm-up (3)")
    parser.add_argument("--picture", type=Path, help="PNG file for the two curves")
    return parser.parse_args(argv)


def sizes(arguments: argparse.Namespace, device: str) -> dict[str, list[int]]:
    """Return the batch sizes and completion lengths to measure."""
    batch, length = LARGEST[device]
    return {
        "batch": doublings(1, arguments.max_batch or batch),
        "length": doublings(SHORTEST, arguments.max_length or length),
    }


def doublings(first: int, last: int) -> list[int]:
    """Return `first`, 2 x `first`, 4 x `first`, ... up to `last`."""
    return [first * 2**n for n in range((last // first).bit_length())] or [first]


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(work: Work, points: dict[str, list[int]], screen) -> dict[str, Any]:
    """Return both curves with settings, versions and machine."""
    import torch

    from benchmarks.machine import busy, machine
    from rlhf.checkpoints.run_record import environment

    if work.threads is not None:
        torch.set_num_threads(work.threads)
    facts = {**environment(), "machine": {**machine(work.device), "busy_before_percent": busy()}}
    curves = {over: curve(work, over, points[over], screen) for over in SETTINGS}
    return {
        **facts,
        "settings": work.settings,
        "limit": LIMIT,
        "largest_ratio": {over: max((p["ratio"] for p in c[1:]), default=None) for over, c in curves.items()},
        "within": all(p["ratio"] <= LIMIT for c in curves.values() for p in c[1:]),
        "curves": curves,
    }


def curve(work: Work, over: str, sizes: Sequence[int], screen) -> list[dict[str, Any]]:
    """Return one point per size, with the ratio of its time per token to that of the previous size."""
    points: list[dict[str, Any]] = []
    for size in sizes:
        screen.progress(f"{over} {size}", last=size == sizes[-1])
        found = point(replace(work, **{SETTINGS[over]: size}))
        ratio = found["seconds_per_token"] / points[-1]["seconds_per_token"] if points else None
        points.append({"size": size, **found, "ratio": ratio})
    return points


def point(work: Work) -> dict[str, Any]:
    """Return the medians over all updates except the first."""
    from benchmarks import ours

    trainer = ours.build(work)
    timings = [ours.measured_update(trainer, update, work.device) for update in range(1, work.updates + 1)][1:]
    del trainer
    gc.collect()  # the trainer and its callbacks form a reference cycle
    return {
        "seconds": median(t["seconds"] for t in timings),
        "completion_tokens": median(t["completion_tokens"] for t in timings),
        "seconds_per_token": median(t["seconds"] / t["completion_tokens"] for t in timings),
        "parts": {part: median(t["parts"][part] for t in timings) for part in ours.PARTS},
    }


# --- console and picture ---------------------------------------------------------------------------------------------


def show(found: dict[str, Any], screen) -> None:
    """Print one table per curve, then the machine."""
    from benchmarks.machine import BUSY, busy_line, machine_line

    for over, points in found["curves"].items():
        rows = [
            [f"{p['size']:,}", f"{p['seconds']:.3f}", f"{p['seconds_per_token'] * 1e3:.3f}", ratio_text(p["ratio"])]
            for p in points
        ]
        columns = [UNITS[over], "s per update", "ms per completion token", f"ratio to previous (limit {LIMIT:.2f})"]
        screen.table(title(found, over), columns, rows, lines=False)
    doubling = "no doubling" if found["within"] else "at least one doubling"
    screen.say(f"{doubling} increases the time per completion token by more than {LIMIT - 1:.0%}")
    screen.facts([("machine", machine_line(found["machine"])), ("torch", found["versions"]["torch"])])
    if found["machine"]["busy_before_percent"] > BUSY:
        screen.say(busy_line(found["machine"]))


def ratio_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}" + ("" if ratio <= LIMIT else "  over the limit")


def title(found: dict[str, Any], over: str) -> str:
    s = found["settings"]
    fixed = (
        f"{s['reply_length']} tokens per completion" if over == "batch" else f"{s['batch_size']} prompts per update"
    )
    return f"{s['algorithm'].upper()}, {s['size']}, {s['device']}, {s['dtype']}, {fixed}"


def draw(found: dict[str, Any]):
    """Plots the milliseconds per completion token over the batch size and over the completion length."""
    from rlhf.reports.plot_style import line_styles_of, new_figure, style

    s = found["settings"]
    device = {"cpu": "a CPU", "cuda": "a GPU"}.get(s["device"], s["device"])
    titles = {
        "batch": f"Larger batches ({s['reply_length']} tokens per completion)",
        "length": f"Longer completions ({s['batch_size']} prompts per update)",
    }
    with style():
        figure = new_figure(10, 4.6)
        figure.suptitle(
            f"Cost of a completion token: {s['algorithm'].upper()} on {device}, {s['size']} model, {s['dtype']}"
        )
        for axes, (over, points) in zip(figure.subplots(1, 2), found["curves"].items(), strict=True):
            x, y = [p["size"] for p in points], [p["seconds_per_token"] * 1e3 for p in points]
            colour, marker, _ = line_styles_of([s["algorithm"]])[s["algorithm"]]
            axes.plot(x, y, marker=marker, color=colour, linewidth=2)
            axes.set_xscale("log", base=2)
            axes.set_xticks(x, [f"{size:,}" for size in x])
            axes.set_ylim(bottom=0)
            axes.set_title(titles[over])
            axes.set_xlabel(UNITS[over])
        figure.supylabel("milliseconds per completion token", fontsize=12)
    return figure


if __name__ == "__main__":
    run_command(main)

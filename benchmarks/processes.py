"""Compares an update on several processes with the same update on one, each process with the same number of threads.

python benchmarks/processes.py --size smollm2 --processes 2 --batch-sizes 8 32 128 --write processes.json
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.work import Work, add_flags, at_least, choose_device, make_models, work_of
from benchmarks.worker import Worker
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before importing torch, so that --help and errors are fast
    device = choose_device(arguments.device)
    from benchmarks.machine import machine
    from rlhf.checkpoints.run_record import environment
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    screen = Screen()
    points = []
    with screen, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = work_of(arguments, folder=folder, device=device, updates=1 + arguments.repeats)
        make_models(work)
        for lora in (False, True) if arguments.lora_too else (False,):
            for size in arguments.batch_sizes:
                point = measure(replace(work, lora=lora, batch_size=size), arguments.processes)
                points.append(point)
                screen.say(line_of(point))
    if arguments.write:
        found = {**environment(), "machine": machine(device), "settings": work.settings, "points": points}
        write_json(arguments.write, found)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare updates on several processes with updates on one.")
    add_flags(parser, ("ppo", "grpo", "rloo"))
    parser.add_argument("--processes", type=at_least(2), default=2, help="number of processes (2)")
    parser.add_argument(
        "--batch-sizes", type=at_least(1), nargs="+", default=[8, 32, 128], help="prompts per update (8 32 128)"
    )
    parser.add_argument("--reply-length", type=at_least(2), default=64, help="completion length in tokens (64)")
    parser.add_argument("--ppo-epochs", type=at_least(1), default=1, help="epochs over each rollout (1)")
    parser.add_argument("--lora-too", action="store_true", help="also measure LoRA adapters")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="pairs of updates, after a warm-up pair (3)")
    parser.set_defaults(threads=1)
    return parser.parse_args(argv)


def variables(rank: int, count: int, port: int, gpu: bool) -> dict[str, str]:
    """Return what a launcher sets for one process, and with `gpu` which GPUs it may select from."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))} if gpu else {}
    return {"MASTER_ADDR": "127.0.0.1", **visible, **{name: str(number) for name, number in numbers.items()}}


def measure(work: Work, count: int) -> dict[str, Any]:
    """Return the seconds of updates on one process and on `count`, in turn, and their ratio."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    file = work.write(Path(work.folder, "work.json"))
    threads = {"OMP_NUM_THREADS": str(work.threads)}
    gpu = work.device == "cuda"
    with ExitStack() as stack:
        alone = stack.enter_context(Worker("ours", file, "alone", **threads))
        group = [
            stack.enter_context(
                Worker("ours", file, f"process {rank}", **threads, **variables(rank, count, port, gpu))
            )
            for rank in range(count)
        ]
        alone.go()
        together(group)
        pairs = [(alone.go(), together(group)) for _ in range(work.updates)][1:]  # the first pair is a warm-up
    one, several = ([seconds["seconds"] for seconds in side] for side in zip(*pairs, strict=True))
    ratios = [a / b for a, b in zip(one, several, strict=True)]
    names = pairs[0][0]["parts"]
    sides = list(zip(*pairs, strict=True))
    parts = {name: [median(found["parts"][name] for found in side) for side in sides] for name in names}
    return {
        "batch_size": work.batch_size,
        "lora": work.lora,
        "processes": count,
        "seconds_of_one": one,
        "seconds_of_all": several,
        "ratio": median(ratios),
        "ratios": ratios,
        "parts": parts,  # name -> median seconds of one process, and of all
    }


def together(group: list[Worker]) -> dict[str, Any]:
    """Let all processes take the next step. Return the results of the slowest."""
    for worker in group:
        worker.request()
    return max((worker.receive() for worker in group), key=lambda found: found.get("seconds", 0.0))


def line_of(point: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {one / all:.2f}x" for name, (one, all) in point["parts"].items() if all > 0)
    ratios = point["ratios"]
    trained = "LoRA" if point["lora"] else "all weights"
    return (
        f"batch {point['batch_size']}, {trained}: "
        f"{median(point['seconds_of_one']):.2f} s on one process, {median(point['seconds_of_all']):.2f} s on "
        f"{point['processes']}, {point['ratio']:.2f}x ({min(ratios):.2f} to {max(ratios):.2f}; {parts})"
    )


if __name__ == "__main__":
    run_command(main)

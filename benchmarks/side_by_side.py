"""Compares this checkout with another one: sampling, and the optimizer steps of an update, in interleaved pairs.

git worktree add ../before 871a41f
python benchmarks/side_by_side.py ../before --pairs 5 --write side_by_side.json

Each case has one process per checkout, which run one update in turn. The result is the median of each side, and of the
ratios. An update also has the share of its time that its matrix products need alone, one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from unittest.mock import patch

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, os.environ.get("SIDE_ROOT", str(HERE)))  # a worker imports the checkout that it measures

# the shape of an update of the recipe smollm2-sums with PPO
SUMS = {"batch_size": 64, "prompt_length": 64, "reply_length": 24, "ppo_epochs": 2, "minibatches": 2, "varied": True}
CASES = {
    "sampling at 64 slots, bfloat16": ("sampling", {**SUMS, "size": "smollm2", "dtype": "bfloat16"}),
    "update, bfloat16": ("update", {**SUMS, "size": "smollm2", "dtype": "bfloat16"}),
    "update, float32": ("update", {**SUMS, "size": "smollm2", "dtype": "float32"}),
    "sampling, tiny, float32": ("sampling", {**SUMS, "dtype": "float32"}),
    "update, tiny, float32": ("update", {**SUMS, "dtype": "float32"}),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare this checkout with another one.")
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--pairs", type=int, default=5, help="measured updates per side and case (5)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases (all)")
    parser.add_argument("--batch-size", type=int, default=64, help="prompts per update (64)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if torch can use one")
    parser.add_argument("--write", type=Path, help="JSON file for the results")
    arguments = parser.parse_args(argv)
    from benchmarks.work import Work, choose_device, make_models

    device = choose_device(arguments.device)
    found = {}
    for name in arguments.only:
        kind, settings = CASES[name]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            given = {**settings, "batch_size": arguments.batch_size, "updates": arguments.pairs + 1, "device": device}
            make_models(Work(folder, **given))
            found[name] = pairs(kind, {"folder": folder, **given}, arguments.other.resolve(), arguments.pairs)
        print(name, json.dumps(found[name]))
        if arguments.write:
            arguments.write.write_text(json.dumps(found, indent=2), encoding="utf-8")


def pairs(kind: str, work: dict, other: Path, count: int) -> dict[str, float]:
    """Return the median seconds of both sides, the median ratio, and the share of products of each side's update."""
    sides = {"this": start(HERE, work), "other": start(other, work)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(count + 1):  # the first update is the warm-up
        for name in sides if pair % 2 else reversed(sides):
            times[name].append(ask(sides[name])[kind])
    ratios = [ours / theirs for ours, theirs in zip(times["this"][1:], times["other"][1:], strict=True)]
    found = {name: median(seconds[1:]) for name, seconds in times.items()}
    shares = {f"products of {name}": ask(side)["products"] / found[name] for name, side in sides.items()}
    for side in sides.values():
        side.communicate()
    return {**found, "ratio": median(ratios), **(shares if kind == "update" else {})}


def start(root: Path, work: dict) -> subprocess.Popen:
    environment = {**os.environ, "SIDE_ROOT": str(root), "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, "--worker", json.dumps(work)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=root, env=environment, encoding="utf-8", **pipes)


def ask(side: subprocess.Popen) -> dict[str, float]:
    side.stdin.write("\n")
    side.stdin.flush()
    return json.loads(side.stdout.readline())


# --- in the process of one checkout ----------------------------------------------------------------------------------


def worker(work: dict) -> None:
    """Run an update per line of standard input; after the last one, measure the products of an update."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from benchmarks import ours
    from benchmarks.work import Work
    from rlhf.rollout import sampler
    from rlhf.trainer.optimize import PolicyOptimizer

    trainer = ours.build(Work(**work))
    sampling = []
    original = sampler.sample_completions
    optimize = PolicyOptimizer.run
    shapes = Counter()

    def sample(*args, **kwargs):
        begin = ours.seconds(work["device"])
        result = original(*args, **kwargs)
        sampling.append(ours.seconds(work["device"]) - begin)
        return result

    def recorded(*args):
        with recorder(shapes):
            return optimize(*args)

    with patch.object(sampler, "sample_completions", sample):
        for update in range(1, work["updates"] + 2):
            sys.stdin.readline()
            last, sampling[:] = update > work["updates"], []
            with patch.object(PolicyOptimizer, "run", recorded if last else optimize):
                measured = ours.measured_update(trainer, update, work["device"])
            answer = {"sampling": sum(sampling), "update": measured["parts"]["update"]}
            print(json.dumps({"products": alone(shapes)} if last else answer), file=channel, flush=True)


def recorder(shapes: Counter):
    """Return a context manager that counts the matrix products by type, sizes and strides."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if (name := str(operator).split(".")[1]) in ("mm", "addmm", "addmm_"):
                a, b = args[:2] if name == "mm" else args[1:3]
                shapes[a.dtype, a.device, a.shape, a.stride(), b.shape, b.stride()] += 1
            return operator(*args, **(kwargs or {}))

    return Recorder()


def alone(shapes: Counter) -> float:
    """Return the seconds of all products, from the fastest of five for each kind."""
    import torch

    total = 0.0
    for (dtype, device, *sizes), count in shapes.items():
        a, b = (torch.empty_strided(*sizes[i : i + 2], dtype=dtype, device=device).normal_() for i in (0, 2))
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            torch.mm(a, b)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        total += count * min(times)
    return total


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
    else:
        main()

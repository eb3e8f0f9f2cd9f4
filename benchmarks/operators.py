"""Counts the operators that torch runs per decoding step, per micro-batch and per optimizer step.

python benchmarks/operators.py --algorithm ppo --size tiny

On a GPU a small model waits for the launch of each operator, so the counts are the time. A dispatch mode counts the
operators below autograd. Views (reshape, transpose, slice) run no kernel and are counted separately. An operator on a
list of tensors (`_foreach_...`, `_fused_...`) counts once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.work import Work, add_flags, add_update_flags, choose_device, make_models, parse_update, work_of
from rlhf.algorithms.table import ALGORITHMS
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json

# part of an update -> the method that runs it
PARTS = {"decoding step": "decode", "micro-batch": "gradients", "optimizer step": "step"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Count the operators of the parts of an update.")
    add_flags(parser, ALGORITHMS)
    add_update_flags(parser, ppo_epochs=2)
    parser.add_argument("--operators", action="store_true", help="also list the operators of each part")
    arguments = parse_update(parser, argv)
    device = choose_device(arguments.device)
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    screen = Screen()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = work_of(arguments, folder=folder, device=device, updates=2)
        make_models(work)
        counts = count(work)
    show(counts, work, screen, arguments.operators)
    if arguments.write:
        write_json(arguments.write, {"settings": work.settings, "counts": summary(counts)})


def counting(counter: Counter):
    """Return a context manager that counts each operator in `counter`, by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            kind = "view" if operator.is_view or "detach" in str(operator) else "operator"
            counter[kind, str(operator)] += 1
            return operator(*args, **(kwargs or {}))

    return Counting()


def count(work: Work) -> dict[str, Counter]:
    """Return the operators of each part of one update, after a warm-up update.

    A decoding step, a micro-batch and an optimizer step are the last ones of the update. The first optimizer step is
    not typical: the rollout may have computed its forward pass. An optimizer step includes its micro-batches.
    """
    from benchmarks import ours

    trainer = ours.build(work, rollout_engine="slots")  # a CUDA graph would hide the operators
    trainer.update_step(1)  # allocates the optimizer's state
    whole = Counter()
    last = {}
    with counted_parts(last), counting(whole):
        trainer.update_step(2)
    return {**{name: last[name] for name in PARTS}, "whole update": whole}


@contextmanager
def counted_parts(last: dict[str, Counter]):
    """Count the operators of every decoding step, micro-batch and optimizer step; `last` has those of the last one."""
    from rlhf.rollout.continuous_batching import ContinuousBatcher
    from rlhf.trainer.optimize import PolicyOptimizer

    @contextmanager
    def around(part: str):
        counter = Counter()
        with counting(counter):
            yield
        last[part] = counter

    owners = (ContinuousBatcher, PolicyOptimizer, PolicyOptimizer)
    with around_calls({part: [(owner, PARTS[part])] for part, owner in zip(PARTS, owners, strict=True)}, around):
        yield


@contextmanager
def around_calls(
    parts: Mapping[str, Sequence[tuple[Any, str]]], around: Callable[[str], AbstractContextManager]
) -> Iterator[None]:
    """Run each call of some methods inside the context manager `around(part)`. `parts` has the methods of each part:
    a class or an object, and the name of the method."""

    def inside(part: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            with around(part):
                return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for part, methods in parts.items():
            for owner, name in methods:
                stack.enter_context(patch.object(owner, name, inside(part, getattr(owner, name))))
        yield


def summary(counts: dict[str, Counter]) -> dict[str, dict[str, float]]:
    """Return the number of operators and of views of each part."""
    return {
        name: {kind: sum(n for (k, _), n in counter.items() if k == kind) for kind in ("operator", "view")}
        for name, counter in counts.items()
    }


def show(counts: dict[str, Counter], work: Work, screen, all_operators: bool) -> None:
    """Print the table, and with `all_operators` each operator."""
    title = f"{work.algorithm.upper()}, {work.size}, {work.device}, {work.dtype}"
    rows = [[name, f"{n['operator']:.0f}", f"{n['view']:.0f}"] for name, n in summary(counts).items()]
    screen.table(title, ["", "operators", "views"], rows, lines=False)
    if all_operators:
        for name, counter in counts.items():
            screen.say(name)
            for (kind, operator), n in counter.most_common():
                screen.say(f"  {n:6} {kind:8} {operator}")


if __name__ == "__main__":
    run_command(main)

"""Runs of the training commands in several connected processes, with faults in one of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhf.algorithms.table import ALGORITHMS
from tests.distributed.proof import Inputs
from tests.distributed.ranks import start, wait

GROUPS = ["--batch-size", "3", "--K", "2"]
FLAGS = {name: ["--batch-size", "6"] if row.group_size == 1 else GROUPS for name, row in ALGORITHMS.items()}
FLAGS |= {"rloo": [*GROUPS, "--use-lora", "--lora-r", "4"]}
COMMON = [
    "--num-iterations", "5", "--save-every", "2", "--eval-every", "2", "--max-new-tokens", "8", "--seed", "7",
    "--prompt-length", "100", "--eval-prompts", "6", "--learning-rate", "1e-3", "--allow-weak-reward-model",
]  # fmt: skip


@dataclass
class Outcome:
    """How a run ended, by process."""

    statuses: list[int | None]  # exit status, negative for a signal; None: it did not end in time
    printed: list[str]
    errors: list[str]


def words(algorithm: str, inputs: Inputs, output: Path, *more: str) -> list[str]:
    given = ["--actor-model", inputs.start, "--rm-model", inputs.reward, "--prompts", inputs.pairs, "--output", output]
    return [*COMMON, *map(str, given), *FLAGS[algorithm], *more]


def command(algorithm: str, argv: list[str], fault: Callable[[int], None] | None = None) -> Callable[[int], None]:
    """Return what one process does: it installs the `fault` (rank), and runs the training command."""

    def work(rank: int) -> None:
        import torch

        from rlhf.commands.train import train_command
        from rlhf.utils.errors import run_command

        torch.set_num_threads(1)
        if fault is not None:
            fault(rank)
        run_command(lambda: train_command(algorithm, argv))

    return work


def run(
    algorithm: str,
    argv: list[str],
    folder: Path,
    processes: int = 2,
    fault: Callable[[int], None] | None = None,
    seconds: float = 120,
    meanwhile: Callable[[list[int]], None] | None = None,
) -> Outcome:
    """Run a training command in several processes. `meanwhile` receives their process ids while they run."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    pids = start(processes, command(algorithm, argv, fault), folder, quiet=True)
    if meanwhile is not None:
        meanwhile(pids)
    statuses = wait(pids, seconds)
    texts = [
        [(folder / f"{rank}.{stream}").read_text(errors="replace") for rank in range(processes)] for stream in (1, 2)
    ]
    return Outcome(statuses, *texts)


def at_update(number: int, action: Callable[[], None]) -> None:
    """Call `action` at the start of an update of this process."""
    from rlhf.trainer.loop import OnPolicyLoop

    original = OnPolicyLoop.update_step

    def update_step(self, update):
        if update == number:
            action()
        return original(self, update)

    OnPolicyLoop.update_step = update_step


def send_self(signal_number: int) -> None:
    os.kill(os.getpid(), signal_number)

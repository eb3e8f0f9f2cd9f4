"""One side of a comparison, in a process of its own: told to get ready, then to do an update, and another.

Ours and TRL's take turns, and neither shares anything with the other: not accelerate's global state (one precision
for all trainers of a process), not the card's cache (TRL's PPO empties it in every update), not Python's garbage. A
process's peak memory is then its side's.

python -m benchmarks.side ours|stock WORK.json
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.work import Work

ROOT = Path(__file__).resolve().parent.parent
GO = "go"
LINES_SHOWN = 12


class Side:
    """The process of one side, as the one sees it that started it. It imports at once, and then waits to be told."""

    def __init__(self, name: str, work_file: Path):
        self.name, self.log = name, work_file.with_name(f"{name}.log")
        self._heard_by = self.log.open("w", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.side", name, str(work_file)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._heard_by,
            text=True,
            encoding="utf-8",
        )

    def go(self) -> dict[str, Any]:
        """Let it build its trainer, the first time, and do one update after; returns what it tells of it."""
        with contextlib.suppress(OSError):  # it has ended: that nothing is heard will say so
            self.process.stdin.write(f"{GO}\n")
            self.process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        from rlhf.utils.errors import RunError

        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_SHOWN:]
            output = "\n".join(last)
            raise RunError(f"it stopped (exit status {self.process.wait()}): {self.name}. It said last:\n{output}")
        return json.loads(line)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error) -> None:
        """Wait for it to end by itself, unless something went wrong."""
        if any(error):
            self.process.kill()
        self.process.communicate()
        self._heard_by.close()


# --- in the process itself -------------------------------------------------------------------------------------------


def main() -> None:
    run, work = {"ours": run_ours, "stock": run_stock}[sys.argv[1]], Work.read(sys.argv[2])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print goes to the log
    from rlhf.utils.console import quiet_libraries

    quiet_libraries()
    import torch

    if work.threads is not None:
        torch.set_num_threads(work.threads)
    run(work, answers)


def wait() -> None:
    """Until the other process says so; end where it has gone."""
    if sys.stdin.readline().strip() != GO:
        sys.exit("nobody is there to say go")


def send(answers, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def run_ours(work: Work, answers) -> None:
    from benchmarks import ours
    from benchmarks.machine import MemoryMeter, machine

    meter = MemoryMeter(work.device)
    wait()
    trainer = ours.build(work)
    send(answers, {"machine": machine(work.device), "mixed_precision": "bf16" if work.bf16 else "no"})
    for update in range(1, work.updates + 1):
        wait()
        send(answers, {**ours.measured_update(trainer, update, work.device), "memory": meter.read()})


def run_stock(work: Work, answers) -> None:
    from benchmarks import stock
    from benchmarks.machine import MemoryMeter

    meter = MemoryMeter(work.device)
    wait()
    trainer = stock.build(work, wait, lambda message: send(answers, {**message, "memory": meter.read()}))
    send(answers, {"mixed_precision": str(trainer.accelerator.mixed_precision)})
    trainer.train()


if __name__ == "__main__":
    main()

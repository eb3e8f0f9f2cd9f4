"""Runs one implementation of a comparison in a separate process, one update per request.

The two implementations share nothing: neither accelerate's global state (one precision per process), nor the CUDA
cache (TRL's PPO empties it in every update), nor Python's garbage collection. The peak memory of the process is
therefore that of the implementation.

python -m benchmarks.worker ours|stock WORK.json
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.constants import ROOT
from benchmarks.work import Work

GO = "go"
LINES_SHOWN = 12  # last lines of a failed worker's log


class Worker:
    """A worker process, seen from the process that starts it. It imports its libraries, then waits for requests."""

    def __init__(
        self, name: str, work_file: Path, label: str | None = None, python: str = sys.executable, **environment: str
    ):
        """`label` names the log file and the worker in messages (None: `name`). `python` is the interpreter, also that
        of another environment. `environment` has more variables."""
        self.name = label or name
        self.log = work_file.with_name(f"{self.name}.log")
        self._log_stream = self.log.open("w", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.worker", name, str(work_file)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_stream,
            encoding="utf-8",
        )

    def go(self) -> dict[str, Any]:
        """Request the next step and return its results. The first step builds the trainer, others run one update."""
        self.request()
        return self.receive()

    def request(self) -> None:
        """Request the next step."""
        with contextlib.suppress(OSError):  # the worker has ended; `receive` reports it
            self.process.stdin.write(f"{GO}\n")
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        from rlhf.utils.errors import RunError

        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_SHOWN:]
            output = "\n".join(last)
            raise RunError(
                f"worker stopped (exit status {self.process.wait()})", self.name, f"Its last lines:\n{output}"
            )
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error) -> None:
        """Wait for the end of the process. Kill it after an error."""
        if any(error):
            self.process.kill()
        self.process.communicate()
        self._log_stream.close()


# --- in the worker process -------------------------------------------------------------------------------------------


def main() -> None:
    run = {"ours": run_ours, "stock": run_stock}[sys.argv[1]]
    work = Work.read(sys.argv[2])
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to the log file
    from rlhf.distributed.join import use_own_gpu
    from rlhf.utils.console import quiet_libraries

    use_own_gpu()
    quiet_libraries()
    import torch

    if work.threads is not None:
        torch.set_num_threads(work.threads)
    run(work, channel)


def wait() -> None:
    """Wait for the next request. Exit if the benchmark process has ended."""
    if sys.stdin.readline().strip() != GO:
        sys.exit("the benchmark process has ended")


def send(channel, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def run_ours(work: Work, channel) -> None:
    from benchmarks import ours
    from benchmarks.machine import MemoryMeter, machine

    meter = MemoryMeter(work.device)
    wait()
    trainer = ours.build(work)
    send(channel, {"machine": machine(work.device), "mixed_precision": "bf16" if work.bf16 else "no"})
    for update in range(1, work.updates + 1):
        wait()
        send(channel, {**ours.measured_update(trainer, update, work.device), "memory": meter.read()})


def run_stock(work: Work, channel) -> None:
    from benchmarks import stock
    from benchmarks.machine import MemoryMeter

    meter = MemoryMeter(work.device)
    wait()
    trainer = stock.build(work, wait, lambda message: send(channel, {**message, "memory": meter.read()}))
    send(channel, {"mixed_precision": str(trainer.accelerator.mixed_precision), "trl": version("trl")})
    trainer.train()


if __name__ == "__main__":
    main()

"""Runs one section of `benchmarks/on_gpu.py` as a separate process that prints one JSON object per figure.

python -m benchmarks.gpu_section PLAN    (PLAN: a Plan as JSON; it ends when its standard input is closed)
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

OUT_OF_TIME = "not measured: the section ran out of time"


class OutOfTime(Exception):
    """The section's time is over before a measurement is complete."""


@dataclass(frozen=True)
class Plan:
    """Settings of one section."""

    section: str
    seconds: float  # its share of the time
    device: str  # "cuda" or "cpu"
    size: str  # "tiny" or "smollm2"
    models: str  # folder of the models with random weights that all sections share
    output: str  # folder of the results
    demo_parts: str | None = None  # folder from which the demo's parts are copied
    full: bool = False
    done: list[str] = field(default_factory=list)  # attempts that an earlier call finished

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Section:
    """A section's plan, deadline, and the stream to which its figures are written."""

    def __init__(self, plan: Plan, channel):
        self.plan, self.channel = plan, channel
        self.deadline = time.monotonic() + plan.seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def device(self) -> str:
        return self.plan.device

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.on_gpu else "float32"

    def folder(self, name: str) -> Path:
        folder = Path(self.plan.output, name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def figure(self, name: str, value: Any, unit: str = "", note: str = "", **more: Any) -> None:
        self._send({"name": name, "value": value, "unit": unit, "note": note, **more})

    def error(self, name: str, error: str) -> None:
        self._send({"name": name, "error": error})

    def attempt(self, name: str, measure: Callable[[], None]) -> None:
        """Call `measure`, which records its own figures, unless an earlier call finished it. If it fails, record the
        error under `name` and continue."""
        if name in self.plan.done:
            return None
        if self.left <= 0:
            return self.error(name, OUT_OF_TIME)
        try:
            measure()
            self.finished(name)
        except OutOfTime:
            self.error(name, OUT_OF_TIME)
        except Exception as error:  # any error of a library or the driver is a result
            lines = str(error).strip().splitlines() or [""]
            self.error(name, f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}")

    def finished(self, name: str) -> None:
        """Record that an attempt need not be repeated."""
        self._send({"done": name})

    def machine(self) -> None:
        from benchmarks.machine import gpu_machine

        self._send({"machine": gpu_machine(self.device)})

    def _send(self, message: dict[str, Any]) -> None:
        from rlhf.utils.files import json_ready

        self.channel.write(json.dumps(json_ready(message)) + "\n")
        self.channel.flush()


def end_with_the_call() -> None:
    """End this process and all that it has started when standard input is closed, as it is when the process that
    started this one ends, even if it is killed. Otherwise they would use the GPU during the next call."""
    given = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes that this one starts read nothing

    def wait() -> None:
        os.read(given, 1)  # returns when no process can write any more
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    end_with_the_call()
    plan = Plan(**json.loads(sys.argv[1]))
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to the log file
    from benchmarks.work import choose_device
    from rlhf.utils.console import quiet_libraries

    section = Section(plan, channel)
    choose_device(plan.device)
    quiet_libraries()
    from benchmarks import gpu_measures, gpu_trainings, gpu_updates

    sections = {**gpu_measures.SECTIONS, **gpu_updates.SECTIONS, **gpu_trainings.SECTIONS}
    section.machine()
    sections[plan.section](section)
    if section.on_gpu:
        from benchmarks.machine import gpu_state

        state = gpu_state()
        clock, others = state.pop("clocks.sm"), ", ".join(map(" ".join, state.items()))
        section.figure("clock at the end of the section", clock, "MHz", others)


if __name__ == "__main__":
    from benchmarks import gpu_section  # the module that sections import, not __main__

    gpu_section.main()

"""What every section of `benchmarks/on_gpu.py` uses: its plan, its deadline, and the stream of its figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
        self.plan = plan
        self.channel = channel
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
        from rlhf.utils.results import json_ready

        self.channel.write(json.dumps(json_ready(message)) + "\n")
        self.channel.flush()

"""Results of `benchmarks/on_gpu.py`, written to figures.json and figures.md after each measurement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.stock_sums import markdown
from rlhf.utils.files import write_json, write_text

RUNNING = "running"
DONE = "done"
OUT_OF_TIME = "out of time"
FAILED = "failed"


@dataclass
class SectionRecord:
    """One section: its share of the time, its duration (both in seconds) and its figures."""

    share: float
    state: str = RUNNING
    seconds: float = 0.0
    error: str | None = None
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name, in the order of measurement
    done: list[str] = field(default_factory=list)  # attempts that need not be repeated


@dataclass
class Report:
    """All sections of one run of the script, in `folder`."""

    folder: Path
    command: list[str]
    began: str
    machine: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, SectionRecord] = field(default_factory=dict)

    def read(self) -> None:
        """Read the machine and the sections that an earlier call wrote into the folder, if there are any."""
        file = self.folder / "figures.json"
        if not file.is_file():
            return
        found = json.loads(file.read_text(encoding="utf-8"))
        self.machine = found["machine"]
        for name, record in found["sections"].items():
            figures = {figure["name"]: figure for figure in record.pop("figures")}
            self.sections[name] = SectionRecord(**record, figures=figures)

    def is_over(self, section: str) -> bool:
        """True if another call need not start or continue a section."""
        return section in self.sections and self.sections[section].state in (DONE, FAILED)

    def done(self, section: str) -> list[str]:
        """Return the attempts of a section that need not be repeated."""
        return self.sections[section].done if section in self.sections else []

    def begin(self, section: str, share: float) -> SectionRecord:
        """Start a section, or continue it without its errors. Returns its record."""
        before = self.sections.get(section, SectionRecord(share))
        known = {name: figure for name, figure in before.figures.items() if "error" not in figure}
        self.sections[section] = replace(before, share=share, state=RUNNING, error=None, figures=known)
        self.write()
        return self.sections[section]

    def add(self, section: str, message: dict[str, Any]) -> None:
        """Store the machine's facts, or a figure. A figure replaces an older one with the same name."""
        if "machine" in message:
            self.machine = message["machine"]
        elif "done" in message:
            self.sections[section].done.append(message["done"])
        else:
            self.sections[section].figures[message["name"]] = message
        self.write()

    def end(self, section: str, state: str, seconds: float, error: str | None = None) -> None:
        record = self.sections[section]
        waits = any(OUT_OF_TIME in figure.get("error", "") for figure in record.figures.values())
        record.state = OUT_OF_TIME if state == DONE and waits else state
        record.error = error
        record.seconds += seconds
        self.write()

    def write(self) -> None:
        try:
            write_json(self.folder / "figures.json", self.as_json())
            write_text(self.folder / "figures.md", self.as_markdown())
        except PermissionError as error:  # on Windows: another program has the file open
            print(f"  not written, will be tried again with the next figure: {error}", flush=True)

    def as_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "began": self.began,
            "machine": self.machine,
            "sections": {name: {**vars(record), "figures": list(record.figures.values())}
                         for name, record in self.sections.items()},
        }  # fmt: skip

    def as_markdown(self) -> str:
        lines = [f"# {self.machine.get('gpu') or self.machine.get('processor', 'figures')}", ""]
        lines += [f"`{' '.join(self.command)}`, started {self.began}.", "", *machine_lines(self.machine)]
        for name, record in self.sections.items():
            lines += ["", f"## {name}", "", f"{record.state}, {record.seconds:.0f} of {record.share:.0f} s"]
            if record.error:
                lines += ["", f"error: {one_line(record.error)}"]
            if record.figures:
                lines += ["", *table(list(record.figures.values()))]
            for figure in record.figures.values():
                if "table" in figure:
                    lines += ["", f"### {figure['name']}", "", markdown(figure["table"])]
        return "\n".join(lines) + "\n"


def machine_lines(machine: dict[str, Any]) -> list[str]:
    """Return Markdown list items for GPU, CPU, library versions and platform."""
    if not machine:
        return []
    memory = machine.get("gpu_memory_gib")
    state = ", ".join(f"{name} {value}" for name, value in (machine.get("gpu_state") or {}).items())
    gpu = f"{machine['gpu']}, {memory:.0f} GiB, CUDA {machine['cuda']}, {state}" if memory else "none"
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in machine["versions"].items())
    return [
        f"- GPU: {gpu}",
        f"- CPU: {machine['processor']}, {machine['cores']} cores, {machine['threads_used']} threads used, "
        f"{machine.get('memory_bytes', 0) / 2**30:.0f} GiB memory",
        f"- Python {machine['python']}, {versions}",
        f"- {machine['platform']}, commit {machine['commit'] or 'unknown'}",
    ]


def table(figures: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| figure | value | |", "|---|---|---|"]
    for figure in figures:
        value = "failed" if "error" in figure else f"{number(figure['value'])} {figure['unit']}".strip()
        lines.append(f"| {figure['name']} | {value} | {one_line(figure.get('error') or figure.get('note', ''))} |")
    return lines


def number(value: Any) -> str:
    """Return a number with three significant digits, or with all digits before the point if it is large."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def one_line(text: str) -> str:
    """Return the text as one line that is safe in a Markdown table cell, cut at 400 characters."""
    return " ".join(text.split()).replace("|", "\\|")[:400]

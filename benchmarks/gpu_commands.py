"""Runs the project's commands for sections of `benchmarks/on_gpu.py`, and makes stand-ins for the hub's models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.constants import ROOT
from benchmarks.gpu_measures import make_shared_models, work_for
from benchmarks.gpu_section import OutOfTime, Section
from benchmarks.work import letter, random_rows
from rlhf.utils.system import WINDOWS, stop_signals

NEW_GROUP = subprocess.CREATE_NEW_PROCESS_GROUP if WINDOWS else 0  # otherwise Ctrl-Break would also reach this process
TO_STOP = 12.0  # seconds before a section's end, for a run to finish its update and save
# the stand-in prompts file: rows, and tokens per row
PROMPTS = 200
LONGEST = 64


@dataclass
class Command:
    """A command of the project in a separate process. Its output is written to a file."""

    process: subprocess.Popen
    log: Path

    @classmethod
    def start(cls, words: Sequence[object], folder: Path, threads: int | None = None, **environment: str) -> Command:
        """Start a script with flags (`words`) in the working folder `folder`."""
        script, *flags = map(str, words)
        log = folder / f"{len(list(folder.glob('*.log'))):02d}_{Path(script).stem}.log"
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths, "COLUMNS": "120", **environment}
        if threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        program = [script] if script == "-c" else ["-m", "reward_model.train"] if script == "reward_model" else [
            str(ROOT / script)
        ]  # fmt: skip
        with log.open("w", encoding="utf-8") as printed:
            process = subprocess.Popen(
                [sys.executable, *program, *flags], cwd=folder, env=environment,
                stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, creationflags=NEW_GROUP,
            )  # fmt: skip
        return cls(process, log)

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None if the command still runs after `seconds`."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Send the stop signal: a training run finishes its update and saves."""
        self.process.send_signal(stop_signals()[1])  # SIGTERM, on Windows Ctrl-Break

    def end(self) -> None:
        """Kill the command if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_lines(self, count: int = 3) -> str:
        return " ".join(self.printed().splitlines()[-count:])


def run(section: Section, words: Sequence[object], folder: Path, **environment: str) -> Command:
    """Run a command to its end. After the section's time it is stopped, so that a training run saves, and OutOfTime is
    raised. Raises RuntimeError if the command fails."""
    command = Command.start(words, folder, **environment)
    status = command.wait(section.left - TO_STOP)
    if status is None:
        command.stop()
        command.wait(section.left - TO_STOP / 4)
    command.end()
    if status is None:
        raise OutOfTime
    if status:
        raise RuntimeError(f"exit status {status}: {command.last_lines()}")
    return command


def stand_ins(section: Section, folder: Path) -> list[object]:
    """Make models with random weights and prompts with random tokens. Return the flags that select them."""
    work = work_for(section)
    make_shared_models(work)
    vocabulary = json.loads((work.policy / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = folder / "prompts.jsonl"
    texts = ["".join(map(letter, ids)) for ids in random_rows([LONGEST] * PROMPTS, vocabulary, 0)]
    rows = [json.dumps({"prompt": text, "topic": f"topic {number % 4}"}) for number, text in enumerate(texts)]
    prompts.write_text("\n".join(rows), encoding="utf-8")
    models = [Path(model).resolve() for model in (work.policy, work.reward_model)]
    return ["--actor-model", models[0], "--rm-model", models[1], "--prompts", prompts, "--allow-weak-reward-model",
            "--eval-prompts", 8]  # fmt: skip

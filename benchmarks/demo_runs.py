"""Runs the training commands of a demo, each in its own folder, and reads their results. Finished runs are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlhf.checkpoints.run_record import RunRecord
from rlhf.utils.errors import RunError

PROJECT = Path(__file__).resolve().parent.parent
SEEDS = (42, 123, 777)


@dataclass(frozen=True)
class DemoRun:
    """One training command."""

    algorithm: str
    seed: int
    name: str  # of the variant
    words: tuple[str, ...]  # flags

    def folder(self, root: Path) -> Path:
        return root / f"{self.name.replace(' ', '_')}_{self.algorithm}_{self.seed}"


def run_all(runs: Sequence[DemoRun], recipe: str, root: Path, at_once: int, report: Callable[[str], None]) -> None:
    """Run the commands that have no finished run in `root` yet, `at_once` at the same time, each with one thread.

    Raises RunError with the end of a failed command's output.
    """
    root.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(at_once) as pool:
        for _ in pool.map(lambda run: _run(run, recipe, root, report), runs):
            pass


def _run(run: DemoRun, recipe: str, root: Path, report: Callable[[str], None]) -> None:
    folder = run.folder(root)
    record = RunRecord.read(folder)
    if record is not None and record.status == "finished":
        return
    script = PROJECT / f"train_{run.algorithm}.py"
    words = ["--recipe", recipe, "--seed", str(run.seed), "--output", folder.resolve(), "--overwrite", *run.words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, *map(str, words)], cwd=root, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RunError(f"{folder.name} failed: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    report(f"finished: {folder.name}")


def figures(run: DemoRun, root: Path) -> dict:
    """Return the figures of a finished run (`figures` in run.json). Raises UserError if there is none."""
    return RunRecord.require(run.folder(root), "runs").figures

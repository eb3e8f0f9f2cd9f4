"""Runs the training commands of a demo, each in its own folder, and reads their results. Finished runs are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlhf.checkpoints.run_record import RunRecord, differences
from rlhf.config import parse_cli
from rlhf.settings.fields import to_dict
from rlhf.settings.training import Config
from rlhf.utils.errors import RunError

PROJECT = Path(__file__).resolve().parent.parent
SEEDS = (42, 123, 777)
NOT_COMPARED = ("kl_horizon", "output", "overwrite")


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
    script = PROJECT / f"train_{run.algorithm}.py"
    words = ["--recipe", recipe, "--seed", str(run.seed), "--output", folder.resolve(), "--overwrite", *run.words]
    words = list(map(str, words))
    if _is_finished(folder, parse_cli(words, run.algorithm)):
        return
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [sys.executable, script, *words], cwd=root, env=environment, capture_output=True, text=True,
        encoding="utf-8", errors="replace",
    )  # fmt: skip
    if done.returncode != 0:
        raise RunError(f"{folder.name} failed: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    report(f"finished: {folder.name}")


def _is_finished(folder: Path, config: Config) -> bool:
    """True if the folder has a finished run with these settings. The run sets its KL horizon itself."""
    record = RunRecord.read(folder)
    if record is None or record.status != "finished":
        return False
    return not differences(record.settings, to_dict(config), NOT_COMPARED)


def figures(run: DemoRun, root: Path) -> dict:
    """Return the figures of a finished run (`figures` in run.json). Raises UserError if there is none."""
    return RunRecord.require(run.folder(root), "runs").figures

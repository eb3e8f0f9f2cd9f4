"""run.json: the settings of a run, its versions and machine, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from rlhf.checkpoints import replacing
from rlhf.checkpoints.run_folder import INPUTS_FILE, RUN_FILE, hold, require_run
from rlhf.utils.errors import Notice, RunError, UserError
from rlhf.utils.files import write_json

HARMLESS = (  # settings that change nothing of what is learned
    *("seeds", "output", "overwrite", "dry_run", "check", "save_every", "keep", "resume", "resume_anyway"),
    "replay",
    *("record_tokens", "record_format", "record_every", "record_prompts"),
    *("merge_lora", "export_from", "push_to_hub", "hub_private"),
)
MAY_DIFFER = ("seed", *HARMLESS)  # between runs that are seeds of the same
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes")


def run_fault(run: dict[str, Any]) -> str | None:
    """Return what a run.json lacks that a run which began has, in words; None if it is whole."""
    kinds = {"settings": dict, "algorithm": str, "data": dict, "versions": dict, "python": str}
    wrong = [name for name, kind in kinds.items() if not isinstance(run.get(name), kind)]
    if not wrong and not isinstance(run["settings"].get("recipe"), str):
        wrong.append("settings.recipe")
    return f"without a valid {', '.join(map(repr, wrong))}" if wrong else None


def flat_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """A run.json's settings, knob by knob, without their groups."""
    leaves = {k: v for group in settings.values() if isinstance(group, dict) for k, v in group.items()}
    return leaves | {k: v for k, v in settings.items() if not isinstance(v, dict)}


def differences(one: dict[str, Any], other: dict[str, Any], aside: Iterable[str] = ()) -> list[str]:
    """Names of the knobs in which two runs' settings differ, those named in `aside` left out. A knob that one of them
    does not know, as it was made before or after it, tells nothing."""
    here, there = flat_settings(one), flat_settings(other)
    return [n for n in sorted(here.keys() & there.keys()) if n not in aside and here[n] != there[n]]


def now() -> str:
    """UTC, fine enough to tell which of two runs began first."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def note(folder: Path, **facts: Any) -> dict[str, Any]:
    """Adds to the run.json of a run that has ended; returns all of it."""
    run = {**require_run(folder, "--output"), **facts}
    write_json(folder / RUN_FILE, run)
    return run


class RunLog:
    """A run's run.json, rewritten whole at every change; while it is open, the run's folder is locked."""

    def __init__(self, folder: Path, held: IO[bytes] | None = None, *, resume: bool = False, **facts: Any):
        """`held` is the folder's lock, where it was claimed. With `resume`, the run that is there goes on: what it was
        told stays, and `sessions` gets another entry."""
        self._lock = held or hold(folder)
        self.begun, self.before = time.monotonic(), 0.0
        self.path = folder / RUN_FILE
        self._found: dict[str, Any] | None = None  # a resumed run's record as it was
        began = {"started": now(), "pid": os.getpid(), **environment()}
        if resume:
            self.data: dict[str, Any] = require_run(folder, "--resume, --output")
            self._found = dict(self.data)
            self.data = {k: v for k, v in self.data.items() if k not in ("ended", "reason")}
            self.add(status="running", pid=began["pid"], sessions=[*self.data.get("sessions", []), {**began, **facts}])
        else:
            self.data = {"status": "running", "id": uuid.uuid4().hex, **began, **facts}
            write_json(self.path, self.data)

    def add(self, **facts: Any) -> None:
        """Raises FileNotFoundError where the folder is gone: it would be made anew where a disk was mounted."""
        self.check_place()
        self.data.update(facts)
        write_json(self.path, self.data)

    def check_place(self) -> None:
        if not self.path.exists():
            raise FileNotFoundError(errno.ENOENT, "The run's folder is no longer there", str(self.path.parent))

    def seconds(self) -> float:
        """Of training, in this session and those before it."""
        return self.before + time.monotonic() - self.begun

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Finished only if the block ran to its end. What a part that failed was given is kept, and named."""
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self.path.parent)  # a full disk names no file; what a run writes, it writes there
        if isinstance(error, RunError) and error.inputs is not None:
            file = self.path.with_name(INPUTS_FILE)
            write_json(file, json.loads(json.dumps(error.inputs, default=str)))  # a column may hold any object
            error.faults[-1] += f"; what it was given is in {file}"
        if kind is None:
            self.add(status="finished", ended=now())
            for line in replacing.remove_replaced(self.path.parent):
                warnings.warn(line, Notice, stacklevel=2)
        elif self._found is not None and isinstance(error, UserError) and not isinstance(error, RunError):
            write_json(self.path, self._found)  # refused before anything was trained: the run stays what it was
        else:
            status = getattr(error, "run_status", "failed")
            with contextlib.suppress(OSError):  # a full disk, perhaps what ended the run: that is told, not this
                self.add(status=status, ended=now(), reason=f"{kind.__name__}: {error}")
        self._lock.close()


def environment() -> dict[str, Any]:
    """Command, versions, commit and machine."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    """The installed version; None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """This project's commit, or None where it is not a git checkout or git is not installed."""
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()

"""run.json: what a run was told, with what, and how it ended. Claiming an output folder."""

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

from rlhf.utils import replacing, system
from rlhf.utils.errors import Notice, RunError, UserError
from rlhf.utils.files import check_folder, write_json

RUN_FILE = "run.json"
LOCK_FILE, INPUTS_FILE = "run.lock", "failed_inputs.json"
HARMLESS = (  # settings that change nothing of what is learned
    *("seeds", "output", "overwrite", "dry_run", "check", "save_every", "keep", "resume", "resume_anyway"),
    "replay",
    *("record_tokens", "record_format", "record_every", "record_prompts"),
    *("merge_lora", "export_from", "push_to_hub", "hub_private"),
)
MAY_DIFFER = ("seed", *HARMLESS)  # between runs that are seeds of the same
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes")


def check_output(folder: Path, *, overwrite: bool, is_default: bool, flag: str = "--output") -> None:
    """Raise UserError if a new run (or, with `flag`, a reward model) may not go into `folder`.

    A finished run in the default folder will be moved aside; `overwrite` will replace a run, and only one that this
    project wrote. Everything else that lies there is in the way.
    """
    check_folder(str(folder), flag)
    require_unused(folder)
    if flag != "--output" or (overwrite and _content(folder)):
        replacing.check_replaceable(folder, flag)
    if flag != "--output" and folder.resolve() in (Path.cwd(), *Path.cwd().parents):  # it is renamed as a whole
        raise UserError(f"the current folder, or one above it: {flag} {folder}. Name a folder inside it")
    _check_content(folder, overwrite, is_default, flag)


def _check_content(folder: Path, overwrite: bool, is_default: bool, flag: str = "--output") -> None:
    if not _content(folder):
        return
    status = read_status(folder)
    if status is None:
        raise UserError(f"holds files of something else (no {RUN_FILE}): {flag} {folder}. Name another with {flag}")
    if flag != "--output":
        if not overwrite and not is_default:
            raise UserError(
                f"a reward model is there: {flag} {folder}. Add --rm-overwrite to replace it, or name another folder "
                f"with {flag}"
            )
        return
    if not overwrite and not (status == "finished" and is_default):
        kind, more = (
            ("a finished", "") if status == "finished" else ("an unfinished", "--resume to go on with it, or ")
        )
        raise UserError(
            f"{kind} run is there: --output {folder}. "
            f"Add {more}--overwrite to replace it, or name another folder with --output"
        )


def claim_output(folder: Path, *, overwrite: bool, is_default: bool) -> tuple[IO[bytes], str | None]:
    """Lock `folder` and make it free for a new run; returns the lock, and in a line what was done to an older run, or
    None. From here on no other process takes the folder.

    Raises UserError as `check_output`. A finished run in the default folder is moved to `..._1`, `..._2`; one that is
    replaced is moved to `....replaced`, and removed when the new run is finished (`RunLog`).
    """
    check_output(folder, overwrite=overwrite, is_default=is_default)
    folder.mkdir(parents=True, exist_ok=True)
    held = hold(folder)
    _check_content(folder, overwrite, is_default)  # again: until now, another one might have begun there
    done = None
    if _content(folder):
        try:
            if overwrite:
                place = _move_to(folder, replacing.set_aside(folder))
                done = f"moved the run that was in {folder} to {place}; it is removed when this run is finished"
            else:
                done = f"moved the finished run in {folder} to {_move_aside(folder)}"
        except OSError as error:  # on Windows, a folder that another program looks into
            raise UserError(
                f"cannot be moved or removed: --output {folder} ({error.strerror}). Close what uses it"
            ) from None
    return held, done


def move_aside(folder: Path) -> str:
    """Make `folder` free without removing anything; returns in a line where its content is. Raises UserError where a
    live process has a run there."""
    with hold(folder):
        return f"moved what was in {folder} to {_move_aside(folder)}"


def _content(folder: Path) -> list[Path]:
    """What lies in a folder, run.json last; the lock is nothing."""
    there = folder.iterdir() if folder.exists() else ()
    return sorted((path for path in there if path.name != LOCK_FILE), key=lambda path: path.name == RUN_FILE)


def _move_aside(folder: Path) -> Path:
    """To the first free `..._1`, `..._2`; returns the place."""
    return _move_to(folder, replacing.numbered_name(folder))


def _move_to(folder: Path, aside: Path) -> Path:
    """Piece by piece, because the lock stays where it is held; returns the place."""
    aside.mkdir()
    moved: list[Path] = []
    try:
        for path in _content(folder):
            system.replace(path, aside / path.name)
            moved.append(path)
    except OSError:  # on Windows, where a program looks into one of them: as it was before
        for path in moved:
            system.replace(aside / path.name, path)
        aside.rmdir()
        raise
    return aside


def read_run(folder: Path) -> dict[str, Any] | None:
    """A run's run.json; None where there is none that can be read."""
    try:
        run = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return run if isinstance(run, dict) and "status" in run else None


def run_fault(run: dict[str, Any]) -> str | None:
    """Return what a run.json lacks that a run which began has, in words; None if it is whole."""
    kinds = {"settings": dict, "algorithm": str, "data": dict, "versions": dict, "python": str}
    wrong = [name for name, kind in kinds.items() if not isinstance(run.get(name), kind)]
    if not wrong and not isinstance(run["settings"].get("recipe"), str):
        wrong.append("settings.recipe")
    return f"without a valid {', '.join(map(repr, wrong))}" if wrong else None


def read_status(folder: Path) -> str | None:
    """ "running", "finished", "stopped" or "failed"; None where there is no readable run.json."""
    run = read_run(folder)
    return None if run is None else run["status"]


def seed_folder(output: str, seed: int) -> str:
    """Where one of several seeds goes."""
    return f"{Path(output)}_seed{seed}"


def flat_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """A run.json's settings, knob by knob, without their groups."""
    leaves = {k: v for group in settings.values() if isinstance(group, dict) for k, v in group.items()}
    return leaves | {k: v for k, v in settings.items() if not isinstance(v, dict)}


def differences(one: dict[str, Any], other: dict[str, Any], aside: Iterable[str] = ()) -> list[str]:
    """Names of the knobs in which two runs' settings differ, those named in `aside` left out. A knob that one of them
    does not know, as it was made before or after it, tells nothing."""
    here, there = flat_settings(one), flat_settings(other)
    return [n for n in sorted(here.keys() & there.keys()) if n not in aside and here[n] != there[n]]


def require_run(folder: Path, flag: str) -> dict[str, Any]:
    """A run's run.json. Raises UserError where `folder` is no run of this project."""
    run = read_run(folder) if folder.is_dir() else None
    if run is None or not isinstance(run.get("settings"), dict):
        there = "no such folder" if not folder.is_dir() else f"not a run (no readable {RUN_FILE})"
        known = ", ".join(map(str, runs_in(Path()))) or "none here"
        raise UserError(f"{there}: {flag} {folder}. Give the folder of a run ({known})")
    return run


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs in `folder`, the one that was started last at the end."""
    found = {file.parent: run for file in folder.glob(f"*/{RUN_FILE}") if (run := read_run(file.parent)) is not None}
    return sorted(found, key=lambda place: (found[place].get("started", ""), place.name))


def last_run(flag: str) -> Path:
    """The run here that was started last. Raises UserError where there is none."""
    here = runs_in(Path())
    if not here:
        raise UserError(f"no run in this folder: {flag}. Name a run's folder, or train one: python train_ppo.py")
    return here[-1]


def now() -> str:
    """UTC, fine enough to tell which of two runs began first."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def require_unused(folder: Path) -> None:
    """Raise UserError where a live process has a run in `folder`."""
    if (folder / LOCK_FILE).exists():
        hold(folder).close()


def hold(folder: Path) -> IO[bytes]:
    """Lock a run's folder until what is returned is closed. Raises UserError where a live process has it."""
    held = system.lock(folder / LOCK_FILE)
    if held is None:
        run = read_run(folder) or {}
        raise UserError(
            f"in use by a live run (process {run.get('pid', 'unknown')}, since {run.get('started', 'unknown')}): "
            f"--output {folder}. Stop that one, or name another folder with --output"
        )
    return held


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

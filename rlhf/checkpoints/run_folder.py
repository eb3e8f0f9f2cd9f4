"""The run folder: names of its files, and locking, so that only one process writes into it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from rlhf.checkpoints import replacing
from rlhf.checkpoints.run_record import RUN_FILE, now, read_json
from rlhf.utils import system
from rlhf.utils.errors import RunError, UserError, naming, os_advice
from rlhf.utils.files import UPDATE, check_folder, numbered_name, remove_path
from rlhf.utils.paths import ANY_NUMBER

LOCK_FILE = "run.lock"
INPUTS_FILE = "failed_inputs.json"
# what to do if a locked folder was moved away
RESUME_THERE = "If its files are in another folder, resume the run in that one: --resume --output OTHER_FOLDER"
RUN_AGAIN = "Run the command again"
reserved: dict[Path, RunLock] = {}  # the locks of folders in which this process is about to start a run
BEST_FOLDER = "best"
MERGED_FOLDER = "merged"
SAMPLES_FOLDER = "samples"
METRICS_LOG = "metrics.jsonl"
PROMPTS_FOLDER = "prompts"  # prompts that were given in Python
# what is written under a temporary name first: a killed process leaves it
WRITTEN_ASIDE = (
    *("*.json*", "README.md", "tokens/*", "checkpoint-*", BEST_FOLDER, MERGED_FOLDER),
    *(UPDATE, f"{BEST_FOLDER}/{UPDATE}", f"{MERGED_FOLDER}/{UPDATE}"),
)


def check_output(folder: Path, *, overwrite: bool, is_default: bool, flag: str = "--output") -> None:
    """Raise UserError if a new run may not use `folder`.

    Allowed are a new or empty folder, and a folder whose run may be moved aside: a finished run in the default folder,
    and with `overwrite` any run.

    Args:
        folder: the output folder.
        overwrite: the run in `folder` may be moved aside.
        is_default: `folder` is the default output folder of the command.
        flag: the flag of the folder. Another flag than --output means a reward model's folder.
    """
    check_place(folder, overwrite=overwrite, flag=flag)
    require_unused(folder)
    _check_content(folder, overwrite, is_default, flag)


def check_place(folder: Path, *, overwrite: bool, flag: str = "--output") -> None:
    """Raise UserError if no run may ever use `folder`, whatever run is in it now. The arguments are those of
    `check_output`."""
    check_folder(str(folder), flag)
    if flag != "--output" or (overwrite and _content(folder)):
        replacing.check_replaceable(folder, flag)
    if flag != "--output" and folder.resolve() in (Path.cwd(), *Path.cwd().parents):  # the folder is renamed
        raise UserError(
            "cannot replace the current folder or its parents",
            f"{flag} {folder}",
            "Use a folder inside the current one",
        )
    _status_in(folder, flag)


def _status_in(folder: Path, flag: str) -> str | None:
    """Return the status of the run in a folder; None if the folder is empty. Raises UserError if it has other files
    only."""
    status = read_status(folder)
    if status is None and _content(folder):
        raise UserError(
            f"the folder contains files but no {RUN_FILE}, so it is not replaced",
            f"{flag} {folder}",
            f"Use another folder with {flag}",
        )
    return status


def _check_content(folder: Path, overwrite: bool, is_default: bool, flag: str = "--output") -> None:
    status = _status_in(folder, flag)
    if status is None:
        return
    if flag != "--output":
        if not overwrite and not is_default:
            raise UserError(
                "the folder already contains a reward model",
                f"{flag} {folder}",
                f"Add --rm-overwrite to move it aside, or use another folder with {flag}",
            )
        return
    if not overwrite and not (status == "finished" and is_default):
        kind, more = ("a finished", "") if status == "finished" else ("an unfinished", "--resume to continue it, ")
        raise UserError(
            f"the folder already contains {kind} run",
            f"--output {folder}",
            f"Add {more}--overwrite to move it aside, or use another folder with --output",
        )


def claim_output(folder: Path, *, overwrite: bool, is_default: bool) -> tuple[RunLock, str | None]:
    """Lock `folder` and make it empty for a new run. Returns the lock, and a message if an older run was moved.

    Raises UserError as `check_output`. The older run is moved to FOLDER_1, FOLDER_2.
    """
    check_output(folder, overwrite=overwrite, is_default=is_default)
    lock = lock_run(folder)
    try:
        with lock.closed_after_error():
            _check_content(folder, overwrite, is_default)  # again: another run may have started before the lock
            if not _content(folder):
                return lock, None
            return lock, f"moved the old run in {folder} to {_move_to(folder, numbered_name(folder))}"
    except OSError as error:  # on Windows, if another program uses a file in it
        programs = system.programs_using(folder)
        users = f"; it is used by {', '.join(programs)}" if programs else ""
        fix = "Close the programs that use it, such as TensorBoard" if programs or system.WINDOWS else os_advice(error)
        raise UserError(
            "the old run in the folder cannot be moved", f"--output {folder} ({error.strerror}{users})", fix
        ) from None


def _content(folder: Path) -> list[Path]:
    """Return the content of a folder without the lock file, run.json last."""
    there = folder.iterdir() if folder.exists() else ()
    return sorted((path for path in there if path.name != LOCK_FILE), key=lambda path: path.name == RUN_FILE)


def _move_to(folder: Path, aside: Path) -> Path:
    """Move the content of `folder` to `aside`, and return it. The lock file stays, because it is locked."""
    aside.mkdir()
    moved: list[Path] = []
    try:
        for path in _content(folder):
            system.replace(path, aside / path.name)
            moved.append(path)
    except OSError:  # on Windows, if another program uses one of them: move everything back
        with contextlib.suppress(OSError):  # report the first error
            for path in moved:
                system.replace(aside / path.name, path)
            aside.rmdir()
        raise
    return aside


def read_status(folder: Path) -> str | None:
    """Return "running", "finished", "stopped" or "failed" from a run.json of any format; None if it cannot be read."""
    facts = read_json(folder)
    return None if facts is None else facts["status"]


def seed_folder(output: str, seed: int) -> str:
    """Return the output folder of one of several seeds."""
    return f"{Path(output)}_seed{seed}"


def folders_of(output: str, seeds: Sequence[int] | None) -> list[str]:
    """Return the run folders of a command: the output folder, or one per seed."""
    return [output] if seeds is None else [seed_folder(output, seed) for seed in seeds]


def require_unused(folder: Path, mode: str = "ab+") -> None:
    """Raise UserError if a live process has a run in `folder`. `mode` as in `system.lock`."""
    if (folder / LOCK_FILE).exists() and folder not in reserved:
        _lock(folder, mode).close()


def is_in_use(folder: Path) -> bool:
    """True if a live process has a run in `folder`."""
    try:
        require_unused(folder, "rb")  # it may be another user's folder
    except (UserError, OSError):  # or a private one
        return True
    return False


class FolderMoved(RunError):
    """The folder of a run is no longer at its path."""


def reserve(folder: Path) -> bool:
    """Lock a run's folder before its models are loaded, until `lock_run` takes the lock over or `release` gives it
    back. Returns False if a live process has locked it."""
    try:
        reserved[folder] = RunLock(folder)
    except UserError:
        return False
    return True


def release(folder: Path) -> None:
    """Give the lock of `reserve` back, if no run has taken it over."""
    if folder in reserved:
        reserved.pop(folder).close()


def lock_run(folder: Path) -> RunLock:
    """Lock a run's folder, or take over the lock of `reserve`. Raises UserError if a live process has locked it."""
    return reserved.pop(folder) if folder in reserved else RunLock(folder)


class RunLock(AbstractContextManager):
    """Locks a folder until `close`, and creates it first if necessary. Raises UserError if a live process has locked
    it. `advice`: what to do if the folder is moved meanwhile.

    The process writes its number into the locked file, because its run.json does not exist yet. What killed processes
    were writing in the folder is removed. If the folder is moved, its lock moves with it, and another run can use the
    path: call `check` before each write.
    """

    def __init__(self, folder: Path, advice: str = RESUME_THERE):
        self.folder = folder
        self.advice = advice
        self.made = [path for path in (folder, *folder.parents) if not path.exists()]  # the deepest first
        folder.mkdir(parents=True, exist_ok=True)
        self.stream = _lock(folder)
        self.owner = f"PID {os.getpid()}, started {now()}, on {socket.gethostname()}\n".encode()
        self.stream.truncate(0)
        self.stream.write(self.owner)
        self.stream.flush()
        self.has_inodes = self._is_same_file()  # some file systems do not number their files
        for name in WRITTEN_ASIDE:
            for left in folder.glob(name + ANY_NUMBER):
                remove_path(left)

    def check(self) -> None:
        """Raise FolderMoved if another folder is at the path, or none."""
        if not self._is_at_its_path():
            raise FolderMoved(
                "the folder was moved or removed while the command ran, so nothing more is written there",
                f"--output {self.folder}",
                self.advice,
            )

    def _is_at_its_path(self) -> bool:
        try:
            # on a disk without locks, another run may have taken this folder and written its own number into the file
            same_owner = (self.folder / LOCK_FILE).read_bytes() == self.owner
            return same_owner and (not self.has_inodes or self._is_same_file())
        except (FileNotFoundError, NotADirectoryError):  # the lock file alone may have been removed
            return (read_json(self.folder) or {}).get("pid") == os.getpid()

    def _is_same_file(self) -> bool:
        return os.path.samestat(os.fstat(self.stream.fileno()), (self.folder / LOCK_FILE).stat())

    def close(self) -> None:
        """Unlock the folder. Remove it if this lock created it and nothing else is in it, as after an early error."""
        with contextlib.suppress(OSError):
            if self.made and self._is_at_its_path() and not _content(self.folder):
                if system.WINDOWS:  # it removes no open file
                    self.stream.close()
                (self.folder / LOCK_FILE).unlink()
                for folder in self.made:
                    folder.rmdir()
        self.made = []
        self.stream.close()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close()
        if isinstance(error, OSError):
            with naming(self.folder):
                raise error

    @contextlib.contextmanager
    def closed_after_error(self) -> Iterator[None]:
        """Context manager that unlocks the folder after an error: a program can try again, for example in a notebook,
        which stores the error's traceback and with it this object."""
        with contextlib.ExitStack() as stack:
            stack.push(self)
            yield
            stack.pop_all()


def _lock(folder: Path, mode: str = "ab+") -> IO[bytes]:
    """Lock a run's folder as RunLock, and write nothing."""
    file = folder / LOCK_FILE
    lock = system.lock(file, mode)
    if lock is None:
        owner = file.read_text(encoding="utf-8", errors="replace").strip() or "started a moment ago"
        raise UserError(
            f"the folder is in use by a running process ({owner})",
            f"--output {folder}",
            "Stop that process, or use another folder with --output",
        )
    return lock


def present_status(folder: Path, status: str) -> str:
    """Return the status of a run: "killed" if run.json has "running", but no live process has a run in the folder."""
    return "killed" if status == "running" and not is_in_use(folder) else status

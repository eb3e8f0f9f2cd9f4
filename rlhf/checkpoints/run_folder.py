"""A run's folder: the names of what lies in it, and who may write into it."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from rlhf.checkpoints import replacing
from rlhf.checkpoints.run_record import RUN_FILE, read_json
from rlhf.utils import system
from rlhf.utils.errors import UserError
from rlhf.utils.files import check_folder

LOCK_FILE, INPUTS_FILE = "run.lock", "failed_inputs.json"
BEST_FOLDER, MERGED_FOLDER = "best", "merged"


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
    lock = lock_run(folder)
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
    return lock, done


def move_aside(folder: Path) -> str:
    """Make `folder` free without removing anything; returns in a line where its content is. Raises UserError where a
    live process has a run there."""
    with lock_run(folder):
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


def read_status(folder: Path) -> str | None:
    """Return "running", "finished", "stopped" or "failed", for a run.json of any format.

    None if there is no run.json, or it cannot be read.
    """
    facts = read_json(folder)
    return None if facts is None else facts["status"]


def seed_folder(output: str, seed: int) -> str:
    """Where one of several seeds goes."""
    return f"{Path(output)}_seed{seed}"


def require_unused(folder: Path) -> None:
    """Raise UserError where a live process has a run in `folder`."""
    if (folder / LOCK_FILE).exists():
        lock_run(folder).close()


def lock_run(folder: Path) -> IO[bytes]:
    """Lock a run's folder until what is returned is closed. Raises UserError where a live process has it."""
    lock = system.lock(folder / LOCK_FILE)
    if lock is None:
        facts = read_json(folder) or {}
        raise UserError(
            f"in use by a live run (process {facts.get('pid', 'unknown')}, since {facts.get('started', 'unknown')}): "
            f"--output {folder}. Stop that one, or name another folder with --output"
        )
    return lock

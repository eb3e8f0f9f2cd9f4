"""Atomic writes of files and folders, strict JSON, and checks of output folders."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlhf.utils import system
from rlhf.utils.errors import UserError, as_os_error, first_line, naming
from rlhf.utils.paths import local_path, new_name
from rlhf.utils.results import json_ready
from rlhf.utils.system import WINDOWS
from rlhf.utils.timing import timed

LONGEST_PATH = 259 if WINDOWS else 4_095  # characters; bytes
LONGEST_NAME = 255
UPDATE = "files"  # in a folder, the name of its files while they are written, without the random number
LONGEST_BELOW = 100  # length of paths inside an output folder: TensorBoard's file names contain the host name


def atomic_write(file: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a temporary file in the folder of `file`, then rename it to `file`. Creates the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with naming(file), staged(file) as staging:
        write(staging)
        rename_synced(staging, file)


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Context manager with a name next to `path`, for its new content until this is complete and renamed to `path`.
    After an error, what has the name is removed."""
    staging = new_name(path)
    try:
        yield staging
    finally:
        remove_path(staging)


def rename_synced(staging: Path, path: Path) -> Path | None:
    """Sync a complete file or folder to the disk, then rename it to `path`. After a kill or a power failure, `path`
    has the whole old content or the whole new one.

    If a folder with files has the name, it is moved to `numbered_name` first. Returns its new path. If the second
    rename fails, the first is undone and `staging` is unchanged.
    """
    with timed("sync"):
        system.sync_tree(staging)  # otherwise a power failure can leave empty files under the new name
    older = None
    if staging.is_dir() and path.exists():
        if path.is_file() or any(path.iterdir()):
            older = numbered_name(path)
            system.replace(path, older)
        else:
            system.retry_on_windows(path.rmdir)
    try:
        system.replace(staging, path)
    except BaseException:
        if older is not None:
            with suppress(OSError):  # report the first error
                system.replace(older, path)
        raise
    system.sync_folder(path.parent)
    return older


def numbered_name(path: Path) -> Path:
    """Return the first of `path_1`, `path_2` that does not exist."""
    return next(p for n in range(1, 10_000) if not (p := path.with_name(f"{path.name}_{n}")).exists())


def remove_path(path: Path) -> None:
    """Remove a file, or a folder with its content, as far as possible."""
    with suppress(OSError):  # a folder, or nothing
        path.unlink()
    system.remove_folder(path, ignore_errors=True)


def write_text(file: Path, text: str) -> None:
    """Write a UTF-8 file atomically. Lone surrogates are escaped as in JSON. Lines end with LF, also on
    Windows."""
    content = text.encode("utf-8", errors="backslashreplace")
    atomic_write(file, lambda staging: staging.write_bytes(content))


def write_json(file: Path, data: Any) -> None:
    """Write a JSON file atomically. Numbers that are not finite become null."""
    write_text(file, json.dumps(json_ready(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(file: Path, rows: Iterable[Any]) -> None:
    """Write a JSONL file atomically. Values that JSON does not have become text."""
    write_text(file, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))


def read_jsonl(file: Path, fix: str) -> list[Any]:
    """Return the rows of a JSONL file that `write_jsonl` wrote. Raises UserError with this fix if it is corrupted."""
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    except ValueError as error:
        raise UserError("incomplete or corrupted", f"{file} ({first_line(error):.120})", fix) from None


@contextmanager
def saving_tensors(folder: Path) -> Iterator[None]:
    """Every call that writes safetensors or tokenizer files into `folder` is made inside this context.

    Converts disk errors of the Rust code in safetensors and tokenizers, which raises other exceptions, to OSError.
    Gives the safetensors files the umask's permissions: safetensors creates them for their owner only.
    """
    try:
        with timed("write"):
            yield
    except Exception as error:
        found = as_os_error(error)
        if found is None:
            raise
        with naming(folder):
            raise found from None
    for file in folder.glob("*.safetensors"):
        system.add_umask_permissions(file)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents. Raises FileExistsError if it exists."""
    # a folder of this name that was just removed can linger
    system.retry_on_windows(lambda: folder.mkdir(parents=True))


def check_folder(output: str, flag: str = "--output") -> Path:
    """Return the path of an output folder, which may not exist yet. Raises UserError if it cannot be created or
    written."""
    folder = Path(local_path(output))
    longest = len(os.fsencode(folder.absolute())) + LONGEST_BELOW
    if longest > LONGEST_PATH or any(len(os.fsencode(part)) > LONGEST_NAME for part in folder.parts):
        raise UserError(
            f"the path is too long ({longest} with the files inside it; the limits are {LONGEST_PATH}, and "
            f"{LONGEST_NAME} for a name)",
            f"{flag} {output}",
            "Give a shorter one",
        )
    link = next((p for p in (folder, *folder.absolute().parents) if p.is_symlink() and not p.exists()), None)
    if link is not None:
        raise UserError("a broken link", f"{flag} {output} ({link})", "Remove it, or give another folder")
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise UserError("not a folder", f"{flag} {output} ({nearest} is a file)", "Give another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError("no permission to write", f"{flag} {output} ({nearest} is read-only)", "Give another folder")
    return folder


def update_dir_atomically(
    folder: Path, write: Callable[[Path], None], check: Callable[[], None] = lambda: None
) -> None:
    """Update a saved model or report: call `write` with a temporary folder, then replace the old files by its files.

    `folder` contains a loadable model at any time, because the weights are one file and the other files do not change
    during a run. Its parent may be read-only, or on another disk. `check` is called before the writing, and before the
    first file is replaced.
    """
    check()
    with naming(folder), staged(folder / UPDATE if folder.exists() else folder) as staging:
        write(staging)
        with timed("sync"):
            system.sync_tree(staging)
        check()
        if not folder.exists():
            rename_synced(staging, folder)
            return
        for file in sorted(staging.iterdir()):
            system.replace(file, folder / file.name)


def hardlink_dir(source: Path, target: Path) -> None:
    """Copy the files of a saved model. Weights are hard links to the same files, if the disk supports links, and use
    no space. This is safe because weight files are never modified: `update_dir_atomically` replaces them."""
    target.mkdir(exist_ok=True)
    for file in filter(Path.is_file, source.iterdir()):  # a user or a tool may have made a folder there
        try:
            if file.suffix != ".safetensors":
                raise OSError
            os.link(file, target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)  # copy2 would also change permissions, which some disks refuse


# --- the identity of a file ------------------------------------------------------------------------------------------


@timed("hash")
def sha256(file: Path) -> str:
    """Return the SHA-256 of all bytes of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_state(file: Path) -> tuple:
    """Return what differs after a file has changed: its path, device, inode, size and times of change in ns."""
    stat = file.stat()
    return file.resolve(), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


_hashes: dict[tuple, str] = {}  # result of `file_state`, of a saved file a part of it -> SHA-256


def sha256_once(file: Path, saved: bool = False) -> str:
    """Return `sha256(file)`, about 0.3 s per GB. A file that does not change is read once per process. `saved`: this
    program has saved the file, which is not read again after it got another name or a hard link."""
    state = file_state(file)
    if saved:
        state = state[1:-1]  # not the path, nor the time of such a change
    if state not in _hashes:
        _hashes[state] = sha256(file)
    return _hashes[state]

"""Files that are complete or unchanged, JSON that any reader takes, and folders that can be written to."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.utils.errors import UserError
from rlhf.utils.system import WINDOWS, replace, sync_file, sync_folder

LONGEST_PATH = 259 if WINDOWS else 4_095  # characters; bytes
LONGEST_NAME = 255
LONGEST_BELOW = 100  # of what is written under an output folder: TensorBoard's names hold the machine's


def atomic_write(file: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a staging file beside `file`, then rename it to `file`. Its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    staging = file.with_name(file.name + ".new")
    write(staging)
    sync_file(staging)  # else a power cut may leave the new name on an empty file
    replace(staging, file)
    sync_folder(file.parent)


def write_text(file: Path, text: str) -> None:
    """UTF-8, complete or unchanged."""
    atomic_write(file, lambda staging: staging.write_text(text, encoding="utf-8"))


def write_json(file: Path, data: Any) -> None:
    """Complete or unchanged. Numbers that are not finite become null."""
    write_text(file, json.dumps(json_ready(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def json_ready(data: Any) -> Any:
    """The same data with None for every number that is not finite."""
    if isinstance(data, dict):
        return {key: json_ready(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [json_ready(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


@contextmanager
def disk_errors() -> Iterator[None]:
    """The parts of safetensors and tokenizers that are written in Rust know no OSError: what they raise at a full disk
    becomes one."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if "os error" not in str(error):
            raise
        raise OSError(errno.EIO, str(error), "a file of weights or of the tokenizer") from None


def check_folder(output: str, flag: str = "--output") -> Path:
    """A folder to write to, which need not be there yet. Raises UserError where it could not be made or written to."""
    folder = Path(output)
    longest = len(os.fsencode(folder.absolute())) + LONGEST_BELOW
    if longest > LONGEST_PATH or any(len(os.fsencode(part)) > LONGEST_NAME for part in folder.parts):
        raise UserError(
            f"too long a path ({longest} with what is written under it, {LONGEST_PATH} are possible here, and "
            f"{LONGEST_NAME} for a name): {flag} {output}. Name a shorter one with {flag}"
        )
    link = next((p for p in (folder, *folder.absolute().parents) if p.is_symlink() and not p.exists()), None)
    if link is not None:
        raise UserError(f"a link that leads nowhere: {flag} {output} ({link}). Remove it, or name another with {flag}")
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise UserError(f"cannot be a folder: {flag} {output} ({nearest} is a file). Name another with {flag}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"cannot write there: {flag} {output} ({nearest} is read-only). Name another with {flag}")
    return folder


def update_dir_atomically(folder: Path, write: Callable[[Path], None]) -> None:
    """Update a saved model: `write` fills a staging folder beside it, whose files then replace the old ones.

    So `folder` holds a loadable model at all times: the weights are one file, and the others do not change in a run.
    """
    staging = folder.with_name(folder.name + ".new")
    shutil.rmtree(staging, ignore_errors=True)
    write(staging)
    for file in staging.iterdir():  # names may reach the disk before what they name
        sync_file(file)
    if not folder.exists():
        replace(staging, folder)
        return
    for file in sorted(staging.iterdir()):
        replace(file, folder / file.name)
    shutil.rmtree(staging)  # a file that has both names, as links have, is in both places still


def hardlink_dir(source: Path, target: Path) -> None:
    """Copy a saved model without using space: weights are hard links to the same files, if the disk supports
    them. They are never written to: `update_dir_atomically` replaces them."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        try:
            if file.suffix != ".safetensors":
                raise OSError
            os.link(file, target / file.name)
        except OSError:
            shutil.copy2(file, target / file.name)


def files_print(name: str | None, pattern: str) -> str | None:
    """SHA-256 of a file, or of those in a folder: of their names, sizes and last MiB, which no two trainings leave
    alike. None where `name` is neither (a name on the hub, a built-in rule)."""
    if not name or not Path(name).exists():
        return None
    print_ = hashlib.sha256()
    for file in sorted(Path(name).glob(pattern)) if Path(name).is_dir() else [Path(name)]:
        with file.open("rb") as stream:
            size = file.stat().st_size
            stream.seek(max(0, size - 2**20))
            print_.update(f"{file.name} {size}\n".encode() + stream.read())
    return print_.hexdigest()

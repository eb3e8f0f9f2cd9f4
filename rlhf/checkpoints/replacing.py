"""Moves an old output aside: FOLDER becomes the first free of FOLDER_1, FOLDER_2. Nothing is deleted.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from rlhf.utils import system
from rlhf.utils.errors import Problem, UserError, raise_if
from rlhf.utils.paths import resolve_path


def numbered_name(folder: Path) -> Path:
    """Return the first of `folder_1`, `folder_2` that does not exist."""
    return next(p for n in range(1, 10_000) if not (p := folder.with_name(f"{folder.name}_{n}")).exists())


def free_name(path: Path) -> Path:
    """Return `path` if it does not exist; otherwise the first of `path_1`, `path_2` that does not."""
    return numbered_name(path) if path.exists() else path


def check_replaceable(folder: Path, flag: str) -> None:
    """Raise UserError if a folder cannot be renamed: the root, a mount point, or a folder in a read-only folder."""
    whole = folder.resolve()
    if not whole.name or os.path.ismount(whole):
        raise UserError("cannot replace the root folder of a disk", f"{flag} {folder}", "Use a folder inside it")
    parent = next(path for path in whole.parents if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(
            "cannot replace this folder, because its parent folder is read-only",
            f"{flag} {folder}",
            "Use another folder",
        )


def replace_dir(staging: Path, folder: Path) -> Path | None:
    """Rename the complete folder `staging` to `folder`. An existing folder with files is moved aside first. Returns
    its new path. If the second rename fails, the first is undone and `staging` is unchanged."""
    older = None
    if folder.is_dir() and not any(folder.iterdir()):
        system.retry_on_windows(folder.rmdir)
    if folder.exists():
        older = numbered_name(folder)
        system.replace(folder, older)
    try:
        system.replace(staging, folder)
    except BaseException:
        if older is not None:
            with contextlib.suppress(OSError):  # report the first error
                system.replace(older, folder)
        raise
    system.sync_folder(folder.parent)
    return older


def check_inputs_outside(output: str, inputs: Sequence[tuple[str, str]], flag: str) -> None:
    """Raise UserError if an input is in the output folder: its path would change when the folder is moved aside."""
    folder = resolve_path(output)
    raise_if(
        [
            Problem(
                f"the output folder {output} contains an input",
                f"{input_flag} {name}",
                f"Use another folder with {flag}",
            )
            for input_flag, name in inputs
            if folder in ((path := resolve_path(name)), *path.parents)
        ]
    )

"""Checks before an old output is moved aside: FOLDER becomes the first free of FOLDER_1, FOLDER_2. Nothing is deleted.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlhf.utils.errors import Problem, UserError, raise_if
from rlhf.utils.paths import resolve_path


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

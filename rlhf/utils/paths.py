"""Paths that the user gives: whether a name is a path, and the error if nothing is there. Imports no torch."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from rlhf.utils.errors import CLOSE, UserError


def is_path(name: str) -> bool:
    """Whether a name can only be a place on this disk: hub names are `name` or `owner/name`."""
    return (
        name.startswith((".", "/", "~", os.sep))
        or "\\" in name
        or name.count("/") > 1
        or Path(name).suffix in (".jsonl", ".json", ".csv", ".parquet", ".txt")
    )


def resolve_path(name: str) -> Path:
    """The full path of a file or folder. Raises UserError for links in a circle and unknown users' homes."""
    try:
        return Path(name).expanduser().resolve()
    except (RuntimeError, OSError) as error:
        raise UserError(f"not a usable path ({error}): {name}. Name another") from None


def missing_path(path: str, what: str, hint: str) -> UserError:
    """The error for a path that is not there; names what lies near it and could be meant."""
    resolve_path(path)  # raises for what is no path at all
    target = Path(path).expanduser()
    if what == "data file" and target.is_dir():
        return UserError(f"a folder, not a {what}: {path}. {hint}")
    siblings = sorted(p.name for p in target.parent.iterdir()) if target.parent.is_dir() else []
    close = difflib.get_close_matches(target.name, siblings, n=3, cutoff=CLOSE)
    near = [str(target.parent / name) for name in close if _may_be(target.parent / name, what)]
    nearest = f"Did you mean {', '.join(near)}? " if near else ""
    return UserError(f"{what} not found: {path}. {nearest}{hint}")


def _may_be(path: Path, what: str) -> bool:
    """Whether a file or folder can be what is looked for; a folder of source code is no model."""
    if what == "model":
        return any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    return path.is_dir() if what == "run" else path.is_file()

"""Paths given by the user: distinguishes them from hub names, and reports missing ones. Imports no torch."""

from __future__ import annotations

import glob
import os
import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhf.utils.errors import UserError, did_you_mean

GGUF_SUFFIX = ".gguf"
NEW = ".new-"  # between the name of a file or folder and the random number of its new content, before it is complete
ANY_NUMBER = NEW + "[0-9a-f]" * 8  # both as a glob pattern
PACKAGE = "package:"  # in front of the name of an installed Python package that contains a GGUF file


def is_path(name: str) -> bool:
    """True if a name can only be local. Hub names are `name` or `owner/name`."""
    return (
        name.startswith((".", "/", "~", os.sep, PACKAGE))
        or "\\" in name
        or name.count("/") > 1
        or Path(name).suffix.lower() in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", GGUF_SUFFIX)
    )


def is_gguf(name: str) -> bool:
    """True for the name of a GGUF file or of a package that contains one."""
    return name.startswith(PACKAGE) or (name.lower().endswith(GGUF_SUFFIX) and not Path(name).is_dir())


_named_in: dict[str, Path] = {}  # text in a file that was read -> that file


def note_names(file: Path, values: Iterable[Any]) -> None:
    """Remember the texts in a file that is not on the command line, such as run.json: if one of them is the name of a
    hub model or dataset, `file_with` returns the file."""
    _named_in.update({value: file for value in values if isinstance(value, str)})


def file_with(name: str) -> Path | None:
    """Return the file that contains a name, if `note_names` has received it."""
    return _named_in.get(name)


def exists(name: str) -> bool:
    """True if a path exists. A package is looked up when its model is loaded."""
    return name.startswith(PACKAGE) or resolve_path(name).exists()


def is_on_hub(name: str) -> bool:
    """True if a name refers to the hub. A local file or folder of that name is preferred."""
    return not is_path(name) and not exists(name)


def same_value(one: Any, other: Any) -> bool:
    """True if two values of a setting are equal, or are two spellings of one path: data/x.json and ./data/x.json."""
    if one == other:
        return True
    paths = isinstance(one, str) and isinstance(other, str) and is_path(one) and is_path(other)
    return paths and os.path.normpath(one) == os.path.normpath(other)


def local_path(name: str | os.PathLike[str]) -> str:
    """Return a path with the home folder in place of `~`: every path of the user, of an input or an output, passes
    this function. Other names are unchanged. Raises UserError if `~NAME` is not a user of this machine."""
    path = os.path.expanduser(name)
    if path.startswith("~"):
        raise UserError(f"no home folder for {Path(path).parts[0]}", name, f"Write ./{name} for a folder of this name")
    return path


def path_on_page(name: str) -> str:
    """Return a path or a name for a page that others read: of an absolute path only its last two parts, of a folder in
    the hub's cache its name on the hub."""
    name = re.sub(r".*[/\\](model|dataset)s--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]\w+$", r"\2/\3", name)
    return str(Path(*Path(name).parts[-2:])) if os.path.isabs(name) else name


def text_on_page(text: str) -> str:
    """Return a text with its absolute paths as `path_on_page`. A path ends at a space or a mark of punctuation."""
    return re.sub(r"(?<![^\s(=\"'])([A-Za-z]:)?[/\\][^\s:,;()\"']+", lambda found: path_on_page(found[0]), text)


def resolve_path(name: str) -> Path:
    """Return the absolute path of a file or folder. Raises UserError for circular links, unknown home folders
    and NUL characters."""
    path = Path(local_path(name))
    try:
        return path.resolve()
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"not a valid path ({error})", name, "Give another one") from None


def new_name(path: Path) -> Path:
    """Return the name under which this call writes the new content of a file or folder. No other one has it."""
    return path.with_name(f"{path.name}{NEW}{uuid.uuid4().hex[:8]}")


def is_interrupted_save(path: Path) -> bool:
    """True for a folder in which an interrupted program was writing the new content of another folder."""
    return path.match("*" + ANY_NUMBER) and path.is_dir()


def interrupted_saves(folder: Path) -> list[Path]:
    """Return the folders in which interrupted programs were writing the new content of `folder`."""
    saves = folder.parent.glob(glob.escape(folder.name) + ANY_NUMBER)
    return sorted(filter(Path.is_dir, saves))


def missing_path(path: str, what: str, hint: str) -> UserError:
    """Return the error for a missing path, with files or folders of a similar name."""
    resolve_path(path)  # raises for invalid paths
    target = Path(local_path(path))
    if target.exists() and not (target.is_file() or target.is_dir()):
        return UserError("not a regular file", path, f"Write the content into a file first. {hint}")
    if saved := interrupted_saves(target):
        return UserError(
            f"{what} not found",
            f"{path}, but an interrupted save left {saved[-1]}",
            f"If it has a file run.json, it is complete: rename it to {target.name}. Otherwise remove it",
        )
    names = {p.name for p in target.parent.iterdir()} if target.parent.is_dir() else set()
    near = did_you_mean(target.name, names - {target.name})  # a broken link has the same name
    return UserError(f"{what} not found", path, near + hint)

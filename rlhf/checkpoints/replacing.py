"""A folder that replaces an older one: the older one stays beside it, as NAME.replaced, until the new one is complete.

Imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from rlhf.utils import system
from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.paths import resolve_path

REPLACED = ".replaced"
HOUR_S = 3_600
RECORD = "run.json"  # in every folder that this project wrote
# what this project writes at the top of a run's or a model's folder
OURS = re.compile(
    r"run\.(json|lock)|failed_inputs\.json|reward_output\.txt|metrics\.json|README\.md|logs|samples|tokens|incidents"
    r"|(best|merged)(\.new)?|checkpoint-.*|.*\.safetensors(\.index\.json)?|(generation_|adapter_)?config\.json"
    r"|(added_tokens|special_tokens_map|tokenizer|tokenizer_config|vocab)\.json|(merges|vocab)\.txt|chat_template\.jinja"
    r"|additional_chat_templates|[\w.]+\.model|.*\.new"
)


def free_name(path: Path) -> Path:
    """Return `path`, or with the first number behind it, `..._1`, that nothing has yet."""
    names = (path, *(path.with_name(f"{path.name}_{n}") for n in range(1, 10_000)))
    return next(name for name in names if not name.exists())


def numbered_name(folder: Path) -> Path:
    """Return the first of `folder_1`, `folder_2` that nothing has yet."""
    return next(p for n in range(1, 10_000) if not (p := folder.with_name(f"{folder.name}_{n}")).exists())


def set_aside(folder: Path) -> Path:
    """Return a free name beside `folder` for what is to be replaced."""
    whole = folder.resolve()
    return free_name(whole.with_name(whole.name + REPLACED))


def check_replaceable(folder: Path, flag: str) -> None:
    """Raise UserError if a folder cannot be renamed as a whole: the root, the top of a mounted disk, or a folder whose
    parent cannot be written to."""
    whole = folder.resolve()
    if not whole.name or os.path.ismount(whole):
        raise UserError(f"the top of a disk cannot be replaced as a whole: {flag} {folder}. Name a folder inside it")
    parent = next(path for path in whole.parents if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"its parent folder is read-only: {flag} {folder}. Name a folder that can be replaced")


def replaced_of(folder: Path) -> list[Path]:
    """Return the older versions of `folder` that lie beside it, the newest last."""
    whole = folder.resolve()
    named = re.compile(re.escape(whole.name + REPLACED) + r"(_\d+)?")
    siblings = whole.parent.iterdir() if whole.parent.is_dir() else ()
    found = [p for p in siblings if named.fullmatch(p.name) and p.is_dir() and (p / RECORD).is_file()]
    return sorted(found, key=lambda path: (path / RECORD).stat().st_mtime)


def foreign_files(folder: Path) -> list[str]:
    """Return the names of what lies in a folder that this project does not write."""
    return sorted(path.name for path in folder.iterdir() if not OURS.fullmatch(path.name))


def remove_replaced(folder: Path) -> list[str]:
    """Remove the older versions of a complete `folder`; returns a line for each that stays, because it holds other
    files or cannot be removed."""
    kept = []
    for older in replaced_of(folder):
        foreign = foreign_files(older)
        if foreign:
            kept.append(f"kept the replaced {older}: it holds {', '.join(foreign[:3])}")
            continue
        try:
            shutil.rmtree(older)
        except OSError as error:
            kept.append(f"kept the replaced {older}: it cannot be removed ({error.strerror})")
    return kept


def restore_replaced(folder: Path) -> bool:
    """If a replacement was interrupted between its two renames, bring the older version back; returns whether."""
    older = [] if folder.exists() else replaced_of(folder)
    if older:
        system.replace(older[-1], folder)
    return bool(older)


def unfinished_name(folder: Path) -> Path:
    """Return a name beside `folder` that no other process uses, for a folder that is being written."""
    return folder.with_name(f"{folder.name}.unfinished-{uuid.uuid4().hex[:8]}")


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process was writing, once it is an hour old: a younger one may be alive."""
    named = re.compile(re.escape(folder.name) + r"\.unfinished-[0-9a-f]{8}")
    for path in folder.parent.iterdir() if folder.parent.is_dir() else ():
        if named.fullmatch(path.name) and time.time() - path.stat().st_mtime > HOUR_S:
            shutil.rmtree(path, ignore_errors=True)


def replace_dir(staging: Path, folder: Path, keep: Path | None = None) -> None:
    """Rename the complete folder `staging` to `folder`. An older one there is renamed first: to `keep`, else to
    NAME.replaced. If the second rename fails, the first one is undone, and `staging` stays."""
    older = None
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if folder.exists():
        older = keep or set_aside(folder)
        system.replace(folder, older)
    try:
        system.replace(staging, folder)
    except BaseException:
        if older is not None:
            system.replace(older, folder)
        raise
    system.sync_folder(folder.parent)


def check_inputs_outside(output: str, inputs: Sequence[tuple[str, str]], flag: str) -> None:
    """Raise UserError if an input lies in the output folder, or in an older version beside it: replacing the folder
    would remove it."""
    folder = resolve_path(output)
    removed = {folder, *map(Path.resolve, replaced_of(folder))}
    raise_if(
        [
            f"the output folder {output} holds an input: {input_flag} {name}. Name another folder with {flag}"
            for input_flag, name in inputs
            if not removed.isdisjoint((path := resolve_path(name), *path.parents))
        ]
    )

"""Replaces a folder safely: the old folder is kept next to it as NAME.replaced until the new one is complete.

Imports no torch.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from rlhf.utils import system
from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.files import free_name
from rlhf.utils.paths import resolve_path

REPLACED = ".replaced"
HOUR_S = 3_600
RECORD = "run.json"  # every folder that this project writes contains it
# the names that this project writes at the top level of a run's or a model's folder
OURS = re.compile(
    r"run\.(json|lock)|failed_inputs\.json|reward_output(_process\d+)?\.txt|pass_rates\.jsonl|metrics\.jsonl?"
    r"|README\.md|logs|prompts|samples|tokens|incidents"
    r"|(best|merged)(\.new)?|checkpoint-.*|.*\.safetensors(\.index\.json)?|(generation_|adapter_)?config\.json"
    r"|(added_tokens|special_tokens_map|tokenizer|tokenizer_config|vocab)\.json|(merges|vocab)\.txt|chat_template\.jinja"
    r"|additional_chat_templates|[\w.]+\.model|Modelfile|.*\.new(_\d+)?"
)


def numbered_name(folder: Path) -> Path:
    """Return the first of `folder_1`, `folder_2` that does not exist."""
    return next(p for n in range(1, 10_000) if not (p := folder.with_name(f"{folder.name}_{n}")).exists())


def set_aside(folder: Path) -> Path:
    """Return a free name next to `folder` for its old version."""
    whole = folder.resolve()
    return free_name(whole.with_name(whole.name + REPLACED))


def check_replaceable(folder: Path, flag: str) -> None:
    """Raise UserError if a folder cannot be renamed: the root, a mount point, or a folder in a read-only folder."""
    whole = folder.resolve()
    if not whole.name or os.path.ismount(whole):
        raise UserError(f"cannot replace the root folder of a disk: {flag} {folder}. Use a folder inside it")
    parent = next(path for path in whole.parents if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot replace this folder, because its parent folder is read-only: {flag} {folder}. Use another folder"
        )


def replaced_of(folder: Path) -> list[Path]:
    """Return the old versions next to `folder`, the newest last."""
    whole = folder.resolve()
    named = re.compile(re.escape(whole.name + REPLACED) + r"(_\d+)?")
    siblings = whole.parent.iterdir() if whole.parent.is_dir() else ()
    found = [p for p in siblings if named.fullmatch(p.name) and p.is_dir() and (p / RECORD).is_file()]
    return sorted(found, key=lambda path: (path / RECORD).stat().st_mtime)


def foreign_files(folder: Path) -> list[str]:
    """Return the names in a folder that this project does not write."""
    return sorted(path.name for path in folder.iterdir() if not OURS.fullmatch(path.name))


def remove_replaced(folder: Path) -> list[str]:
    """Remove the old versions of a complete `folder`. Returns a line for each that is not removed, because it holds
    other files or cannot be deleted."""
    kept = []
    for older in replaced_of(folder):
        foreign = foreign_files(older)
        if foreign:
            kept.append(f"the replaced folder {older} was not removed: it contains {', '.join(foreign[:3])}")
            continue
        try:
            system.remove_folder(older)
        except OSError as error:
            kept.append(f"the replaced folder {older} was not removed: {error.strerror}{users_of(older)}")
    return kept


def users_of(folder: Path) -> str:
    """Return the end of an error message, with the programs that use files in `folder`; "" if none is found."""
    programs = system.programs_using(folder)
    return f"; it is used by {', '.join(programs)}" if programs else ""


def restore_replaced(folder: Path) -> bool:
    """Restore the old version if a replacement was interrupted between its two renames. Returns True if it was."""
    older = [] if folder.exists() else replaced_of(folder)
    if older:
        system.replace(older[-1], folder)
    return bool(older)


def unfinished_name(folder: Path) -> Path:
    """Return a unique name next to `folder`, for a folder that is being written."""
    return folder.with_name(f"{folder.name}.unfinished-{uuid.uuid4().hex[:8]}")


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished folders of killed processes. Folders younger than an hour may belong to a live process."""
    named = re.compile(re.escape(folder.name) + r"\.unfinished-[0-9a-f]{8}")
    for path in folder.parent.iterdir() if folder.parent.is_dir() else ():
        if named.fullmatch(path.name) and time.time() - path.stat().st_mtime > HOUR_S:
            system.remove_folder(path, ignore_errors=True)


def replace_dir(staging: Path, folder: Path, keep: Path | None = None) -> None:
    """Rename the complete folder `staging` to `folder`. An existing folder is renamed first: to `keep`, or without it
    to NAME.replaced. If the second rename fails, the first is undone and `staging` is unchanged."""
    older = None
    if folder.is_dir() and not any(folder.iterdir()):
        system.retry_on_windows(folder.rmdir)
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
    """Raise UserError if an input is in the output folder or in an old version of it: replacing would remove it."""
    folder = resolve_path(output)
    removed = {folder, *map(Path.resolve, replaced_of(folder))}
    raise_if(
        [
            f"the output folder {output} contains an input: {input_flag} {name}. Use another folder with {flag}"
            for input_flag, name in inputs
            if not removed.isdisjoint((path := resolve_path(name), *path.parents))
        ]
    )

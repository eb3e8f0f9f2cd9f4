"""A folder that replaces an older one: the older one stays beside it, as NAME.replaced, until the new one is complete.

Imports no torch.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from rlhf import system

REPLACED = ".replaced"
RECORD = "run.json"  # in every folder that this project wrote
# what this project writes at the top of a run's or a model's folder
OURS = re.compile(
    r"run\.(json|lock)|failed_inputs\.json|reward_output\.txt|metrics\.json|README\.md|logs|samples|tokens|incidents"
    r"|(best|merged)(\.new)?|checkpoint-.*|.*\.safetensors(\.index\.json)?|(generation_|adapter_)?config\.json"
    r"|(added_tokens|special_tokens_map|tokenizer|tokenizer_config|vocab)\.json|merges\.txt|chat_template\.jinja"
    r"|tokenizer\.model|.*\.new"
)


def free_name(path: Path) -> Path:
    """Return `path`, or with the first number behind it, `..._1`, that nothing has yet."""
    names = (path, *(path.with_name(f"{path.name}_{n}") for n in range(1, 10_000)))
    return next(name for name in names if not name.exists())


def set_aside(folder: Path) -> Path:
    """Return a free name beside `folder` for what is to be replaced."""
    return free_name(folder.with_name(folder.name + REPLACED))


def replaced_of(folder: Path) -> list[Path]:
    """Return the older versions of `folder` that lie beside it, the newest last."""
    named = re.compile(re.escape(folder.name + REPLACED) + r"(_\d+)?")
    beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
    found = [p for p in beside if named.fullmatch(p.name) and p.is_dir() and (p / RECORD).is_file()]
    return sorted(found, key=lambda place: (place / RECORD).stat().st_mtime)


def foreign_files(folder: Path) -> list[str]:
    """Return the names of what lies in a folder that this project does not write."""
    return sorted(path.name for path in folder.iterdir() if not OURS.fullmatch(path.name))


def remove_replaced(folder: Path) -> list[str]:
    """Remove the older versions of a complete `folder`; returns a line for each that stays, because it holds other
    files or cannot be removed."""
    kept = []
    for place in replaced_of(folder):
        foreign = foreign_files(place)
        if foreign:
            kept.append(f"kept the replaced {place}: it holds {', '.join(foreign[:3])}")
            continue
        try:
            shutil.rmtree(place)
        except OSError as error:
            kept.append(f"kept the replaced {place}: it cannot be removed ({error.strerror})")
    return kept


def restore_replaced(folder: Path) -> bool:
    """If a replacement was interrupted between its two renames, bring the older version back; returns whether."""
    older = [] if folder.exists() else replaced_of(folder)
    if older:
        system.replace(older[-1], folder)
    return bool(older)


def put_folder_in_place(beside: Path, folder: Path) -> None:
    """Rename the complete folder `beside` to `folder`; an older one there is renamed to NAME.replaced first."""
    if folder.exists():
        system.replace(folder, set_aside(folder))
    system.replace(beside, folder)
    system.sync_folder(folder.parent)

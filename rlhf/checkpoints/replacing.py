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
from typing import Any

from rlhf.utils import system
from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.files import free_name
from rlhf.utils.paths import resolve_path

REPLACED = ".replaced"
HOUR_S = 3_600
MOST_NAMED = 5  # names in a message
RECORD = "run.json"  # every folder that this project writes contains it
Tree = dict[re.Pattern[str], Any]  # form of names -> None for files, the content of a folder
NUMBERS = {
    "<n>": r"[1-9]\d*",
    "<update>": r"(?:\d{6}|[1-9]\d{6,})",
    "<part>": r"\d{5}",
    "<time>": r"\d{10}",
    "<count>": r"\d+",
    "<host>": r"[^/]+",
}


def _tree(files: str, **folders: Tree) -> Tree:
    """Return the form of `files` and those of `folders`. A file whose write was interrupted has `.new` at its end."""
    return {_form(files, r"(?:\.new)?"): None, **{_form(name): content for name, content in folders.items()}}


def _form(names: str, end: str = "") -> re.Pattern[str]:
    """Return the pattern of one of several names, separated by spaces, in which the words of NUMBERS are numbers."""
    pattern = "|".join(map(re.escape, names.split()))
    for word, digits in NUMBERS.items():
        pattern = pattern.replace(word, digits)
    return re.compile(f"(?:{pattern}){end}")


# every name that this project writes into the folder of a run or of a model, at every depth
OF_MODELS = """
    config.json generation_config.json adapter_config.json README.md value_head.safetensors critic.safetensors
    adapter_model.safetensors model.safetensors model-<part>-of-<part>.safetensors
    model.safetensors.index.json
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja vocab.json
    vocab.txt merges.txt tokenizer.model sentencepiece.model sentencepiece.bpe.model spiece.model spm.model
    spm_char.model normalizer.json emoji.json byte_maps.json entity_vocab.json dict.txt
"""
OF_RUNS = """
    run.json run.lock metrics.json metrics.jsonl pass_rates.jsonl failed_inputs.json
"""
MODEL = _tree(OF_MODELS, additional_chat_templates=_tree("default.jinja tool_use.jinja rag.jinja"))
CHECKPOINT = MODEL | _tree("training.safetensors training.json manifest.json manifest.going", best=MODEL)
ASIDE = " ".join(f"checkpoint-<n>.{why} checkpoint-<n>.{why}_<n>" for why in ("unfinished", "torn", "suspect"))
INCIDENT = _tree("incident.json batch.jsonl tensors.safetensors", weights=MODEL)
OURS = MODEL | _tree(
    OF_RUNS,
    **{"best best.new best.new_<n> merged merged.new merged.new_<n>": MODEL},
    **{f"checkpoint-<n> {ASIDE}": CHECKPOINT},
    logs=_tree("events.out.tfevents.<time>.<host>.<n>.<count>"),
    samples=_tree("update-<update>.jsonl rollout-<update>.jsonl"),
    tokens=_tree("update-<update>.jsonl update-<update>.parquet"),
    prompts=_tree("train.jsonl evaluation.jsonl"),
    incidents=_tree("", **{"update-<update>": INCIDENT}),
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


def foreign_files(folder: Path, known: Tree = OURS) -> list[str]:
    """Return the names in a folder, at every depth, that this project does not write. The content of a folder that is
    not ours is not listed."""
    found = []
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        below = [content for form, content in known.items() if form.fullmatch(path.name)]
        if not below or is_folder == (below[0] is None):
            found.append(path.name)
        elif is_folder:
            found += [f"{path.name}/{name}" for name in foreign_files(path, below[0])]
    return found


def remove_replaced(folder: Path) -> list[str]:
    """Remove the old versions of a complete `folder`. Returns a line for each that is not removed, because it holds
    other files or cannot be deleted."""
    kept = []
    for older in replaced_of(folder):
        foreign = foreign_files(older)
        if foreign:
            more = f" and {len(foreign) - MOST_NAMED} more" if len(foreign) > MOST_NAMED else ""
            named = ", ".join(foreign[:MOST_NAMED]) + more
            kept.append(f"the replaced folder {older} was not removed: it contains {named}. Delete it yourself")
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

"""Checkpoints that are complete or absent, and the newest valid one, whatever lies beside it.

A checkpoint is a folder whose manifest names the run, the update, and every file with its size and SHA-256. It is
written under another name, reaches the disk, gets its manifest last, and only then its own name. An older one goes
when the newer one has been read back and is valid, and of it only what its own manifest names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.checkpoints.replacing import free_name
from rlhf.utils import system
from rlhf.utils.errors import RLHFWarning

MANIFEST = "manifest.json"
DELETING = "manifest.going"  # what a manifest is called once its checkpoint is being removed
UNFINISHED = ".unfinished"
SUSPECT = ".suspect"  # from whose weights no optimizer step could be taken
NAME = re.compile(r"checkpoint-([1-9]\d*)")


@dataclass
class CheckpointScan:
    """The checkpoints of a run, sorted by whether they can be used."""

    valid: dict[int, Path] = field(default_factory=dict)  # by update, in rising order
    skipped: list[str] = field(default_factory=list)  # one line for each invalid one: its name and what is wrong
    deleting: list[Path] = field(default_factory=list)  # whose removal was interrupted

    @property
    def newest(self) -> Path | None:
        return self.valid[max(self.valid)] if self.valid else None


def checkpoint_path(folder: Path, update: int) -> Path:
    return folder / f"checkpoint-{update}"


def update_number(name: str) -> int | None:
    """Return the update in a checkpoint folder's name; None if it is not a checkpoint's."""
    named = NAME.fullmatch(name)
    return int(named[1]) if named else None


def write_checkpoint(folder: Path, run: str, update: int, keep: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a folder, make a checkpoint of `run` from it, and of older ones keep `keep` - 1.

    Raises OSError where the disk does not take it, or gives back something else; whatever is raised, older checkpoints
    are as they were, and what was written is removed where that can be. A warning names an old one that cannot
    be removed.
    """
    path = checkpoint_path(folder, update)
    staging = path.with_name(path.name + UNFINISHED)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        write(staging)
        _write_manifest(staging, run, update)
        if path.exists():  # a torn one: that is why its update was done again
            system.replace(path, free_name(path.with_name(path.name + ".torn")))
        system.replace(staging, path)
        system.sync_folder(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    scan = find_checkpoints(folder, run)
    if update not in scan.valid:
        raise OSError(f"read back from the disk, {'; '.join(scan.skipped) or 'it is not there'}")
    try:
        rotate(scan, run, update, keep)
    except OSError as error:  # on Windows, where somebody reads it
        warnings.warn(f"an old checkpoint could not be removed: {error}", RLHFWarning, stacklevel=2)
    return path


def _write_manifest(folder: Path, run: str, update: int) -> None:
    """The manifest, after everything that it names has reached the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        system.sync_file(file)
    named = {f.relative_to(folder).as_posix(): {"size": f.stat().st_size, "sha256": sha256(f)} for f in files}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"run": run, "update": update, "files": named}, indent=2), encoding="utf-8")
    system.sync_file(manifest)
    system.sync_folder(folder)


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- looking ---------------------------------------------------------------------------------------------------------


def validate_checkpoint(path: Path, run: str) -> str | None:
    """Return why a folder is not a valid checkpoint of `run`; None if it is one."""
    manifest = read_manifest(path / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} is missing or torn"
    if manifest["run"] != run:
        return f"{MANIFEST} is of another run"
    if checkpoint_path(path.parent, manifest["update"]) != path:
        return f"{MANIFEST} is of update {manifest['update']}"
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size:,} bytes, not {entry['size']:,}"
        if sha256(file) != entry["sha256"]:
            return f"{name} has changed (its SHA-256 is another)"
    return None


def read_manifest(file: Path) -> dict | None:
    """A manifest with all that belongs into one, at least one file among it, or None."""
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        names = [(name, int(one["size"]), str(one["sha256"])) for name, one in manifest["files"].items()]
        inside = all((file.parent / name).resolve().is_relative_to(file.parent.resolve()) for name, _, _ in names)
        return (
            {**manifest, "update": int(manifest["update"]), "run": str(manifest["run"])} if inside and names else None
        )
    except Exception:  # a damaged file can hold anything: nesting that is too deep, infinite sizes, links in a circle
        return None


def find_checkpoints(folder: Path, run: str) -> CheckpointScan:
    """All checkpoints of `run` in `folder`: the valid ones, and the others with what is wrong."""
    scan = CheckpointScan()
    if not folder.is_dir():
        return scan
    for path in sorted(folder.iterdir(), key=lambda p: (len(p.name), p.name)):
        named = NAME.fullmatch(path.name)
        if named is None or not path.is_dir():
            continue
        fault = validate_checkpoint(path, run)
        if fault is None:
            scan.valid[int(named[1])] = path
        elif (path / DELETING).exists():
            scan.deleting.append(path)
        else:
            scan.skipped.append(f"{path.name}: {fault}")
    return scan


def set_aside(folder: Path, run: str, after: int) -> list[str]:
    """Rename the valid checkpoints of updates later than `after` to `checkpoint-N.suspect`, so that no resume uses
    them; returns their old names."""
    scan = find_checkpoints(folder, run).valid
    suspect = [path for update, path in scan.items() if update > after]
    for path in suspect:
        system.replace(path, free_name(path.with_name(path.name + SUSPECT)))
    return [path.name for path in suspect]


# --- removing --------------------------------------------------------------------------------------------------------


def rotate(scan: CheckpointScan, run: str, newest: int, keep: int) -> None:
    """Remove all but the last `keep` of the valid checkpoints of `run` up to the `newest`, which was just written, and
    finish removals that were interrupted. Invalid checkpoints stay and are ignored; --resume reports what is wrong
    with them."""
    for path in scan.deleting:
        if (read_manifest(path / DELETING) or {}).get("run") == run:
            _remove(path)
    for update in sorted(n for n in scan.valid if n <= newest)[:-keep]:
        path = scan.valid[update]
        system.replace(path / MANIFEST, path / DELETING)
        _remove(path)


def _remove(path: Path) -> None:
    """The files that the manifest of a checkpoint names, and the folders where nothing else lies in them."""
    named = read_manifest(path / DELETING)["files"]
    for name in (*named, DELETING):
        (path / name).unlink(missing_ok=True)
    folders = {parent for name in named for parent in (path / name).parents if parent.is_relative_to(path)}
    for inner in sorted(folders | {path}, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):  # somebody else's files are in it
            inner.rmdir()

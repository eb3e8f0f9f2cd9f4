"""Checkpoints that are complete or absent, and the newest sound one, whatever lies beside it.

A checkpoint is a folder whose manifest names the run, the update, and every file with its size and SHA-256. It is
written under another name, reaches the disk, gets its manifest last, and only then its own name. An older one goes
when the newer one has been read back and found sound, and of it only what its own manifest names.
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
    """What a look through a run's checkpoints has found."""

    valid: dict[int, Path] = field(default_factory=dict)  # by update, rising
    skipped: list[str] = field(default_factory=list)  # a line each: which one, and what is wrong with it
    deleting: list[Path] = field(default_factory=list)  # whose removal was interrupted

    @property
    def newest(self) -> Path | None:
        return self.sound[max(self.sound)] if self.sound else None


def checkpoint_path(folder: Path, update: int) -> Path:
    return folder / f"checkpoint-{update}"


def update_number(name: str) -> int | None:
    """From a folder's name; None where it is not a checkpoint's."""
    named = NAME.fullmatch(name)
    return int(named[1]) if named else None


def write_checkpoint(folder: Path, run: str, update: int, keep: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a folder, make a checkpoint of `run` from it, and of older ones keep `keep` - 1.

    Raises OSError where the disk does not take it, or gives back something else; whatever is raised, older checkpoints
    are as they were, and what was written is removed where that can be. A warning names an old one that cannot
    be removed.
    """
    place = checkpoint_path(folder, update)
    staging = place.with_name(place.name + UNFINISHED)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        write(staging)
        _write_manifest(staging, run, update)
        if place.exists():  # a torn one: that is why its update was done again
            system.replace(place, free_name(place.with_name(place.name + ".torn")))
        system.replace(staging, place)
        system.sync_folder(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    found = find_checkpoints(folder, run)
    if update not in found.sound:
        raise OSError(f"read back from the disk, {'; '.join(found.skipped) or 'it is not there'}")
    try:
        rotate(found, run, update, keep)
    except OSError as error:  # on Windows, where somebody reads it
        warnings.warn(f"an old checkpoint could not be removed: {error}", RLHFWarning, stacklevel=2)
    return place


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


def validate_checkpoint(place: Path, run: str) -> str | None:
    """In words, why a folder is not a sound checkpoint of `run`; None where it is one."""
    manifest = read_manifest(place / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} is missing or torn"
    if manifest["run"] != run:
        return f"{MANIFEST} is of another run"
    if checkpoint_path(place.parent, manifest["update"]) != place:
        return f"{MANIFEST} is of update {manifest['update']}"
    for name, said in manifest["files"].items():
        file = place / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != said["size"]:
            return f"{name} has {file.stat().st_size:,} bytes, not {said['size']:,}"
        if sha256(file) != said["sha256"]:
            return f"{name} has changed (its SHA-256 is another)"
    return None


def read_manifest(file: Path) -> dict | None:
    """A manifest with all that belongs into one, at least one file among it, or None."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        names = [(name, int(one["size"]), str(one["sha256"])) for name, one in said["files"].items()]
        inside = all((file.parent / name).resolve().is_relative_to(file.parent.resolve()) for name, _, _ in names)
        return {**said, "update": int(said["update"]), "run": str(said["run"])} if inside and names else None
    except Exception:  # a damaged file can hold anything: nesting that is too deep, infinite sizes, links in a circle
        return None


def find_checkpoints(folder: Path, run: str) -> CheckpointScan:
    """All sound checkpoints of `run` in `folder`, and what else looks like one, with its fault."""
    found = CheckpointScan()
    if not folder.is_dir():
        return found
    for place in sorted(folder.iterdir(), key=lambda p: (len(p.name), p.name)):
        named = NAME.fullmatch(place.name)
        if named is None or not place.is_dir():
            continue
        fault = validate_checkpoint(place, run)
        if fault is None:
            found.sound[int(named[1])] = place
        elif (place / DELETING).exists():
            found.deleting.append(place)
        else:
            found.skipped.append(f"{place.name}: {fault}")
    return found


def set_aside(folder: Path, run: str, after: int) -> list[str]:
    """Rename the valid checkpoints of updates later than `after` to `checkpoint-N.suspect`, so that no resume uses
    them; returns their old names."""
    found = find_checkpoints(folder, run).sound
    suspect = [place for update, place in found.items() if update > after]
    for place in suspect:
        system.replace(place, free_name(place.with_name(place.name + SUSPECT)))
    return [place.name for place in suspect]


# --- removing --------------------------------------------------------------------------------------------------------


def rotate(found: CheckpointScan, run: str, newest: int, keep: int) -> None:
    """Of the sound checkpoints of `run` up to the `newest`, just written, remove all but the last `keep`; and bring to
    an end what an earlier removal was interrupted at. One that is not sound stays: it counts for nothing, and says on
    --resume what is wrong with it."""
    for place in found.deleting:
        if (read_manifest(place / DELETING) or {}).get("run") == run:
            _remove(place)
    for update in sorted(n for n in found.sound if n <= newest)[:-keep]:
        place = found.sound[update]
        system.replace(place / MANIFEST, place / DELETING)
        _remove(place)


def _remove(place: Path) -> None:
    """The files that the manifest of a checkpoint names, and the folders where nothing else lies in them."""
    named = read_manifest(place / DELETING)["files"]
    for name in (*named, DELETING):
        (place / name).unlink(missing_ok=True)
    folders = {parent for name in named for parent in (place / name).parents if parent.is_relative_to(place)}
    for inner in sorted(folders | {place}, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):  # somebody else's files are in it
            inner.rmdir()

"""Writes, validates and removes checkpoints. An interrupted write never leaves a valid checkpoint.

A checkpoint is a folder with a manifest that lists the run, the update, and every file with its size and SHA-256. It
is written under a temporary name, the manifest last, synced to disk and renamed. Then older checkpoints are removed.
Only files in their manifests are removed. A process reads each file once for its hash: when it saves the file, or when
it looks for checkpoints that another process has saved.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.utils import system
from rlhf.utils.errors import RLHFWarning
from rlhf.utils.files import make_folder, numbered_name, rename_synced, sha256_once, staged

MANIFEST = "manifest.json"
DELETING = "manifest.going"  # name of the manifest while its checkpoint is being removed
SUSPECT = ".suspect"  # suffix of checkpoints from whose weights no optimizer step succeeded
NAME = re.compile(r"checkpoint-([1-9]\d*)")


@dataclass
class CheckpointScan:
    """The checkpoints of a run, sorted by whether they can be used."""

    valid: dict[int, Path] = field(default_factory=dict)  # update -> folder, in ascending order
    skipped: list[str] = field(default_factory=list)  # one line per invalid checkpoint: name and problem
    deleting: list[Path] = field(default_factory=list)  # checkpoints whose removal was interrupted
    forbidden: PermissionError | None = None  # that of reading a checkpoint after the last valid one

    @property
    def newest(self) -> Path | None:
        return self.valid[max(self.valid)] if self.valid else None


def checkpoint_path(folder: Path, update: int) -> Path:
    return folder / f"checkpoint-{update}"


def update_number(name: str) -> int | None:
    """Return the update in a checkpoint folder's name; None for other names."""
    named = NAME.fullmatch(name)
    return int(named[1]) if named else None


def write_checkpoint(folder: Path, run: str, update: int, keep: int, write: Callable[[Path], None]) -> Path:
    """Write a checkpoint, and remove all but the newest `keep` valid checkpoints of the run.

    Raises OSError if writing fails, or if the folder is not complete afterwards. On any error older checkpoints are
    unchanged, and the partial checkpoint is removed if possible. Warns if an old checkpoint cannot be removed.

    Args:
        folder: the run folder.
        run: id of the run.
        update: number of the update.
        keep: number of checkpoints to keep, including this one.
        write: writes the content of the checkpoint into a folder.
    """
    path = checkpoint_path(folder, update)
    with staged(path) as staging:
        make_folder(staging)
        write(staging)
        _write_manifest(staging, run, update)
        rename_synced(staging, path)  # moves an invalid checkpoint of this update aside, which was trained again
    scan = find_checkpoints(folder, run)
    if update not in scan.valid:
        problems = "; ".join(scan.skipped) or "the folder is missing"
        raise OSError(errno.EIO, f"validation after writing failed: {problems}", str(path))
    try:
        rotate(scan, run, update, keep)
    except OSError as error:  # on Windows, if another process reads it
        warnings.warn(f"an old checkpoint could not be removed: {error}", RLHFWarning, stacklevel=2)
    return path


def _write_manifest(folder: Path, run: str, update: int) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {
        file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": sha256_once(file, saved=True)}
        for file in files
    }
    content = json.dumps({"run": run, "update": update, "files": named}, indent=2)
    (folder / MANIFEST).write_text(content, encoding="utf-8")


# --- validating ------------------------------------------------------------------------------------------------------


def validate_checkpoint(path: Path, run: str) -> str | None:
    """Return why a folder is not a valid checkpoint of `run`; None if it is one."""
    manifest = read_manifest(path / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} is missing or corrupted"
    if manifest["run"] != run:
        return f"{MANIFEST} belongs to another run"
    if checkpoint_path(path.parent, manifest["update"]) != path:
        return f"{MANIFEST} belongs to update {manifest['update']}"
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size:,} bytes instead of {entry['size']:,}"
        if sha256_once(file, saved=True) != entry["sha256"]:
            return f"{name} has changed (its SHA-256 differs)"
    return None


def read_manifest(file: Path) -> dict | None:
    """Return a manifest with run, update and at least one file, all inside its folder; None if it is not valid. Raises
    PermissionError."""
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        names = [(name, int(one["size"]), str(one["sha256"])) for name, one in manifest["files"].items()]
        inside = all((file.parent / name).resolve().is_relative_to(file.parent.resolve()) for name, _, _ in names)
        return (
            {**manifest, "update": int(manifest["update"]), "run": str(manifest["run"])} if inside and names else None
        )
    except PermissionError:
        raise
    except Exception:  # a corrupted file can hold anything: deep nesting, infinite sizes, circular links
        return None


def find_checkpoints(folder: Path, run: str) -> CheckpointScan:
    """Return the checkpoints of `run` in `folder`: the valid ones, and the others with their problems."""
    scan = CheckpointScan()
    if not folder.is_dir():
        return scan
    for path in sorted(folder.iterdir(), key=lambda p: (len(p.name), p.name)):
        update = update_number(path.name)
        if update is None or not path.is_dir():
            continue
        try:
            problem = validate_checkpoint(path, run)
            deleting = problem is not None and (path / DELETING).exists()
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
            deleting = False
            if isinstance(error, PermissionError):
                scan.forbidden = error
        if problem is None:
            scan.valid[update] = path
            scan.forbidden = None
        elif deleting:
            scan.deleting.append(path)
        else:
            scan.skipped.append(f"{path.name}: {problem}")
    return scan


def set_aside(folder: Path, run: str, after: int) -> list[str]:
    """Rename the valid checkpoints of updates later than `after` to `checkpoint-N.suspect`, so that --resume ignores
    them. Returns their old names."""
    scan = find_checkpoints(folder, run).valid
    suspect = [path for update, path in scan.items() if update > after]
    for path in suspect:
        aside = path.with_name(path.name + SUSPECT)
        system.replace(path, numbered_name(aside) if aside.exists() else aside)
    return [path.name for path in suspect]


# --- removing --------------------------------------------------------------------------------------------------------


def rotate(scan: CheckpointScan, run: str, newest: int, keep: int) -> None:
    """Remove all but the last `keep` valid checkpoints of `run` up to the `newest`, and finish interrupted removals.

    Invalid checkpoints are not removed. --resume ignores them and reports their problems.
    """
    old = [scan.valid[update] for update in sorted(n for n in scan.valid if n <= newest)[:-keep]]
    for path in (*scan.deleting, *old):
        manifest = path / (MANIFEST if path in old else DELETING)
        if (read_manifest(manifest) or {}).get("run") == run:  # the folder of another run may be here since the scan
            system.replace(manifest, path / DELETING)
            _remove(path)


def _remove(path: Path) -> None:
    """Remove the files that a checkpoint's manifest lists, then folders that are empty."""
    named = read_manifest(path / DELETING)["files"]
    for name in (*named, DELETING):
        system.retry_on_windows(lambda file=path / name: file.unlink(missing_ok=True))
    folders = {parent for name in named for parent in (path / name).parents if parent.is_relative_to(path)}
    for inner in sorted(folders | {path}, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):  # it holds other files
            inner.rmdir()

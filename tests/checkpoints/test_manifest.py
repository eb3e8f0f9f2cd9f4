"""Tests that incomplete checkpoints are ignored, that disk errors lose no checkpoint, and that other files stay."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from pathlib import Path

import pytest

from rlhf.checkpoints import manifest as checkpoints
from rlhf.checkpoints.manifest import DELETING, MANIFEST, find_checkpoints, write_checkpoint
from rlhf.utils import files, system
from rlhf.utils.errors import RLHFWarning
from rlhf.utils.paths import NEW

RUN = "a run"
FILES = {"model.safetensors": b"w" * 1000, "training.json": b"{}", "inner/more.json": b"[1, 2]"}


def fill(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def folder(tmp_path) -> Path:
    for update in (10, 20):
        write_checkpoint(tmp_path, RUN, update, 2, fill)
    files._hashes.clear()  # as in the process that resumes the run
    return tmp_path


def updates(folder: Path, run: str = RUN) -> list[int]:
    return sorted(find_checkpoints(folder, run).valid)


def test_only_the_newest_checkpoints_are_kept(folder):
    assert updates(folder) == [10, 20]
    write_checkpoint(folder, RUN, 30, 2, fill)
    assert updates(folder) == [20, 30]
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-20", "checkpoint-30"]
    assert find_checkpoints(folder, RUN).newest.name == "checkpoint-30"


def test_checkpoints_are_ordered_by_update_number(tmp_path):
    for update in (999_999, 1_000_000):
        write_checkpoint(tmp_path, RUN, update, 2, fill)
    assert find_checkpoints(tmp_path, RUN).newest.name == "checkpoint-1000000"


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", [truncate, flip_bit, Path.unlink, empty], ids=["cut", "flip", "no", "0"])
def test_checkpoint_with_a_damaged_file_is_skipped(folder, name, damage):
    damage(folder / "checkpoint-20" / name)
    found = find_checkpoints(folder, RUN)
    assert found.newest == folder / "checkpoint-10"
    assert len(found.skipped) == 1 and found.skipped[0].startswith("checkpoint-20: ") and name in found.skipped[0]


def test_manifest_with_files_outside_the_checkpoint_is_invalid(folder):
    manifest = folder / "checkpoint-20" / MANIFEST
    content = json.loads(manifest.read_text())
    content["files"]["../../precious"] = {"size": 1, "sha256": "0"}
    manifest.write_text(json.dumps(content))
    assert updates(folder) == [10]


def test_files_of_others_are_not_removed(folder):
    """Folders with a similar name, checkpoints of another run, and unknown files in a checkpoint of this run."""
    write_checkpoint(folder, "another run", 5, 9, fill)
    (folder / "update-final").mkdir()
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "mine.txt").write_text("keep me")
    (folder / "checkpoint-10" / "notes.txt").write_text("keep me, too")
    for update in (30, 40, 50):
        write_checkpoint(folder, RUN, update, 2, fill)
    assert updates(folder) == [40, 50] and updates(folder, "another run") == [5]
    assert (folder / "update-final").is_dir()
    assert (folder / "checkpoint-1" / "mine.txt").read_text() == "keep me"
    assert [p.name for p in (folder / "checkpoint-10").iterdir()] == ["notes.txt"]


def test_interrupted_removal_is_completed_by_the_next_save(folder, monkeypatch):
    def killed(place):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints, "_remove", killed)
        write_checkpoint(folder, RUN, 30, 2, fill)
    assert (folder / "checkpoint-10" / DELETING).exists()
    assert updates(folder) == [20, 30] and find_checkpoints(folder, RUN).skipped == []
    write_checkpoint(folder, RUN, 40, 2, fill)
    assert not (folder / "checkpoint-10").exists()


def test_corrupted_checkpoints_do_not_count_as_newer(folder):
    """A run was resumed from checkpoint 10, because 20 and 30 are corrupted. The next saves must keep valid ones."""
    write_checkpoint(folder, RUN, 30, 3, fill)
    truncate(folder / "checkpoint-20" / "training.json")
    truncate(folder / "checkpoint-30" / "training.json")
    write_checkpoint(folder, RUN, 12, 2, fill)
    assert updates(folder) == [10, 12]
    write_checkpoint(folder, RUN, 14, 1, fill)
    assert updates(folder) == [14]


@pytest.mark.parametrize("damage", [truncate, flip_bit])
def test_checkpoints_found_to_be_corrupted_stay_so_without_being_read_again(folder, damage, monkeypatch):
    """As above. A changed bit was found when the run was resumed."""
    write_checkpoint(folder, RUN, 30, 3, fill)
    files._hashes.clear()
    for update in (20, 30):
        damage(folder / f"checkpoint-{update}" / "model.safetensors")
    assert updates(folder) == [10]
    read = []
    original = files.sha256
    monkeypatch.setattr(files, "sha256", lambda file: read.append(file) or original(file))
    write_checkpoint(folder, RUN, 40, 2, fill)
    assert updates(folder) == [10, 40] and len(find_checkpoints(folder, RUN).skipped) == 2
    assert len(read) == len(FILES) and all(NEW in str(file) for file in read), "only the new one, before its rename"


def test_old_checkpoint_that_cannot_be_removed_is_a_warning(folder, monkeypatch):
    """This happens on Windows if another process has a file of the checkpoint open."""

    def refused(place):
        raise PermissionError(errno.EACCES, "used by another process")

    monkeypatch.setattr(checkpoints, "_remove", refused)
    with pytest.warns(RLHFWarning, match="used by another process"):
        assert write_checkpoint(folder, RUN, 30, 2, fill).name == "checkpoint-30"
    assert updates(folder) == [20, 30]


CALLS = (
    (os, "replace"),
    (Path, "mkdir"),
    (Path, "unlink"),
    (Path, "rmdir"),
    (Path, "write_text"),
)


@pytest.mark.filterwarnings("ignore::rlhf.utils.errors.RLHFWarning")
def test_disk_error_at_any_call_loses_no_checkpoint(folder, monkeypatch):
    """Makes each rename, removal and write fail in turn, while a checkpoint is saved and an old one is removed."""
    minimum = 2
    failed_calls = 0
    number = 30
    for owner, name in CALLS:
        for failing_call in range(100):
            calls = []
            original = getattr(owner, name)

            def failing(*args, calls=calls, failing_call=failing_call, original=original, **kwargs):
                calls.append(args)
                if len(calls) == failing_call + 1:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return original(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing)
                with contextlib.suppress(OSError):
                    write_checkpoint(folder, RUN, number, 2, fill)
            if len(calls) <= failing_call:
                break
            failed_calls = failed_calls + 1
            number = number + 1
            assert len(updates(folder)) >= minimum, (name, failing_call)
    assert failed_calls >= 8


def test_rotate_removes_no_checkpoint_of_a_run_that_has_come_to_the_path(folder):
    """The run's folder is moved after its checkpoints were found, and another run's folder gets its path."""
    scan = find_checkpoints(folder, RUN)
    folder.rename(folder.with_name(f"{folder.name}_moved"))
    for update in (10, 20):
        write_checkpoint(folder, "another run", update, 2, fill)
    checkpoints.rotate(scan, RUN, newest=20, keep=1)
    assert list(find_checkpoints(folder, "another run").valid) == [10, 20]


def test_corrupted_checkpoint_of_the_same_update_is_replaced(folder):
    truncate(folder / "checkpoint-20" / "training.json")
    write_checkpoint(folder, RUN, 20, 2, fill)
    assert updates(folder) == [10, 20]
    assert (folder / "checkpoint-20_1").is_dir(), "the corrupted checkpoint is kept for inspection"


@pytest.mark.parametrize("name", ["sync_file", "sync_folder"])
def test_disk_error_at_any_sync_loses_no_checkpoint(folder, monkeypatch, name):
    count = 0
    original = getattr(system, name)
    while True:
        calls = []

        def failing(path, calls=calls, failing_call=count):
            calls.append(path)
            if len(calls) == failing_call + 1:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            original(path)

        with monkeypatch.context() as patch:
            patch.setattr(system, name, failing)
            try:
                write_checkpoint(folder, RUN, 30 + count, 2, fill)
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                break
        assert len(updates(folder)) >= 2
        assert not list(folder.glob(f"*{NEW}*"))
        count += 1
    assert count >= (4 if name == "sync_file" else 2), "every sync must have failed once"


@pytest.mark.parametrize("damage", [truncate, Path.unlink, empty])
def test_checkpoint_is_complete_after_writing(folder, monkeypatch, user_error, damage):
    """The disk loses a byte or a file after the sync. The save fails immediately, and the old checkpoints are kept."""
    original = checkpoints.rename_synced

    def rename_synced(staging, path):
        original(staging, path)
        damage(path / "model.safetensors")

    monkeypatch.setattr(checkpoints, "rename_synced", rename_synced)
    with user_error("checkpoint-30: ", "model.safetensors", kind=OSError):
        write_checkpoint(folder, RUN, 30, 2, fill)
    assert updates(folder) == [10, 20]


def test_a_link_or_another_name_of_a_saved_file_is_not_read_again(tmp_path, monkeypatch):
    """A changed file is, also if it has the same size."""
    read = []
    original = files.sha256
    monkeypatch.setattr(files, "sha256", lambda file: read.append(file.name) or original(file))
    file = tmp_path / "weights"
    moved = tmp_path / "moved"
    link = tmp_path / "link"
    file.write_bytes(b"1" * 9)
    first = files.sha256_once(file, saved=True)
    os.link(file, link)
    file.rename(moved)
    moved.chmod(0o600)
    assert files.sha256_once(link, saved=True) == files.sha256_once(moved, saved=True) == first
    link.unlink()
    assert files.sha256_once(moved, saved=True) == first and read == ["weights"]
    time.sleep(0.02)  # the clock of some file systems has steps of 10 ms
    moved.write_bytes(b"2" * 9)
    assert files.sha256_once(moved, saved=True) != first and read == ["weights", "moved"]


def test_folder_that_was_removed_during_a_save_is_a_missing_folder(folder, monkeypatch):
    """A disk that was unmounted, or a folder that was moved: the content was written, and is elsewhere."""
    monkeypatch.setattr(checkpoints.system, "sync_folder", lambda path: None)
    original = checkpoints.system.replace

    def replace(source, target):
        original(source, target)
        folder.rename(folder.with_name("elsewhere"))

    monkeypatch.setattr(checkpoints.system, "replace", replace)
    with pytest.raises(OSError, match="missing") as raised:
        write_checkpoint(folder, RUN, 30, 2, fill)
    assert "checkpoint-30" in raised.value.filename


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_checkpoint_that_cannot_be_read_is_skipped_with_the_reason(folder, monkeypatch, number):
    """Also while the checkpoint after it is saved. One of another user is listed."""
    original = Path.read_text

    def read_text(self, *more, **named):
        if self.parent.name == "checkpoint-20":
            raise OSError(number, os.strerror(number), str(self))
        return original(self, *more, **named)

    monkeypatch.setattr(Path, "read_text", read_text)
    found = find_checkpoints(folder, RUN)
    assert list(found.valid) == [10] and found.skipped[0].startswith("checkpoint-20")
    assert isinstance(found.forbidden, PermissionError) == (number == errno.EACCES)
    write_checkpoint(folder, RUN, 30, 2, fill)
    assert updates(folder) == [10, 30]


def test_missing_folder_has_no_checkpoints(tmp_path):
    assert find_checkpoints(tmp_path / "nowhere", RUN).newest is None

"""Checkpoints: complete or absent, whatever is broken, and nobody else's files are touched."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest

from rlhf.checkpoints import manifest as checkpoints
from rlhf.checkpoints.manifest import DELETING, MANIFEST, find_checkpoints, write_checkpoint
from rlhf.utils import system
from rlhf.utils.errors import RLHFWarning

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
    return tmp_path


def updates(folder: Path, run: str = RUN) -> list[int]:
    return sorted(find_checkpoints(folder, run).valid)


def test_the_newest_ones_are_kept(folder):
    assert updates(folder) == [10, 20]
    write_checkpoint(folder, RUN, 30, 2, fill)
    assert updates(folder) == [20, 30]
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-20", "checkpoint-30"]
    assert find_checkpoints(folder, RUN).newest.name == "checkpoint-30"


def test_updates_are_ordered_as_numbers(tmp_path):
    for update in (999_999, 1_000_000):
        write_checkpoint(tmp_path, RUN, update, 2, fill)
    assert find_checkpoints(tmp_path, RUN).newest.name == "checkpoint-1000000"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize(
    "harm", [cut, flip, Path.unlink, lambda f: f.write_bytes(b"")], ids=["cut", "flip", "no", "0"]
)
def test_a_harmed_file_is_named_and_its_checkpoint_skipped(folder, name, harm):
    harm(folder / "checkpoint-20" / name)
    found = find_checkpoints(folder, RUN)
    assert found.newest == folder / "checkpoint-10"
    assert len(found.skipped) == 1 and found.skipped[0].startswith("checkpoint-20: ") and name in found.skipped[0]


def test_a_manifest_that_names_files_outside_is_none(folder):
    manifest = folder / "checkpoint-20" / MANIFEST
    facts = json.loads(manifest.read_text())
    facts["files"]["../../precious"] = {"size": 1, "sha256": "0"}
    manifest.write_text(json.dumps(facts))
    assert updates(folder) == [10]


def test_others_files_stay(folder):
    """Folders of a like name, another run's checkpoints, and strange files in one of ours."""
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


def test_a_removal_that_was_interrupted_is_brought_to_its_end(folder, monkeypatch):
    def killed(place):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints, "_remove", killed)
        write_checkpoint(folder, RUN, 30, 2, fill)
    assert (folder / "checkpoint-10" / DELETING).exists()
    assert updates(folder) == [20, 30] and find_checkpoints(folder, RUN).skipped == []
    write_checkpoint(folder, RUN, 40, 2, fill)
    assert not (folder / "checkpoint-10").exists()


def test_what_is_torn_is_not_counted_and_what_was_written_stays(folder):
    """A run that went on from 10 because 20 and 30 are torn: their numbers are higher, and worth nothing."""
    write_checkpoint(folder, RUN, 30, 3, fill)
    cut(folder / "checkpoint-20" / "training.json")
    cut(folder / "checkpoint-30" / "training.json")
    write_checkpoint(folder, RUN, 12, 2, fill)
    assert updates(folder) == [10, 12]
    write_checkpoint(folder, RUN, 14, 1, fill)
    assert updates(folder) == [14]


def test_an_old_one_that_cannot_be_removed_is_a_warning(folder, monkeypatch):
    """As on Windows, where somebody reads it."""

    def refused(place):
        raise PermissionError(errno.EACCES, "used by another process")

    monkeypatch.setattr(checkpoints, "_remove", refused)
    with pytest.warns(RLHFWarning, match="an old checkpoint could not be removed"):
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
def test_a_disk_that_fails_at_any_call_costs_nothing(folder, monkeypatch):
    """Every rename, removal and write of a save and of its rotation made to fail in turn."""
    before, tried, number = 2, 0, 30
    for owner, name in CALLS:
        for at in range(100):
            calls, really = [], getattr(owner, name)

            def failing(*given, calls=calls, at=at, really=really, **named):
                calls.append(given)
                if len(calls) == at + 1:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return really(*given, **named)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing)
                with contextlib.suppress(OSError):
                    write_checkpoint(folder, RUN, number, 2, fill)
            if len(calls) <= at:
                break
            tried, number = tried + 1, number + 1
            assert len(updates(folder)) >= before, (name, at)
    assert tried >= 8


def test_a_torn_checkpoint_makes_way_for_the_same_update(folder):
    cut(folder / "checkpoint-20" / "training.json")
    write_checkpoint(folder, RUN, 20, 2, fill)
    assert updates(folder) == [10, 20]
    assert (folder / "checkpoint-20.torn").is_dir(), "kept, for whoever wants to know"


@pytest.mark.parametrize("name", ["sync_file", "sync_folder"])
def test_a_disk_that_fails_at_any_sync_costs_nothing(folder, monkeypatch, name):
    count, really = 0, getattr(system, name)
    while True:
        calls = []

        def failing(path, calls=calls, at=count):
            calls.append(path)
            if len(calls) == at + 1:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            really(path)

        with monkeypatch.context() as patch:
            patch.setattr(system, name, failing)
            try:
                write_checkpoint(folder, RUN, 30 + count, 2, fill)
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                break
        assert len(updates(folder)) >= 2
        assert not list(folder.glob("*.unfinished"))
        count += 1
    assert count >= (4 if name == "sync_file" else 2), "every sync failed once"


def test_what_the_disk_gives_back_is_read(folder, monkeypatch):
    """A disk that swallows a byte after all was synchronised: said at once, and the old checkpoints stay."""
    really = checkpoints.sha256
    monkeypatch.setattr(checkpoints, "sha256", lambda file: really(file) if "unfinished" in str(file) else "0")
    with pytest.raises(OSError, match="validation after writing failed"):
        write_checkpoint(folder, RUN, 30, 2, fill)
    monkeypatch.undo()
    assert updates(folder)[:2] == [10, 20]


def test_a_folder_that_is_not_there_has_none(tmp_path):
    assert find_checkpoints(tmp_path / "nowhere", RUN).newest is None

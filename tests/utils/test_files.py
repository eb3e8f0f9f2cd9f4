"""Tests of writing files: two processes never share a temporary name, and a failed write leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.checkpoints.manifest import write_checkpoint
from rlhf.checkpoints.run_folder import RunLock
from rlhf.utils import system
from rlhf.utils.files import atomic_write, update_dir_atomically, write_json
from rlhf.utils.paths import NEW
from tests.scripts.test_scripts import ROOT

WRITER = """
import json, sys
from pathlib import Path
from rlhf.utils.files import write_json
file = Path(sys.argv[1])
for number in range(150):
    write_json(file, {"number": number, "filled": "x" * 10_000})
    json.loads(file.read_text(encoding="utf-8"))
"""


def test_two_processes_write_one_file(tmp_path):
    file = tmp_path / "report.json"
    words = [sys.executable, "-c", WRITER, str(file)]
    writers = [subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [writer.communicate(timeout=300)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], errors
    assert json.loads(file.read_text())["number"] == 149
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def fail_later(staging: Path) -> None:
    """Write half of the content, then raise."""
    if staging.name.startswith("one.json"):
        staging.write_text("half")
    else:
        staging.mkdir(exist_ok=True)
        (staging / "weights").write_text("half")
    raise OSError(28, "No space left on device", str(staging))


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("kind", ["file", "folder", "checkpoint"])
def test_a_failed_write_removes_what_it_wrote(tmp_path, kind, exists):
    if exists:
        write_json(tmp_path / "one.json", "old")
        (tmp_path / "best").mkdir()
        (tmp_path / "best" / "weights").write_text("old")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(OSError, match="No space left"):
        if kind == "file":
            atomic_write(tmp_path / "one.json", fail_later)
        elif kind == "folder":
            update_dir_atomically(tmp_path / "best", fail_later)
        else:
            write_checkpoint(tmp_path, "a run", 1, 2, fail_later)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.rglob(f"*{NEW}*"))


@pytest.mark.parametrize("kind", ["file", "folder", "checkpoint"])
def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch, kind):
    """Also that of folders inside: after a power failure, a name without its content would be a damaged model."""
    events = []

    def names(path: Path) -> list[str]:
        return sorted(str(inside.relative_to(path)) for inside in (path, *path.rglob("*")))

    def write(staging: Path) -> None:
        if kind == "file":
            staging.write_text("new")
        else:
            (staging / "best").mkdir(parents=True)
            (staging / "best" / "weights").write_text("new")

    original = system.replace
    for name in ("sync_file", "sync_folder"):
        monkeypatch.setattr(system, name, events.append)
    monkeypatch.setattr(system, "replace", lambda old, new: events.append((old, names(old))) or original(old, new))
    if kind == "file":
        atomic_write(tmp_path / "one.json", write)
    elif kind == "folder":
        update_dir_atomically(tmp_path / "saved", write)
    else:
        write_checkpoint(tmp_path, "a run", 1, 2, write)
    ((staging, content),) = [event for event in events if isinstance(event, tuple)]
    before = events[: events.index((staging, content))]
    assert sorted({str(path.relative_to(staging)) for path in before}) == content
    assert len(content) == {"file": 1, "folder": 3, "checkpoint": 4}[kind]
    assert events[-1] == tmp_path, "the new name is on the disk, too"


LEFT = [
    "run.json",
    "metrics.jsonl",
    "checkpoint-7",
    "best",
    "merged",
    "files",
    "best/files",
    "tokens/update-000001.jsonl",
]
KEPT = ["run.json.new-1234567", "checkpoint-7.new-york", "mine.new-12345678", "comparison/files.new-12345678"]


def test_the_next_owner_of_a_folder_removes_what_killed_processes_were_writing(tmp_path):
    """Names of other programs and of the user stay."""
    for name in [*(f"{name}{NEW}0a1b2c3d" for name in LEFT), *KEPT]:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights").write_text("half")
    with RunLock(tmp_path):
        left = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("weights")}
    assert left == set(KEPT)

"""Tests of the output folders of evaluate_generations.py and compare_runs.py: after an early error no folder is left,
and if the folder is moved away, nothing is written at its path. Also of the two files of a plot."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import compare_runs
import evaluate_generations
import plot_training_progress
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.checkpoints.run_folder import LOCK_FILE, FolderMoved, RunLock
from rlhf.rollout.sampler import Sampler
from rlhf.utils import system
from tests.run.test_own_folder import before_call


@pytest.fixture(params=[evaluate_generations, compare_runs])
def report(request, runs, tmp_path):
    """Return a function that makes a small report of a run in tmp_path/new/report."""
    words = ["--model-path"] if request.param is evaluate_generations else []
    words += [str(runs["ppo", 1]), "--num-prompts", "2", "--output", str(tmp_path / "new" / "report")]
    return lambda *more: request.param.main([*words, *more])


def test_after_an_early_error_the_new_folder_is_removed(report, tmp_path, user_error):
    with user_error("no_such_folder", "--judge-model"):
        report("--judge-model", "./no_such_folder")
    assert not list(tmp_path.iterdir())


def test_after_an_early_error_an_older_folder_stays(report, tmp_path, user_error):
    folder = tmp_path / "new" / "report"
    folder.parent.mkdir()
    with user_error("no_such_folder"):
        report("--judge-model", "./no_such_folder")
    assert list(tmp_path.rglob("*")) == [folder.parent]
    folder.mkdir()
    with user_error("no_such_folder"):
        report("--judge-model", "./no_such_folder")
    assert folder.is_dir()


@pytest.mark.skipif(system.WINDOWS, reason="Windows does not rename a folder with open files")
@pytest.mark.parametrize(
    "copied", [True, pytest.param(False, marks=pytest.mark.ci)], ids=["another folder", "no folder"]
)
def test_a_report_is_not_written_into_another_folder(report, tmp_path, monkeypatch, copied):
    folder = tmp_path / "new" / "report"

    def take_over() -> None:
        folder.rename(tmp_path / "moved")
        if copied:
            folder.mkdir()
            (folder / LOCK_FILE).write_text("PID 1\n")

    before_call(monkeypatch, ModelEvaluator, "evaluate", take_over)
    with pytest.raises(FolderMoved, match=str(folder)) as moved:
        report()
    assert "--resume" not in str(moved.value)
    assert [path.name for path in folder.parent.rglob("*")] == (["report", LOCK_FILE] if copied else [])


@pytest.mark.skipif(system.WINDOWS, reason="Windows does not rename a folder with open files")
def test_samples_of_the_start_model_are_not_written_into_another_folder(runs, tmp_path, monkeypatch):
    folder = tmp_path / "report"
    before_call(monkeypatch, Sampler, "sample", lambda: folder.rename(tmp_path / "moved"))
    words = [str(runs["ppo", 1]), "--arm", "best-of-2", "--num-prompts", "2", "--output", str(folder)]
    with pytest.raises(FolderMoved, match=str(folder)):
        compare_runs.main(words)
    assert not folder.exists() and [path.name for path in (tmp_path / "moved").iterdir()] == [LOCK_FILE]


def test_a_lock_removes_only_an_empty_folder_that_it_created(tmp_path):
    def made(folder: Path, name: str = "") -> bool:
        with RunLock(folder):
            if name:
                (folder / name).touch()
        return folder.exists()

    assert not made(tmp_path / "a" / "b") and not (tmp_path / "a").exists()
    assert made(tmp_path / "c", "a file")
    (tmp_path / "d").mkdir()
    assert made(tmp_path / "d")


def test_a_plot_that_cannot_be_written_leaves_the_older_picture_and_table(runs, tmp_path, monkeypatch):
    """Not a new picture beside an old table."""
    output = ["--output", str(tmp_path / "plot")]
    plot_training_progress.main([str(runs["ppo", 1]), *output])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    original = Path.write_bytes

    def full(self, content):
        if ".csv" in self.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space") as error:
        plot_training_progress.main([str(runs["grpo", 1]), *output])
    assert str(tmp_path / "plot.csv") in error.value.filename
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

"""Who may write where, and what run.json says."""

from __future__ import annotations

import json
import os

import pytest

from rlhf.errors import UserError
from rlhf.runlogs import RunLog, check_output, claim_output, read_status


def finished(folder) -> None:
    folder.mkdir()
    with RunLog(folder, seed=1):
        pass


def test_a_finished_run_in_the_default_folder_is_moved_aside(tmp_path):
    folder = tmp_path / "ppo_training_output"
    for n in (1, 2):
        finished(folder) if not folder.exists() else None
        line = claim_output(folder, overwrite=False, is_default=True)
        assert line == f"moved the finished run in {folder} to {folder}_{n}"
        with RunLog(folder, seed=n):
            pass
    assert json.loads((tmp_path / "ppo_training_output_2" / "run.json").read_text())["seed"] == 1
    assert json.loads((folder / "run.json").read_text())["seed"] == 2


def test_a_finished_run_in_a_named_folder_is_refused(tmp_path):
    finished(tmp_path / "mine")
    with pytest.raises(UserError, match=r"a finished run is there: --output .*mine. Add --overwrite"):
        claim_output(tmp_path / "mine", overwrite=False, is_default=False)


@pytest.mark.parametrize("is_default", [True, False])
def test_an_unfinished_run_is_refused(tmp_path, is_default):
    folder = tmp_path / "run"
    folder.mkdir()
    RunLog(folder, seed=1)
    with pytest.raises(UserError, match="an unfinished run is there.*--overwrite.*--output"):
        check_output(folder, overwrite=False, is_default=is_default)
    assert "removed" in claim_output(folder, overwrite=True, is_default=is_default)
    assert list(folder.iterdir()) == []


def test_a_folder_of_something_else_is_never_deleted(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (True, False):
        with pytest.raises(UserError, match="holds files of something else"):
            claim_output(tmp_path, overwrite=overwrite, is_default=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="cannot be a folder"):
        check_output(tmp_path / "run", overwrite=True, is_default=True)


def test_a_read_only_place_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere: the refusal is injected
    with pytest.raises(UserError, match="cannot write there"):
        check_output(tmp_path / "a" / "run", overwrite=False, is_default=True)


def test_run_json_says_how_it_ended(tmp_path):
    log = RunLog(tmp_path, seed=3)
    assert read_status(tmp_path) == "running"
    with pytest.raises(RuntimeError), log:
        raise RuntimeError("card fell out")
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["status"], data["reason"]) == ("failed", "RuntimeError: card fell out")
    assert data["versions"]["trl"] == "1.12.0"
    assert {"python", "platform", "command", "commit", "started", "ended"} <= set(data)

"""Who may write where, and what run.json says."""

from __future__ import annotations

import json
import os

import pytest

from rlhf.checkpoints.run_folder import LOCK_FILE, check_output, claim_output, move_aside, read_status
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.run_record import RunRecord
from rlhf.utils.errors import UserError
from rlhf.utils.system import WINDOWS
from tests.records import facts_of


def finished(folder) -> None:
    folder.mkdir()
    with RunLog(folder, **facts_of(seed=1)):
        pass


def test_a_finished_run_in_the_default_folder_is_moved_aside(tmp_path):
    folder = tmp_path / "ppo_training_output"
    for n in (1, 2):
        finished(folder) if not folder.exists() else None
        held, line = claim_output(folder, overwrite=False, is_default=True)
        assert line == f"moved the finished run in {folder} to {folder}_{n}"
        with RunLog(folder, held, **facts_of(seed=n)):
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
    RunLog(folder, **facts_of(seed=1))._lock.close()  # as when it was killed
    with pytest.raises(UserError, match="an unfinished run is there.*--overwrite.*--output"):
        check_output(folder, overwrite=False, is_default=is_default)
    held, line = claim_output(folder, overwrite=True, is_default=is_default)
    assert f"to {folder}.replaced; it is removed when" in line and [path.name for path in folder.iterdir()] == [
        LOCK_FILE
    ]
    held.close()


def test_whoever_claims_a_folder_has_it(tmp_path):
    """Claiming and opening the log are one: between the two nobody else gets in."""
    held, _ = claim_output(tmp_path / "run", overwrite=True, is_default=False)
    for overwrite in (True, False):
        with pytest.raises(UserError, match="in use by a live run"):
            claim_output(tmp_path / "run", overwrite=overwrite, is_default=True)
    with pytest.raises(UserError, match="in use by a live run"):
        RunLog(tmp_path / "run", **facts_of())
    with RunLog(tmp_path / "run", held, **facts_of()):
        pass
    RunLog(tmp_path / "run", **facts_of())


@pytest.mark.skipif(WINDOWS, reason="Windows has no fork")
def test_of_many_that_claim_at_once_one_gets_it(tmp_path):
    """Processes that wait for one moment; whoever has the folder notes it, and holds on until all have tried."""
    import multiprocessing

    context, rounds, racers = multiprocessing.get_context("fork"), 20, 4
    barrier, owners = context.Barrier(racers), context.Array("i", rounds)

    def race():
        for n in range(rounds):
            barrier.wait()
            try:
                held, _ = claim_output(tmp_path / str(n), overwrite=True, is_default=False)
                log = RunLog(tmp_path / str(n), held, **facts_of())
                with owners.get_lock():
                    owners[n] += 1
            except UserError:
                log = None
            barrier.wait()
            assert log is None or RunRecord.read(tmp_path / str(n)).id == log.record.id

    started = [context.Process(target=race) for _ in range(racers)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        assert process.exitcode == 0
    assert list(owners) == [1] * rounds


def test_what_is_moved_aside_is_whole(tmp_path):
    finished(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    line = move_aside(tmp_path / "run")
    assert line.endswith("run_1") and (tmp_path / "run_1" / "notes.txt").read_text() == "mine"
    assert read_status(tmp_path / "run_1") == "finished" and read_status(tmp_path / "run") is None


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
    log = RunLog(tmp_path, **facts_of(seed=3))
    assert read_status(tmp_path) == "running"
    with pytest.raises(RuntimeError), log:
        raise RuntimeError("card fell out")
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["status"], data["reason"]) == ("failed", "RuntimeError: card fell out")
    assert data["versions"]["trl"] == "1.12.0"
    assert {"python", "platform", "command", "commit", "started", "ended"} <= set(data)

"""Tests of the run folder (which folder a run may use) and of run.json (writing, reading and errors)."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.callbacks.checkpointing import Checkpoints
from rlhf.checkpoints import run_log
from rlhf.checkpoints.run_folder import INPUTS_FILE, LOCK_FILE, check_output, claim_output, read_status, require_unused
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.run_record import FORMAT, Best, Merged, RunRecord, Spent, last_run
from rlhf.config import make_config
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.system import WINDOWS
from tests.records import facts_of, record_of


def finished(folder) -> None:
    folder.mkdir()
    with RunLog(folder, **facts_of(seed=1)):
        pass


def test_finished_run_in_the_default_folder_is_moved(tmp_path):
    folder = tmp_path / "ppo_training_output"
    for n in (1, 2):
        finished(folder) if not folder.exists() else None
        lock, line = claim_output(folder, overwrite=False, is_default=True)
        assert f" {folder} " in line and line.endswith(f" {folder}_{n}")
        with RunLog(folder, lock, **facts_of(seed=n)):
            pass
    assert json.loads((tmp_path / "ppo_training_output_2" / "run.json").read_text())["seed"] == 1
    assert json.loads((folder / "run.json").read_text())["seed"] == 2


def test_finished_run_in_a_given_folder_is_refused(tmp_path, user_error):
    finished(tmp_path / "mine")
    with user_error("--output", "--overwrite"):
        claim_output(tmp_path / "mine", overwrite=False, is_default=False)


@pytest.mark.parametrize("is_default", [True, False])
def test_folder_with_an_unfinished_run_is_refused(tmp_path, is_default, user_error):
    folder = tmp_path / "run"
    folder.mkdir()
    RunLog(folder, **facts_of(seed=1))._lock.close()  # as if the process had been killed
    with user_error("--overwrite", "--output"):
        check_output(folder, overwrite=False, is_default=is_default)
    lock, line = claim_output(folder, overwrite=True, is_default=is_default)
    assert line.endswith(f" to {folder}_1") and [path.name for path in folder.iterdir()] == [LOCK_FILE]
    lock.close()


def test_claimed_folder_is_locked_for_others(tmp_path, user_error):
    """The lock is held from claiming the folder until the log is closed, without a gap. Its file names the process
    before there is a run.json."""
    lock, _ = claim_output(tmp_path / "run", overwrite=True, is_default=False)
    for overwrite in (True, False):
        with user_error(f"(PID {os.getpid()}, started 20"):
            claim_output(tmp_path / "run", overwrite=overwrite, is_default=True)
    with user_error(f"PID {os.getpid()}"):
        RunLog(tmp_path / "run", **facts_of())
    with RunLog(tmp_path / "run", lock, **facts_of()):
        pass
    RunLog(tmp_path / "run", **facts_of())


@pytest.mark.skipif(WINDOWS, reason="Windows has no fork")
def test_only_one_of_several_processes_can_claim_a_folder(tmp_path):
    """Several processes claim the folder at the same time. One gets it and holds the lock until all have tried."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    rounds = 20
    processes = 4
    barrier = context.Barrier(processes)
    owners = context.Array("i", rounds)

    def race():
        for n in range(rounds):
            barrier.wait()
            try:
                lock, _ = claim_output(tmp_path / str(n), overwrite=True, is_default=False)
                log = RunLog(tmp_path / str(n), lock, **facts_of())
                with owners.get_lock():
                    owners[n] += 1
            except UserError:
                log = None
            barrier.wait()
            assert log is None or RunRecord.read(tmp_path / str(n)).id == log.record.id

    workers = [context.Process(target=race) for _ in range(processes)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(60)
        assert process.exitcode == 0
    assert list(owners) == [1] * rounds


def test_moved_run_folder_is_complete(tmp_path):
    finished(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    lock, line = claim_output(tmp_path / "run", overwrite=True, is_default=False)
    lock.close()
    assert line.endswith("run_1") and (tmp_path / "run_1" / "notes.txt").read_text() == "mine"
    assert read_status(tmp_path / "run_1") == "finished" and read_status(tmp_path / "run") is None


def test_folder_that_is_not_a_run_is_never_replaced(tmp_path, user_error):
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (True, False):
        with user_error("run.json"):
            claim_output(tmp_path, overwrite=overwrite, is_default=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_output_that_is_a_file_is_refused(tmp_path, user_error):
    (tmp_path / "run").write_text("")
    with user_error(f"--output {tmp_path / 'run'}"):
        check_output(tmp_path / "run", overwrite=True, is_default=True)


def test_read_only_folder_is_refused(tmp_path, monkeypatch, user_error):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere, so the error is injected
    with user_error("--output"):
        check_output(tmp_path / "a" / "run", overwrite=False, is_default=True)


def test_run_json_contains_status_and_reason(tmp_path):
    log = RunLog(tmp_path, **facts_of(seed=3))
    assert read_status(tmp_path) == "running"
    with pytest.raises(RuntimeError), log:
        raise RuntimeError("test error")
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["status"], data["reason"]) == ("failed", "RuntimeError: test error")
    assert data["versions"]["trl"] == "1.12.0"
    assert {"python", "platform", "command", "commit", "started", "ended"} <= set(data)


# --- reading ---------------------------------------------------------------------------------------------------------

PARTS = {
    "best": Best(2, "the highest score", "score", "nats/sequence", "6 replies", [{"update": 0, "score": 0.5}]),
    "figures": {"score_after": 1.5, "kl_last_10_updates": None},
    "spent": Spent(2, 128, 8, 1024),
    "merged": Merged("best", 2),
    "ended": "2026-01-01T01:00:00.000+00:00",
    "reason": "Stopped: test",
    "sessions": [{"started": "2026-01-01T00:30:00.000+00:00", "pid": 2}],
}


def write_json(folder, content) -> None:
    (folder / "run.json").write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("parts", [{}, PARTS])
def test_run_json_round_trip(tmp_path, parts):
    record = record_of(make_config("demo", "grpo", seed=3), updates=10, **parts)
    record.write(tmp_path)
    read = RunRecord.read(tmp_path)
    assert read.as_json() == json.loads(json.dumps(record.as_json())), "tuples in the settings become lists"
    assert dataclasses.replace(read, settings=record.settings) == record
    assert (read.recipe, read.seed, read.plan.updates, read.plan.episodes) == ("demo", 3, 10, 640)
    assert read.flat_settings["K"] == make_config("demo", "grpo").batch.K and "grpo" not in read.flat_settings


def test_keys_of_run_json(tmp_path):
    """Other programs read these keys. A new name or meaning requires a new format number."""
    start = {"status", "id", "started", "pid", "command", "python", "platform", "versions", "commit"}
    start |= {"algorithm", "settings", "seed", "data", "plan", "prompts", "on_hub"}
    RunLog(tmp_path, **facts_of())
    content = json.loads((tmp_path / "run.json").read_text())
    assert next(iter(content)) == "format" and content["format"] == FORMAT == 4 and set(content) == {"format", *start}
    assert set(content["plan"]) == {"updates", "episodes", "optimizer_steps", "completion_tokens_at_most"}
    complete = record_of(**PARTS).as_json()
    assert set(complete) == {"format", *start, *PARTS} and complete["commit"] is None, (
        "the key is present with the value null"
    )
    assert set(complete["best"]) == {"update", "why", "rule", "kl_unit", "perplexity_text", "evaluations"}
    spent = {"updates", "episodes", "optimizer_steps", "completion_tokens", "resampled_episodes"}
    assert set(complete["spent"]) == spent
    assert complete["merged"] == {"which": "best", "update": 2}


def test_keys_that_a_user_added_are_kept(tmp_path):
    write_json(tmp_path, {**record_of(status="stopped").as_json(), "my_note": {"lr": "too high"}})
    with RunLog(tmp_path, resume=True):
        pass
    content = json.loads((tmp_path / "run.json").read_text())
    assert (
        content["my_note"] == {"lr": "too high"} and content["status"] == "finished" and len(content["sessions"]) == 1
    )


def test_resume_clears_the_end_and_restores_it_if_refused(tmp_path):
    record_of(status="failed", ended="then", reason="RunError: x").write(tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(UserError), RunLog(tmp_path, resume=True) as log:
        assert (log.record.status, log.record.ended, log.record.reason) == ("running", None, None)
        assert not json.loads((tmp_path / "run.json").read_text()).keys() & {"ended", "reason"}
        raise UserError("refused")
    assert (tmp_path / "run.json").read_bytes() == before


def circular() -> list:
    inputs: list = []
    inputs.append(inputs)
    return inputs


@pytest.mark.parametrize("inputs", [{"prompts": ["a"]}, circular()], ids=["full disk", "no JSON"])
def test_inputs_that_cannot_be_saved_hide_no_error(tmp_path, monkeypatch, inputs):
    """The reward function's error is reported, and the status of the run is written."""
    original = run_log.write_json

    def write_json(file, data):
        if file.name == INPUTS_FILE:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(file, data)

    monkeypatch.setattr(run_log, "write_json", write_json)
    with pytest.raises(RunError) as raised, RunLog(tmp_path, **facts_of()):
        raise RunError("the function failed", fix="Fix it", inputs=inputs)
    assert str(raised.value).startswith("the function failed. Fix it; ") and "could not be saved" in str(raised.value)
    assert RunRecord.read(tmp_path).status == "failed" and not (tmp_path / INPUTS_FILE).exists()


def test_record_that_cannot_be_written_hides_no_error(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    record_of(status="failed").write(tmp_path)
    for resume in (False, True):
        more = {} if resume else facts_of()
        log = RunLog(tmp_path, resume=resume, **more)
        monkeypatch.setattr(RunRecord, "write", write)
        with pytest.raises(UserError, match="the first"), log:
            raise UserError("the first")
        monkeypatch.undo()
        RunLog(tmp_path, resume=True)._lock.close()  # the lock is released


OTHER_FORMATS = {"none": None, "older": 3, "newer": 5, "text": "two"}


@pytest.mark.parametrize("found", OTHER_FORMATS.values(), ids=OTHER_FORMATS)
def test_another_format_is_one_error_line(tmp_path, found, user_error):
    content = record_of().as_json()
    content.pop("format")
    write_json(tmp_path, content if found is None else {"format": found, **content})
    for read in (RunRecord.read, lambda folder: RunRecord.require(folder, "--output")):
        with user_error(f"run.json has format {found or 1}, ", f"format 4: {tmp_path}. ") as refused:
            read(tmp_path)
        assert "\n" not in str(refused.value)


def without(name: str):
    return lambda content: {key: value for key, value in content.items() if key != name}


DAMAGED = {  # name: (change to run.json, expected text in the error)
    "cut off": (lambda content: json.dumps(content)[:-20], "corrupted: "),
    "a list": (lambda content: [content], "corrupted: "),
    "nested deep": (lambda content: "[" * 200_000, "corrupted: "),
    "not UTF-8": (lambda content: "\udcff", "corrupted: "),
    "no id": (without("id"), "'id' is missing or invalid"),
    "no plan": (without("plan"), "'plan' is missing or invalid"),
    "no data": (without("data"), "'data' is missing or invalid"),
    "a plan without episodes": (
        lambda content: {**content, "plan": {"updates": 2}},
        "'plan.episodes' is missing or invalid",
    ),
    "a seed that is not a number": (lambda content: {**content, "seed": "one"}, "'seed' is missing or invalid"),
    "best is a list": (lambda content: {**content, "best": []}, "'best' is missing or invalid"),
    "best without an update": (
        lambda content: {**content, "best": {"why": "so"}},
        "'best.update' is missing or invalid",
    ),
    "settings are a list": (lambda content: {**content, "settings": []}, "'settings' is missing or invalid"),
    "no recipe": (lambda content: {**content, "settings": {"run": {}}}, "'settings.recipe' is missing or invalid"),
    "run.json of a reward model": (lambda content: {"status": "finished", "python": "3.12"}, "not a training run: "),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_one_error_line(tmp_path, damage):
    change, expected = DAMAGED[damage]
    changed = change(record_of().as_json())
    text = changed if isinstance(changed, str) else json.dumps(changed)
    (tmp_path / "run.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as refused:
        RunRecord.read(tmp_path)
    line = str(refused.value)
    assert line.startswith("run.json ") and expected in line and str(tmp_path) in line and "\n" not in line


def test_folder_without_a_run_is_refused(tmp_path, monkeypatch, user_error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert RunRecord.read(Path("empty")) is None and RunRecord.read(Path("nowhere")) is None
    with user_error("--output nowhere", "--output RUN_FOLDER"):
        RunRecord.require(Path("nowhere"), "--output")
    finished(Path("mine"))
    with user_error("run.json", "--output empty"):
        RunRecord.require(Path("empty"), "--output")


def test_last_run_is_the_run_started_last_in_any_format(tmp_path, monkeypatch, user_error):
    """If the last run cannot be read, no other run is used instead. Reward models and damaged files are ignored."""
    monkeypatch.chdir(tmp_path)
    with user_error("--model-path"):
        last_run("--model-path")
    older = record_of(started="2026-01-01")
    newer = record_of(started="2026-01-02").as_json()
    later = {"started": "2026-01-03", "status": "finished"}
    for name, content in {"b_older": older.as_json(), "judge": later, "torn": '{"status": "fin'}.items():
        Path(name).mkdir()
        write_json(Path(name), content)
    assert last_run("--model-path") == Path("b_older")
    Path("a_newer").mkdir()
    write_json(Path("a_newer"), {**newer, "format": 1})
    assert last_run("--model-path") == Path("a_newer")
    with user_error("format 1", "format 4", "a_newer"):
        RunRecord.require(last_run("--model-path"), "--model-path")


def test_run_of_another_format_can_be_replaced_or_moved(tmp_path, user_error):
    """A run that is only moved or replaced need not be readable."""
    folder = tmp_path / "ppo_training_output"
    finished(folder)
    write_json(folder, without("format")(json.loads((folder / "run.json").read_text())))
    with user_error("--overwrite"):
        check_output(folder, overwrite=False, is_default=False)
    check_output(folder, overwrite=True, is_default=False)
    lock, line = claim_output(folder, overwrite=False, is_default=True)
    lock.close()
    assert f" {folder} " in line and line.endswith(f" {folder}_1")


BUSY = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


def test_cpu_seconds_are_those_of_the_process_and_its_children_in_all_sessions(tmp_path):
    """Waiting takes no CPU time. A checkpoint hands the sum to the next session."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    log = RunLog(tmp_path / "first", **facts_of())
    began = log.cpu_seconds()
    time.sleep(0.3)
    assert log.cpu_seconds() - began < 0.2 and log.seconds() >= 0.3
    exec(BUSY)
    assert log.cpu_seconds() - began >= 0.3
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert log.cpu_seconds() - began >= 0.59, "children are measured in steps of 10 ms"

    def checkpoints_of(log):
        return Checkpoints(None, SimpleNamespace(run=SimpleNamespace(output=".")), log, None, None, None)

    state = checkpoints_of(log).state_dict()
    later = RunLog(tmp_path / "second", **facts_of())
    checkpoints_of(later).load_state_dict(state)
    exec(BUSY)
    assert state["cpu_seconds"] + 0.3 <= later.cpu_seconds() < state["cpu_seconds"] + 5
    assert later.seconds() > state["seconds"]


@pytest.mark.parametrize("moment", ["start", "resume", "end"])
def test_an_error_of_the_disk_leaves_no_lock(tmp_path, monkeypatch, moment):
    """A notebook stores the error with its traceback, and the log with it. The next try must not be refused."""

    def full(self, folder):
        raise OSError(28, "No space left on device")

    log = RunLog(tmp_path, **facts_of(seed=1)) if moment != "start" else None
    if moment == "resume":
        log._lock.close()
    monkeypatch.setattr(RunRecord, "write", full)
    with pytest.raises(OSError) as error:
        if moment == "end":
            with log:
                pass
        else:
            RunLog(tmp_path, resume=moment == "resume", **facts_of(seed=1) if moment == "start" else {})
    require_unused(tmp_path)
    assert error.value.errno == 28

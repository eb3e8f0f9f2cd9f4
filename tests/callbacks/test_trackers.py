"""Tests the trackers of --report-to with the real libraries, offline: what was sent is read back."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

import train_ppo
from rlhf.api import make_trainer
from rlhf.callbacks import trackers
from rlhf.callbacks.trackers import Trackers, arguments_of, numbers_of
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config
from rlhf.settings import training
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.libraries import check_trackers, version_of
from tests.scripts.test_scripts import ROOT, run

INSTALLED = [name for name in training.TRACKERS if version_of(name) is not None]


class Interrupted(BaseException):
    """Stands for a signal that a process cannot catch."""


# --- without the libraries -------------------------------------------------------------------------------------------


def test_a_missing_library_is_one_line_before_torch_is_imported(run_flags, monkeypatch):
    monkeypatch.setattr("rlhf.commands.train.import_libraries", lambda *_: pytest.fail("torch would be imported"))
    monkeypatch.setattr("rlhf.utils.libraries.version_of", lambda name: None)
    with pytest.raises(UserError) as raised:
        train_ppo.main(run_flags("--report-to", "wandb", "trackio"))
    assert len(raised.value.problems) == 2
    for name, problem in zip(("wandb", "trackio"), [*map(str, raised.value.problems)], strict=True):
        start = f'{name} is not installed: --report-to {name}. Install it with: pip install "{name}>='
        assert problem.startswith(start), problem
    check_trackers(())


@pytest.mark.parametrize("look", ["--dry-run", "--check", "--check-reward"])
def test_a_missing_library_is_reported_before_a_look_too(monkeypatch, tmp_path, look, user_error):
    """The plan would otherwise promise a run that cannot start."""
    monkeypatch.setattr("rlhf.utils.libraries.version_of", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with user_error("--report-to wandb"):
        train_ppo.main(["--report-to", "wandb", look])


def test_names_of_trackers_are_checked(configured, user_error):
    with user_error("wandbb", "--report-to"):
        configured("--report-to", "wandbb")
    assert configured("--report-to", "tensorboard", "trackio").record.report_to == ("tensorboard", "trackio")
    assert configured().record.report_to is None and configured("--report-to", "none").record.report_to is None
    assert tuple(trackers.TRACKERS) == training.TRACKERS


def test_the_configuration_is_every_setting_of_this_project(configured):
    config = configured("--learning-rate", "0.25", "--kl-target", "5/sequence")
    settings = arguments_of(config).to_dict()
    assert settings["learning_rate"] == 0.25 and settings["kl_target"] == ["5/sequence"]
    assert {"recipe", "algorithm", "actor_model", "gamma", "seed", "report_to"} <= settings.keys()
    assert "per_device_train_batch_size" not in settings and arguments_of(config).run_name == "run"


def test_numbers_of_figures_are_finite_and_intervals_have_two():
    figures = {"a": 1.5, "unit": "nats", "rise": [0.1, 0.2], "missing": None, "nan": float("nan"), "phases": [{}]}
    assert numbers_of(figures) == {"a": 1.5, "rise/low": 0.1, "rise/high": 0.2}


class Fails:
    """A tracker that fails after some calls."""

    def __init__(self, after: int):
        self.left = after
        self.got = []

    def _call(self, *given):
        self.got.append(given)
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("no route to host\nmore lines")

    def start(self, *given):
        self._call("start")

    def log(self, metrics, state):
        self._call("log", state.global_step)

    def table(self, columns, rows, state):
        self._call("table", state.global_step)

    def finish(self, figures, failed, state):
        self._call("finish", failed)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_tracker_that_fails_does_not_end_the_training(build, monkeypatch, capsys, after):
    failing = Fails(after)
    fine = Fails(100)
    monkeypatch.setattr(trackers, "TRACKERS", {"wandb": lambda: failing, "trackio": lambda: fine})
    trainer = build("--num-iterations", 2, "--eval-every", 2, "--report-to", "wandb", "trackio")
    with Trackers(trainer.config, Screen()) as callback:
        trainer.add_callback(callback)
        trainer.train()
    assert trainer.host.state.global_step == 2 and len(failing.got) == after + 1
    assert fine.got == [("start",), ("log", 0), ("table", 0), ("log", 1), ("log", 2), ("log", 2), ("table", 2),
                        ("finish", False)]  # fmt: skip
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning: wandb " in line]
    assert "(ConnectionError: no route to host): --report-to. " in line


def test_a_failed_run_is_marked_as_failed(configured, monkeypatch):
    fine = Fails(100)
    monkeypatch.setattr(trackers, "TRACKERS", {"wandb": lambda: fine})
    trainer = SimpleNamespace(host=SimpleNamespace(state=SimpleNamespace(global_step=0)))
    with pytest.raises(Interrupted), Trackers(configured("--report-to", "wandb"), Screen()) as callback:
        callback.on_train_begin(trainer)
        raise Interrupted
    assert fine.got == [("start",), ("finish", True)]


def test_a_trainer_that_writes_no_files_ends_its_run_after_an_error_too(start_model, monkeypatch):
    fine = Fails(100)
    monkeypatch.setattr(trackers, "TRACKERS", {"trackio": lambda: fine})
    monkeypatch.setattr("rlhf.api.check_trackers", lambda names: None)

    def train(rewards):
        config = make_config(actor_model=str(start_model), batch_size=1, max_new_tokens=2, num_iterations=1,
                             report_to=["trackio"])  # fmt: skip
        make_trainer(config, ["a cat?"], rewards, progress=False).train()

    with pytest.raises(RunError):
        train(lambda completions: [1 / 0])
    assert fine.got == [("start",), ("finish", True)]
    fine.got.clear()
    train(lambda completions: [1.0])
    assert fine.got[0] == ("start",) and fine.got[-1] == ("finish", False) and len(fine.got) == 7


def test_only_the_first_process_sends(configured, monkeypatch):
    monkeypatch.setattr(trackers, "is_first", lambda: False)
    assert Trackers(configured("--report-to", "wandb"), Screen()).names == []


# --- with the libraries ----------------------------------------------------------------------------------------------


def needs(name: str):
    return pytest.mark.skipif(name not in INSTALLED, reason=f"{name} is not installed (the extra `tracking`)")


# a run; with a number as its first argument, it ends at the start of this update
TRAIN = """
import sys
import train_ppo
from rlhf.trainer.loop import OnPolicyLoop
stop, update_step = int(sys.argv[1]), OnPolicyLoop.update_step
OnPolicyLoop.update_step = lambda self, number: sys.exit(9) if number == stop else update_step(self, number)
train_ppo.main(sys.argv[2:])
"""
FROM_PYTHON = """
import sys
from rlhf.config import make_config
from rlhf.api import make_trainer
start, reward, output = sys.argv[1:]
config = make_config(actor_model=start, rm_model=reward, output=output, batch_size=2, max_new_tokens=6,
                     num_iterations=2, report_to=["trackio"])
length = lambda completions, **_: [1.0 * len(text) for text in completions]
print(make_trainer(config, ["a cat?", "a dog?"], [length]).train()["eval/score"])
"""
READ_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
project, start = sys.argv[1:]
runs = [name for name in SQLiteStorage.get_runs(project) if name.startswith(f"{start}-")]
(run,) = runs
print(json.dumps([runs, SQLiteStorage.get_logs(project, run),
                  SQLiteStorage.get_run_config(project, run)]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tracked")


@pytest.fixture(scope="module")
def python(folder):
    """Return a function that runs code in a separate process, because the libraries read their environment once."""
    environment = {
        "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
    }  # fmt: skip

    def execute(code: str, *words: object, status: int = 0) -> str:
        done = run(["-c", code, *map(str, words)], folder, **environment)
        assert done.returncode == status, done.stderr
        return done.stdout

    return execute


@pytest.fixture(scope="module")
def tracked(start_model, reward_folder, pairs_file, folder, python) -> Path:
    """Return the folder of a run that ended in update 4, was resumed from the checkpoint of update 2, and sent to all
    installed trackers."""
    words = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file, "--output",
             folder / "my_run", "--batch-size", 4, "--num-iterations", 5, "--max-new-tokens", 8, "--eval-every", 3,
             "--save-every", 2, "--prompt-length", 100, "--eval-prompts", 6, "--allow-weak-reward-model",
             "--learning-rate", "0.001", "--report-to", *INSTALLED]  # fmt: skip
    python(TRAIN, 4, *words, status=9)
    python(TRAIN, 0, "--resume", "--output", folder / "my_run", "--save-every", "1")
    return folder / "my_run"


def expected(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wandb_records(file: Path) -> list:
    """Return the records of an offline run: blocks of 32 KiB with parts of records, as in LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    place = 7
    parts = b""
    found = []
    while place < len(data):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.ci
@needs("wandb")
def test_wandb_has_settings_metrics_tables_and_results(tracked, folder):
    run = RunRecord.read(tracked)
    sessions = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(sessions) == 2 and all(session.name.endswith(run.id) for session in sessions)
    records = [record for session in sessions for record in wandb_records(next(session.glob("*.wandb")))]
    first = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    assert (first.run_id, first.display_name, first.project) == (run.id, "my_run", trackers.PROJECT)
    rows = [values(r.history.item) for r in records if r.WhichOneof("record_type") == "history"]
    sent = [(row["train/global_step"], row["loss"]) for row in rows if "loss" in row]
    losses = {row["update"]: row["loss"] for row in expected(tracked) if "loss" in row}
    assert [step for step, _ in sent] == [1, 2, 3, 3, 4, 5], "update 3 is trained again, and sent again"
    assert all(value == pytest.approx(losses[step]) for step, value in sent)
    assert [row["train/global_step"] for row in rows if "eval/score" in row] == [0, 3, 3, 5]
    axes = [r.metric for r in records if r.WhichOneof("record_type") == "metric" and r.metric.glob_name == "*"]
    assert {axis.step_metric for axis in axes} == {"train/global_step"}
    config = [values(r.config.update) for r in records if r.WhichOneof("record_type") == "config"][-1]
    assert {name: config[name] for name in run.flat_settings} == run.flat_settings
    summary = {n: v for r in records if r.WhichOneof("record_type") == "summary"
               for n, v in values(r.summary.update).items()}  # fmt: skip
    assert {name: summary[name] for name in run.figures} == run.figures and summary["loss"] == pytest.approx(losses[5])
    table = json.loads(next((sessions[1] / "files" / "media" / "table").rglob("*.json")).read_text())
    assert table["columns"][:3] == ["prompt", "completion", "score"] and len(table["data"]) == 6


@pytest.mark.ci
@needs("trackio")
def test_trackio_has_settings_metrics_tables_and_results(tracked, python):
    run = RunRecord.read(tracked)
    runs, rows, config = json.loads(python(READ_TRACKIO, trackers.PROJECT, "my_run"))
    assert runs == [f"my_run-{run.id[:8]}"], "the resumed run continues the same run"
    losses = {row["update"]: row["loss"] for row in expected(tracked) if "loss" in row}
    sent = sorted((row["step"], row["loss"]) for row in rows if "loss" in row)
    assert [step for step, _ in sent] == [1, 2, 3, 3, 4, 5]
    assert all(value == pytest.approx(losses[step]) for step, value in sent)
    assert {name: config[name] for name in run.flat_settings} == run.flat_settings
    tables = [row["samples"]["_value"] for row in rows if "samples" in row]
    assert len(tables) == 4 and all(len(table) == 6 for table in tables)
    (figures,) = [row for row in rows if "figures/score_after" in row]
    assert figures["figures/score_after"] == pytest.approx(run.figures["score_after"]) and figures["step"] == 5


@pytest.mark.ci
@needs("trackio")
def test_a_run_from_python_sends_its_results(start_model, reward_folder, folder, python, tracked):
    score = float(python(FROM_PYTHON, start_model, reward_folder, folder / "from_python").split()[-1])
    _, rows, config = json.loads(python(READ_TRACKIO, trackers.PROJECT, "from_python"))
    (figures,) = [row for row in rows if "figures/score_after" in row]
    assert figures["figures/score_after"] == pytest.approx(score) and config["batch_size"] == 2
    assert not any((folder / "from_python").iterdir()), "nothing else is written"


@pytest.mark.ci
@needs("wandb")
def test_without_a_login_wandb_is_one_warning(build, monkeypatch, tmp_path, capsys):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    trainer = build("--num-iterations", 1, "--report-to", "wandb")
    with Trackers(trainer.config, Screen()) as callback:
        trainer.add_callback(callback)
        trainer.train()
    printed = " ".join(capsys.readouterr().out.split())
    assert trainer.host.state.global_step == 1 and "warning: wandb failed (" in printed

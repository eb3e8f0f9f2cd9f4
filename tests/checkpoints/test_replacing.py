"""Tests that an old output is moved aside and never deleted, and that inputs stay where they are. A killed build can
be repeated."""

from __future__ import annotations

import errno
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

import reward_model.train
import train_ppo
from rlhf.checkpoints import replacing
from rlhf.checkpoints.model_folder import METRICS_FILE
from rlhf.checkpoints.run_folder import RunLock
from rlhf.checkpoints.run_record import RunRecord
from rlhf.demo import parts, ready
from rlhf.rewards import training
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.training import save_reward_model
from rlhf.utils import system
from rlhf.utils.console import Screen
from rlhf.utils.errors import RLHFWarning, RunError, run_command
from rlhf.utils.files import rename_synced
from tests.conftest import typed
from tests.trainer.test_nan import nan_rule, run

CPU = torch.device("cpu")
FAST = ("--num-iterations", 1)


def started(folder: Path) -> str:
    return RunRecord.read(folder).started


# --- runs ------------------------------------------------------------------------------------------------------------


def test_overwrite_moves_the_old_run_aside_with_all_its_files(run_flags, tmp_path):
    """Whether the new run finishes or fails, and also if the user has files in the folder."""
    folder = tmp_path / "run"
    run(run_flags(*FAST))
    first = started(folder)
    (folder / "my_notes.txt").write_text("mine")
    rule = nan_rule(tmp_path, 1)
    run(run_flags(*FAST, "--rm-model", "none", "--reward-func", rule, "--overwrite"), 1)
    assert started(tmp_path / "run_1") == first and (tmp_path / "run_1" / "model.safetensors").is_file()
    assert (tmp_path / "run_1" / "my_notes.txt").read_text() == "mine"
    failed = started(folder)
    run(run_flags(*FAST, "--overwrite"))
    assert RunRecord.read(folder).status == "finished" and started(folder) not in (first, failed)
    assert (started(tmp_path / "run_1"), started(tmp_path / "run_2")) == (first, failed)


@pytest.mark.parametrize("flag", ["--prompts", "--eval-text", "--reward-func", "--actor-model", "--rm-model"])
def test_input_in_the_output_folder_is_refused(
    run_flags, tmp_path, pairs_file, start_model, reward_folder, flag, user_error
):
    folder = tmp_path / "run"
    run(run_flags(*FAST))
    before = sorted(folder.rglob("*"))
    shutil.copy(pairs_file, folder / "mine.jsonl")
    (folder / "eval.txt").write_text("some words to follow")
    (folder / "rules.py").write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    shutil.copytree(start_model, folder / "start")
    shutil.copytree(reward_folder, folder / "reward")
    input_path = {
        "--prompts": "mine.jsonl", "--eval-text": "eval.txt", "--reward-func": "rules.py:f", "--actor-model": "start",
        "--rm-model": "reward",
    }[flag]  # fmt: skip
    with user_error(f"{folder} ", f": {flag} {folder / input_path.split(':')[0]}"):
        train_ppo.main(run_flags(*FAST, "--overwrite", flag, folder / input_path))
    assert set(before) < set(folder.rglob("*")) and (folder / "mine.jsonl").is_file()


# --- reward models ---------------------------------------------------------------------------------------------------


@pytest.fixture
def reward_words(start_model, pairs_file, tmp_path) -> list[str]:
    words = ["--base-model", start_model, "--actor-model", "none", "--pairs", pairs_file, "--rm-output",
             tmp_path / "judge"]  # fmt: skip
    return [str(word) for word in words]


@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on file sizes")
def test_full_disk_keeps_the_old_reward_model(reward_words, tmp_path, capsys):
    import resource

    reward_model.train.main(reward_words)
    before = (tmp_path / "judge" / METRICS_FILE).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(SystemExit) as raised:
            run_command(lambda: reward_model.train.main([*reward_words, "--rm-overwrite", "--rm-seed", "7"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    output = capsys.readouterr().err
    assert raised.value.code == 1 and output.startswith("error: ") and "Traceback" not in output
    assert (tmp_path / "judge" / METRICS_FILE).read_bytes() == before
    assert RewardModel.load(str(tmp_path / "judge"), CPU, None).record is not None
    assert [path.name for path in tmp_path.iterdir()] == ["judge"], "no temporary folders must be left"
    reward_model.train.main([*reward_words, "--rm-overwrite", "--rm-seed", "7"])
    assert (tmp_path / "judge" / METRICS_FILE).read_bytes() != before
    assert (tmp_path / "judge_1" / METRICS_FILE).read_bytes() == before


@pytest.mark.ci
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_reward_model_survives_a_kill_during_its_replacement(reward_words, tmp_path, monkeypatch, renames):
    """Killed before, between and after the two renames. The old model stays complete, and the next start trains a new
    one. The model of the killed training was complete, too, so the next start keeps it."""
    reward_model.train.main(reward_words)
    before = (tmp_path / "judge" / METRICS_FILE).read_bytes()
    original = system.replace
    done = []

    class Killed(BaseException):
        pass

    def end_after(count: int) -> None:
        if len(done) == count:
            raise Killed

    def replace(source, target):
        if Path(target).parent != tmp_path:
            return original(source, target)
        end_after(renames)
        original(source, target)
        done.append(target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(system, "replace", replace)
        patch.setattr(system, "sync_folder", lambda _: end_after(2))
        patch.setattr(training, "remove_folder", lambda *_, **__: None)  # a killed process does not clean up
        reward_model.train.main([*reward_words, "--rm-overwrite", "--rm-seed", "7"])
    kept = tmp_path / ("judge_1" if renames else "judge")
    assert (kept / METRICS_FILE).read_bytes() == before
    reward_model.train.main([*reward_words, "--rm-overwrite"])
    assert RewardModel.load(str(tmp_path / "judge"), CPU, None).record is not None
    assert {path.name for path in tmp_path.iterdir()} == {"judge", "judge_1", "judge_2"}
    for folder in tmp_path.iterdir():
        assert RewardModel.load(str(folder), CPU, None).record is not None


@pytest.mark.parametrize("flag", ["--pairs", "--base-model", "--actor-model"])
def test_input_in_the_reward_models_folder_is_refused(
    reward_words, tmp_path, pairs_file, start_model, flag, user_error
):
    reward_model.train.main(reward_words)
    shutil.copy(pairs_file, tmp_path / "judge" / "mine.jsonl")
    shutil.copytree(start_model, tmp_path / "judge" / "start")
    input_path = tmp_path / "judge" / ("mine.jsonl" if flag == "--pairs" else "start")
    with user_error("judge ", f": {flag} {input_path}", "--rm-output"):
        reward_model.train.main([*reward_words, "--rm-overwrite", flag, str(input_path)])
    assert input_path.exists()


def test_non_finite_reward_model_weights_are_not_saved(reward_words, tmp_path, user_error):
    with user_error(kind=RunError):
        reward_model.train.main([*reward_words, "--rm-learning-rate", "1e38"])
    assert not (tmp_path / "judge").exists()


def test_ctrl_c_message_describes_the_output_folder(reward_words, tmp_path, capsys, monkeypatch):
    """Runs the module as a command. Nothing is saved, and the older reward model is unchanged."""
    reward_model.train.main(reward_words)
    before = (tmp_path / "judge" / METRICS_FILE).read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run_training", interrupted)
    monkeypatch.setattr(sys, "argv", ["reward_model.train", *reward_words, "--rm-overwrite"])
    with pytest.raises(SystemExit) as raised:
        runpy.run_module("reward_model.train", run_name="__main__")
    output = capsys.readouterr().err
    assert raised.value.code == 130
    last = output.splitlines()[-1]
    assert last.startswith("stopped: ")
    assert (tmp_path / "judge" / METRICS_FILE).read_bytes() == before


# --- the demo --------------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path, monkeypatch, start_model, reward_folder):
    """Replaces the slow builders of the demo's parts by quick ones. Returns a list with one item per built part."""
    monkeypatch.chdir(tmp_path)
    built = []

    def train(config, screen, device):
        built.append("reward model")
        model = RewardModel.load(str(reward_folder), CPU, None)
        record = {"accuracy": 0.9, "length_baseline": 0.5, "calibration": {"completions": 1, "source": "x"},
                  "pairs": 1, "margin": 1.0, "accuracy_against_baseline": None, "by_flaw": {}}  # fmt: skip
        save_reward_model(model, record, Path(config.training.rm_output))

    monkeypatch.setattr(ready, "WEIGHTS", start_model)
    monkeypatch.setattr(parts, "build_pairs", lambda *_: (tmp_path / "demo_parts" / "pairs.jsonl").write_text("{}"))
    monkeypatch.setattr(parts, "train_reward_model", train)
    return built


@pytest.mark.parametrize("missing", ["reward_model/metrics.json", "reward_model/model.safetensors", "pairs.jsonl",
                                  "start_model/model.safetensors"])  # fmt: skip
def test_missing_demo_part_is_built_again(demo, tmp_path, missing):
    parts.prepare_parts("demo", Screen(), CPU)
    (tmp_path / "demo_parts" / missing).unlink()
    parts.prepare_parts("demo", Screen(), CPU)
    assert demo == ["reward model"] * 2 and (tmp_path / "demo_parts" / missing).is_file()


def test_files_of_the_user_in_the_demos_reward_model_are_moved_aside(demo, tmp_path):
    folder = tmp_path / "demo_parts" / "reward_model"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    parts.prepare_parts("demo", Screen(), CPU)
    assert demo == ["reward model"] and (tmp_path / "demo_parts" / "reward_model_1" / "thesis.txt").is_file()


@pytest.mark.skipif(system.WINDOWS, reason="Windows has no flock")
def test_complete_demo_parts_need_no_lock_and_missing_ones_no_disk_with_locks(demo, monkeypatch):
    """They may belong to another user, or be on a mount without locks."""
    import fcntl

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(RLHFWarning, match="locks"):
        parts.prepare_parts("demo", Screen(), CPU)
    (Path("demo_parts") / ".lock").unlink()
    (Path("demo_parts") / ".lock").mkdir()  # opening it fails
    parts.prepare_parts("demo", Screen(), CPU)
    assert demo == ["reward model"]


# --- export ----------------------------------------------------------------------------------------------------------


def test_failed_export_is_repeated_by_the_next_command(run_flags, tmp_path, monkeypatch, capsys):
    from rlhf.run import export

    def disk_full(*_):
        raise OSError(28, "No space left on device", "x")

    with monkeypatch.context() as patch:
        patch.setattr(export, "update_dir_atomically", disk_full)
        run(run_flags(*FAST, "--use-lora", "--merge-lora"), 1)
    assert "Traceback" not in capsys.readouterr().err
    assert RunRecord.read(tmp_path / "run").status == "finished"
    train_ppo.main(typed(f"python train_ppo.py --resume --merge-lora --output {tmp_path / 'run'}"))
    assert (tmp_path / "run" / "merged" / "model.safetensors").is_file()


# --- folders of the user ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["/", "."])
@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_a_dry_run_refuses_a_folder_that_a_run_never_replaces(
    run_flags, tmp_path, monkeypatch, output, more, user_error
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    with user_error(f"--output {output}"):
        train_ppo.main(run_flags("--dry-run", "--output", output, *more))


def test_a_dry_run_of_a_folder_with_a_run_prints_the_plan(runs, run_flags, capsys):
    """Also while that run is trained: the plan needs no folder."""
    with RunLock(runs["ppo", 1]):
        train_ppo.main(run_flags("--dry-run", "--output", runs["ppo", 1]))
    assert "optimizer steps" in capsys.readouterr().out


def test_failed_rename_restores_the_old_folder(tmp_path, monkeypatch):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(name)
    original = system.replace
    calls = []

    def replace(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise PermissionError(13, "a scanner reads it")
        original(source, target)

    monkeypatch.setattr(system, "replace", replace)
    with pytest.raises(PermissionError):
        rename_synced(tmp_path / "new", tmp_path / "old")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_failed_move_is_undone(tmp_path, monkeypatch):
    """This happens on Windows if another program has one of the files open."""
    from rlhf.checkpoints import run_folder

    (tmp_path / "run").mkdir()
    for name in ("a", "b", "run.json"):
        (tmp_path / "run" / name).write_text(name)
    original = run_folder.system.replace

    def replace(source, target):
        if Path(source).name == "b":
            raise PermissionError(13, "in use")
        original(source, target)

    monkeypatch.setattr(run_folder.system, "replace", replace)
    with pytest.raises(PermissionError):
        run_folder._move_to(tmp_path / "run", tmp_path / "aside")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a", "b", "run.json"]
    assert not (tmp_path / "aside").exists()


def test_output_that_cannot_be_renamed_is_refused_before_training(reward_words, tmp_path, monkeypatch, user_error):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replacing.os.path, "ismount", lambda path: True)
    monkeypatch.setattr(training, "run_training", lambda *_: pytest.fail("training was started before the check"))
    with user_error("--rm-output"):
        reward_model.train.main([*reward_words, "--rm-output", ".", "--rm-overwrite"])


@pytest.mark.parametrize("name", [".", "../here", ".."])
def test_current_folder_as_output_is_refused(reward_words, tmp_path, monkeypatch, name, user_error):
    """The folder is renamed. Then the current folder of the shell would no longer exist."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with user_error("--rm-output"):
        reward_model.train.main([*reward_words, "--rm-output", name])


def test_empty_output_folder_is_used_directly(reward_words, tmp_path):
    (tmp_path / "judge").mkdir()
    reward_model.train.main(reward_words)
    assert [path.name for path in tmp_path.iterdir()] == ["judge"]

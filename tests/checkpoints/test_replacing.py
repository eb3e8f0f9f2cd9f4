"""Nothing is removed before its successor is complete, and an input never; a killed build can be built again."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

import reward_model.train
import train_ppo
from rlhf.checkpoints import replacing
from rlhf.checkpoints.run_record import RunRecord
from rlhf.demo import parts
from rlhf.rewards import training
from rlhf.rewards.reward_model import METRICS_FILE, RewardModel
from rlhf.rewards.training import save_reward_model, train_reward_model
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError, UserError, run_command
from tests.conftest import typed
from tests.trainer.test_nan import nan_rule, run

CPU = torch.device("cpu")
FAST = ("--num-iterations", 1)


def started(folder: Path) -> str:
    return RunRecord.read(folder).started


# --- runs ------------------------------------------------------------------------------------------------------------


def test_the_old_run_is_there_until_the_new_one_is_finished(run_flags, tmp_path):
    """A run that fails leaves the run that it was to replace; the next one that finishes removes both."""
    folder, aside = tmp_path / "run", tmp_path / "run.replaced"
    run(run_flags(*FAST))
    first = started(folder)
    rule = nan_rule(tmp_path, 1)
    run(run_flags(*FAST, "--rm-model", "none", "--reward-func", rule, "--overwrite"), 1)
    assert started(aside) == first and (aside / "model.safetensors").is_file()
    assert RunRecord.read(folder).status == "failed"
    run(run_flags(*FAST, "--overwrite"))
    assert RunRecord.read(folder).status == "finished" and started(folder) != first
    assert not list(tmp_path.glob("run.replaced*"))


def test_a_replaced_run_with_other_files_is_kept(run_flags, tmp_path, capsys):
    run(run_flags(*FAST))
    (tmp_path / "run" / "my_notes.txt").write_text("mine")
    run(run_flags(*FAST, "--overwrite"))
    assert (tmp_path / "run.replaced" / "my_notes.txt").read_text() == "mine"
    assert "was not removed: it contains my_notes.txt" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--prompts", "--eval-text", "--reward-func", "--actor-model", "--rm-model"])
def test_an_input_in_the_output_folder_is_refused(run_flags, tmp_path, pairs_file, start_model, reward_folder, flag):
    folder = tmp_path / "run"
    run(run_flags(*FAST))
    before = sorted(folder.rglob("*"))
    shutil.copy(pairs_file, folder / "mine.jsonl")
    (folder / "eval.txt").write_text("some words to follow")
    (folder / "rules.py").write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    shutil.copytree(start_model, folder / "start")
    shutil.copytree(reward_folder, folder / "reward")
    named = {
        "--prompts": "mine.jsonl", "--eval-text": "eval.txt", "--reward-func": "rules.py:f", "--actor-model": "start",
        "--rm-model": "reward",
    }[flag]  # fmt: skip
    with pytest.raises(UserError, match=rf"the output folder .*run contains an input: {flag} .*{named.split(':')[0]}"):
        train_ppo.main(run_flags(*FAST, "--overwrite", flag, folder / named))
    assert set(before) < set(folder.rglob("*")) and (folder / "mine.jsonl").is_file()


# --- reward models ---------------------------------------------------------------------------------------------------


@pytest.fixture
def reward_words(start_model, pairs_file, tmp_path) -> list[str]:
    words = ["--base-model", start_model, "--actor-model", "none", "--pairs", pairs_file, "--rm-output",
             tmp_path / "judge"]  # fmt: skip
    return [str(word) for word in words]


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on file sizes")
def test_a_full_disk_leaves_the_old_reward_model(reward_words, tmp_path, capsys):
    import resource

    reward_model.train.main(reward_words)
    before = (tmp_path / "judge" / METRICS_FILE).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(SystemExit) as ended:
            run_command(lambda: reward_model.train.main([*reward_words, "--rm-overwrite", "--rm-seed", "7"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    output = capsys.readouterr().err
    assert ended.value.code == 1 and output.startswith("error: ") and "Traceback" not in output
    assert (tmp_path / "judge" / METRICS_FILE).read_bytes() == before
    assert RewardModel.load(str(tmp_path / "judge"), CPU, None).record is not None
    assert [path.name for path in tmp_path.iterdir()] == ["judge"], "nothing is left beside"
    reward_model.train.main([*reward_words, "--rm-overwrite", "--rm-seed", "7"])
    assert (tmp_path / "judge" / METRICS_FILE).read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["judge"]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_reward_model_that_is_killed_while_it_is_put_in_place(reward_words, tmp_path, monkeypatch, renames):
    """Killed before, between and after the two renames: the next start uses or replaces what is there."""
    reward_model.train.main(reward_words)
    really, done = replacing.system.replace, []

    class Killed(BaseException):
        pass

    def replace(source, target):
        if len(done) == renames and Path(target).parent == tmp_path:
            raise Killed
        really(source, target)
        done.append(target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(replacing.system, "replace", replace)
        patch.setattr(training.shutil, "rmtree", lambda *_, **__: None)  # a killed process cleans nothing up
        patch.setattr(training, "remove_replaced", lambda *_: (_ for _ in ()).throw(Killed))
        reward_model.train.main([*reward_words, "--rm-overwrite"])
    monkeypatch.setattr(replacing, "HOUR_S", -1)  # what the killed process was writing is old
    reward_model.train.main([*reward_words, "--rm-overwrite"])
    assert RewardModel.load(str(tmp_path / "judge"), CPU, None).record is not None
    assert [path.name for path in tmp_path.iterdir()] == ["judge"]


@pytest.mark.parametrize("flag", ["--pairs", "--base-model", "--actor-model"])
def test_an_input_in_the_reward_models_folder_is_refused(reward_words, tmp_path, pairs_file, start_model, flag):
    reward_model.train.main(reward_words)
    shutil.copy(pairs_file, tmp_path / "judge" / "mine.jsonl")
    shutil.copytree(start_model, tmp_path / "judge" / "start")
    named = tmp_path / "judge" / ("mine.jsonl" if flag == "--pairs" else "start")
    with pytest.raises(UserError, match=rf"judge contains an input: {flag} .*Use another folder with --rm-output"):
        reward_model.train.main([*reward_words, "--rm-overwrite", flag, str(named)])
    assert named.exists()


def test_weights_that_training_broke_are_not_saved(reward_words, tmp_path):
    with pytest.raises(RunError, match="weights are not finite after training"):
        reward_model.train.main([*reward_words, "--rm-learning-rate", "1e38"])
    assert not (tmp_path / "judge").exists()


def test_ctrl_c_says_what_is_true(reward_words, tmp_path, capsys, monkeypatch):
    """In the command itself: nothing was saved, and an older reward model is unchanged."""
    reward_model.train.main(reward_words)
    before = (tmp_path / "judge" / METRICS_FILE).read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run_training", interrupted)
    monkeypatch.setattr(sys, "argv", ["reward_model.train", *reward_words, "--rm-overwrite"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("reward_model.train", run_name="__main__")
    output = capsys.readouterr().err
    assert ended.value.code == 130
    assert (
        output.splitlines()[-1]
        == "stopped: the output folder contains its previous content, or the complete new reward model"
    )
    assert (tmp_path / "judge" / METRICS_FILE).read_bytes() == before


# --- the demo --------------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path, monkeypatch, start_model, reward_folder):
    """The demo's parts, built by stand-ins that take no time; returns how often each was built."""
    monkeypatch.chdir(tmp_path)
    built = []

    def train(config, screen, device):
        built.append("reward model")
        model = RewardModel.load(str(reward_folder), CPU, None)
        record = {"accuracy": 0.9, "length_baseline": 0.5, "calibration": {"replies": 1, "source": "x"}, "pairs": 1,
                  "margin": 1.0, "accuracy_against_baseline": None, "by_flaw": {}}  # fmt: skip
        save_reward_model(model, record, Path(config.training.rm_output))

    monkeypatch.setattr(parts.start_model, "WEIGHTS", start_model)
    monkeypatch.setattr(parts, "make_pairs", lambda *_: (tmp_path / "demo_parts" / "pairs.jsonl").write_text("{}"))
    monkeypatch.setattr(parts, "train_reward_model", train)
    return built


def test_a_demo_that_was_killed_in_its_reward_model_is_built_again(demo, tmp_path, start_model, reward_folder, capsys):
    """As an older release left it: a model without run.json, and no stamp."""
    folder = tmp_path / "demo_parts"
    shutil.copytree(start_model, folder / "start_model")
    (folder / "reward_model").mkdir()
    shutil.copy(reward_folder / "model.safetensors", folder / "reward_model")
    shutil.copy(reward_folder / "config.json", folder / "reward_model")
    parts.prepare_demo(Screen(), CPU)
    assert demo == ["reward model"] and (folder / "stamp.json").is_file()
    assert "removed an incomplete reward model" in capsys.readouterr().out
    parts.prepare_demo(Screen(), CPU)
    assert demo == ["reward model"], "now it is cached"


@pytest.mark.parametrize("lost", ["reward_model/metrics.json", "reward_model/model.safetensors", "pairs.jsonl",
                                  "start_model/model.safetensors"])  # fmt: skip
def test_a_demo_part_that_was_lost_is_built_again(demo, tmp_path, lost):
    parts.prepare_demo(Screen(), CPU)
    (tmp_path / "demo_parts" / lost).unlink()
    parts.prepare_demo(Screen(), CPU)
    assert demo == ["reward model"] * 2 and (tmp_path / "demo_parts" / lost).is_file()


def test_other_files_in_the_demos_reward_model_are_not_removed(demo, tmp_path):
    folder = tmp_path / "demo_parts" / "reward_model"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"unknown files in the folder of the demo's reward model \(thesis.txt\)"):
        parts.prepare_demo(Screen(), CPU)
    assert (folder / "thesis.txt").is_file()


# --- export ----------------------------------------------------------------------------------------------------------


def test_an_export_that_failed_is_done_by_the_next_command(run_flags, tmp_path, monkeypatch, capsys):
    from rlhf.run import export

    def full(*_):
        raise OSError(28, "No space left on device", "x")

    with monkeypatch.context() as patch:
        patch.setattr(export, "update_dir_atomically", full)
        run(run_flags(*FAST, "--use-lora", "--merge-lora"), 1)
    assert "Traceback" not in capsys.readouterr().err
    assert RunRecord.read(tmp_path / "run").status == "finished"
    train_ppo.main(typed(f"python train_ppo.py --resume --merge-lora --output {tmp_path / 'run'}"))
    assert (tmp_path / "run" / "merged" / "model.safetensors").is_file()


# --- folders that a user has ----------------------------------------------------------------------------------------


def test_a_folder_of_that_name_that_is_no_run_is_never_removed(tmp_path):
    (tmp_path / "run.replaced").mkdir()
    (tmp_path / "run.replaced" / "a").write_text("mine")
    assert replacing.remove_replaced(tmp_path / "run") == []
    assert (tmp_path / "run.replaced" / "a").is_file()
    assert replacing.set_aside(tmp_path / "run") == tmp_path / "run.replaced_1"


def test_what_the_commands_write_is_known(runs, reward_words, tmp_path):
    """A file that this project writes must not count as somebody else's: the replaced folder would stay for ever."""
    for folder in runs.values():
        assert replacing.foreign_files(folder) == []
    folder = train_reward_model(parse_reward_cli(reward_words), Screen(), CPU)
    assert replacing.foreign_files(folder) == []
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_what_lies_beside_is_an_input_too(run_flags, reward_words, tmp_path, start_model):
    """The replaced run is removed at the end: a model in it is an input that would go."""
    run(run_flags(*FAST))
    (tmp_path / "run").rename(tmp_path / "run.replaced")
    with pytest.raises(UserError, match="contains an input: --actor-model"):
        train_ppo.main(run_flags(*FAST, "--actor-model", tmp_path / "run.replaced"))


def test_a_rename_that_fails_brings_the_older_one_back(tmp_path, monkeypatch):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(name)
    really, calls = replacing.system.replace, []

    def replace(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise PermissionError(13, "a scanner reads it")
        really(source, target)

    monkeypatch.setattr(replacing.system, "replace", replace)
    with pytest.raises(PermissionError):
        replacing.replace_dir(tmp_path / "new", tmp_path / "old")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_a_move_that_breaks_off_is_undone(tmp_path, monkeypatch):
    """On Windows, where a program has one of the files open."""
    from rlhf.checkpoints import run_folder

    (tmp_path / "run").mkdir()
    for name in ("a", "b", "run.json"):
        (tmp_path / "run" / name).write_text(name)
    really = run_folder.system.replace

    def replace(source, target):
        if Path(source).name == "b":
            raise PermissionError(13, "in use")
        really(source, target)

    monkeypatch.setattr(run_folder.system, "replace", replace)
    with pytest.raises(PermissionError):
        run_folder._move_to(tmp_path / "run", tmp_path / "aside")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a", "b", "run.json"]
    assert not (tmp_path / "aside").exists()


def test_a_folder_that_cannot_be_renamed_is_refused_before_training(reward_words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replacing.os.path, "ismount", lambda path: True)
    monkeypatch.setattr(training, "run_training", lambda *_: pytest.fail("trained first"))
    with pytest.raises(UserError, match="cannot replace the root folder of a disk: --rm-output"):
        reward_model.train.main([*reward_words, "--rm-output", ".", "--rm-overwrite"])


@pytest.mark.parametrize("name", [".", "../here", ".."])
def test_the_current_folder_is_refused(reward_words, tmp_path, monkeypatch, name):
    """It is renamed as a whole, and the shell would stand in a folder that is gone."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="cannot replace the current folder or its parents: --rm-output"):
        reward_model.train.main([*reward_words, "--rm-output", name])


def test_training_finds_a_reward_model_whose_replacement_was_interrupted(run_flags, reward_folder, tmp_path):
    shutil.copytree(reward_folder, tmp_path / "judge.replaced")
    (tmp_path / "judge.replaced" / "run.json").write_text('{"status": "finished"}')
    run(run_flags(*FAST, "--rm-model", tmp_path / "judge"))
    assert (tmp_path / "judge" / "model.safetensors").is_file()


def test_an_empty_folder_is_no_older_version(reward_words, tmp_path):
    (tmp_path / "judge").mkdir()
    reward_model.train.main(reward_words)
    assert [path.name for path in tmp_path.iterdir()] == ["judge"]

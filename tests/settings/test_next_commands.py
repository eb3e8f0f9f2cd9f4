"""Tests that the commands which a run prints can be run as printed, with any folder name."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

import compare_runs
import evaluate_generations
import plot_training_progress
import reward_model.train
import rlhf.commands.train
import train_ppo
from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import parse_cli, usual_config
from rlhf.settings.fields import changed_words, setting_words, values_in
from rlhf.settings.next_commands import reward_model_line, training_command
from rlhf.settings.recipes import shipped_recipes
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.utils import command_lines
from tests.conftest import typed
from tests.systems import words_of

ROOT = Path(__file__).resolve().parents[2]
ODD_NAME = "q'u\"o te$x_{ü}"
SCRIPTS = {
    "evaluate_generations.py": evaluate_generations, "plot_training_progress.py": plot_training_progress,
    "compare_runs.py": compare_runs, **{f"train_{a}.py": import_module(f"train_{a}") for a in ALGORITHMS},
}  # fmt: skip


def commands_in(output: str) -> list[str]:
    """Return the commands among the printed lines."""
    starts = ("python ", "tensorboard ")
    return [line[line.index(s) :] for line in output.splitlines() for s in starts if f"  {s}" in line]


@pytest.mark.ci
def test_next_commands_work_for_a_folder_with_special_characters(run_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train_ppo.main(run_flags("--output", ODD_NAME, "--record-tokens", "--clip-range", 0.3))
    lines = commands_in(capsys.readouterr().out)
    names = [Path(words_of(line)[1 if line.startswith("python") else 0]).name for line in lines]
    assert names == ["evaluate_generations.py", "evaluate_generations.py", "plot_training_progress.py", "tensorboard",
                     "compare_runs.py", "evaluate_generations.py"]  # fmt: skip
    for line in lines:
        words = words_of(line)
        if words[0] == "tensorboard":
            assert Path(words[2]).is_dir()
        elif "--chat" in words:
            assert words[-1] == ODD_NAME
        else:
            SCRIPTS[Path(words[1]).name].main(words[2:])


# --- the reward model ------------------------------------------------------------------------------------------------


# an environment has no reward model
@pytest.mark.parametrize("recipe", [name for name in shipped_recipes() if name != "demo-game"])
def test_training_and_reward_model_commands_match_each_other(recipe):
    """Training prints the command that trains its reward model, which prints the command for training."""
    start = parse_cli(["--recipe", recipe, "--rm-model", "./my judge", "--prompts", "pairs$.jsonl", "--split",
                       "30/60/10", "--actor-model", "./start"])  # fmt: skip
    made = parse_reward_cli(words_of(reward_model_line(start))[3:])
    assert (made.training.rm_output, made.data.pairs) == ("./my judge", "pairs$.jsonl")
    assert (made.training.base_model, made.calibration.actor_model) == ("./start", "./start")
    again = parse_cli(typed(training_command(made, usual_config(recipe, {}))))
    assert (again.model.rm_model, again.model.actor_model) == ("./my judge", "./start")
    assert (again.data.prompts, str(again.data.split)) == ("pairs$.jsonl", "30/60/10")
    usual = parse_cli(["--recipe", recipe])
    if usual.model.rm_model is not None:  # demo-checker has no reward model
        assert reward_model_line(usual).startswith("python -m reward_model.train")
        assert "--rm-output" not in reward_model_line(usual)


def test_commands_contain_how_the_data_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("problem,good,bad\n1?,2,3\n")
    words = ["--columns", "prompt=problem", "chosen=good", "rejected=bad", "--skip-bad-rows", "2.5"]
    start = parse_cli(["--prompts", str(tmp_path / "a.csv"), *words])
    printed = words_of(reward_model_line(start))
    assert printed[printed.index("--pairs") :] == ["--pairs", str(tmp_path / "a.csv"), *words]
    made = parse_reward_cli(["--pairs", "data/folder/", "--dataset-split", "test", *words])
    trained = parse_cli(words_of(training_command(made, usual_config("smollm2-orca", {})))[2:])
    assert (trained.data.prompts, trained.data.dataset_split) == ("data/folder/", "test")
    assert trained.data.columns == made.data.columns and trained.data.skip_bad_rows == 2.5


def test_no_next_command_for_a_rejected_reward_model(start_model, pairs_file, tmp_path, capsys, monkeypatch):
    words = ["--base-model", start_model, "--actor-model", "none", "--pairs", pairs_file, "--rm-output",
             tmp_path / "judge"]  # fmt: skip
    for accuracy in (0.4, 0.9):
        monkeypatch.setattr("rlhf.commands.reward_model.training_command", lambda *_: "THE COMMAND")
        record = {"accuracy": accuracy, "length_baseline": 0.5}
        monkeypatch.setattr("rlhf.checkpoints.model_folder.read_record", lambda _, found=record: found)
        reward_model.train.main([str(word) for word in [*words, "--rm-overwrite"]])
        output = capsys.readouterr().out
        assert ("next: THE COMMAND" in output) == (accuracy > 0.6)
        rejected = [line for line in output.splitlines() if "weak" in line]
        assert len(rejected) == (accuracy < 0.6)


def test_missing_reward_model_is_reported_quickly_with_the_command(tmp_path):
    """Also in a folder with a package named reward_model. Under two seconds, because torch is not imported."""
    (tmp_path / "reward_model").mkdir()
    (tmp_path / "reward_model" / "train.py").write_text("")
    start = time.monotonic()
    done = subprocess.run([sys.executable, ROOT / "train_ppo.py"], cwd=tmp_path, capture_output=True, text=True)
    seconds = time.monotonic() - start
    assert done.returncode == 2 and done.stdout.startswith("PPO: ")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    for part in ("--rm-model ./reward_model_output.", f"python {ROOT}/reward_model/train.py,", "--reward-func"):
        assert part in done.stderr
    assert seconds < 2


def test_all_missing_inputs_are_reported_before_torch_is_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    from rlhf.utils.errors import UserError

    words = "--actor-model ./start --prompts rows.jsonl --eval-text a.txt --reward-func my.py:f".split()
    monkeypatch.setattr(rlhf.commands.train, "check_libraries", lambda: pytest.fail("libraries were checked"))
    with pytest.raises(UserError) as raised:
        train_ppo.main(words)
    assert len(raised.value.problems) == 5


# --- quoting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["plain", "a b", "a'b", 'a"b', "$HOME", "`x`", "a;b", "", "ü", "new\nline"])
def test_words_are_quoted_for_a_posix_shell(word, monkeypatch):
    monkeypatch.setattr(command_lines, "WINDOWS", False)
    assert shlex.split(command_lines.command("python", word)) == ["python", word]


def test_words_are_quoted_for_windows(monkeypatch):
    monkeypatch.setattr(command_lines, "WINDOWS", True)
    quoted = command_lines.command("python", r"C:\a b\c", "plain-1.2", "it's", "$x", "a;b", "a,b", "")
    assert quoted == 'python "C:\\a b\\c" plain-1.2 "it\'s" \'$x\' "a;b" "a,b" ""'


def test_settings_survive_conversion_to_flags():
    config = parse_cli(["--seeds", "1", "2", "--kl-target", "3/sequence", "--rm-model", "none", "--reward-func",
                        "length_penalty", "--use-lora"])  # fmt: skip
    names = ("seeds", "kl_target", "rm_model", "reward_func", "use_lora", "bf16", "eval_func", "packed")
    values = values_in(config)
    assert parse_cli(setting_words({name: values[name] for name in names})) == config
    words = changed_words(values, values_in(usual_config("smollm2-orca", {})))
    assert parse_cli(words) == config and words.count("--seeds") == 1 and "--packed" not in words

"""Tests that every command that reads a run refuses an older or damaged run.json with a one-line error."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

import compare_runs
import evaluate_generations
import plot_training_progress
import train_ppo
from rlhf.utils.errors import run_command

COMMANDS = {  # a command -> its arguments
    "resume": (train_ppo, ["--resume", "--output", "ppo_seed1"]),
    "extend": (train_ppo, ["--resume", "--resume-anyway", "--num-iterations", "4", "--output", "ppo_seed1"]),
    "resume of seeds": (train_ppo, ["--resume", "--seeds", "1", "--output", "ppo"]),
    "export": (train_ppo, ["--resume", "--push-to-hub", "ada/mine", "--output", "ppo_seed1"]),
    "evaluate": (evaluate_generations, ["--model-path", "ppo_seed1"]),
    "evaluate the last run": (evaluate_generations, []),
    "evaluate best": (evaluate_generations, ["--model-path", "ppo_seed1/best"]),
    "evaluate a checkpoint": (evaluate_generations, ["--model-path", "ppo_seed1/checkpoint-2"]),
    "chat": (evaluate_generations, ["--chat", "--model-path", "ppo_seed1"]),
    "tokens": (evaluate_generations, ["--tokens", "ppo_seed1"]),
    "compare": (compare_runs, ["ppo_seed1"]),
    "plot": (plot_training_progress, ["ppo_seed1"]),
    "plot the last run": (plot_training_progress, []),
}


@pytest.fixture
def change_record(runs, tmp_path, monkeypatch, capsys):
    """Changes to a folder with a finished run. Returns a function that changes its run.json."""
    folder = shutil.copytree(runs["ppo", 1], tmp_path / "ppo_seed1")
    monkeypatch.chdir(tmp_path)

    def change(rewrite) -> None:
        (folder / "run.json").write_text(rewrite(json.loads((folder / "run.json").read_text())))
        capsys.readouterr()

    return change


def error_of(module, argv, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        run_command(partial(module.main, argv))
    assert ended.value.code == 2
    return capsys.readouterr().err.replace(f"{Path.cwd()}/", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_an_older_format_is_refused_in_one_line(change_record, capsys, command):
    change_record(lambda facts: json.dumps({name: value for name, value in facts.items() if name != "format"}))
    line = error_of(*COMMANDS[command], capsys)
    assert line.startswith("error: run.json ") and line.count("\n") == 1
    assert all(part in line for part in ("format 1, ", "format 4: ppo_seed1. "))
    assert {path.name for path in Path().iterdir()} == {"ppo_seed1"}, "nothing was written"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_with_a_damaged_file_is_refused_in_one_line(change_record, capsys, command):
    change_record(lambda facts: json.dumps({**facts, "plan": {}}))
    line = error_of(*COMMANDS[command], capsys)
    assert line.startswith("error: run.json ") and "'plan.updates'" in line and ": ppo_seed1. " in line
    assert line.count("\n") == 1

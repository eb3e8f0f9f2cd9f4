"""Tests --print-json: the last line of a training command for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf.checkpoints.run_log import RunLog
from rlhf.commands.result_line import result_line
from rlhf.config import parse_cli
from rlhf.utils.errors import RunError, UserError
from tests.records import facts_of


def config_of(folder: Path, *flags: str):
    return parse_cli(["--recipe", "demo", "--output", str(folder), "--print-json", *flags])


def finish(folder: Path, seed: int = 42, **figures: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with RunLog(folder, **facts_of(seed=seed)) as log:
        log.add(figures=figures)


def printed(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_run_has_its_status_folder_seed_algorithm_and_figures(tmp_path, capsys):
    folder = tmp_path / "run"
    with result_line(config_of(folder), {folder: {}}):
        finish(folder, score_after=1.5, perplexity_after=float("nan"))
    assert printed(capsys) == [
        {
            "status": "finished", "output": str(folder), "seed": 42, "algorithm": "ppo",
            "figures": {"score_after": 1.5, "perplexity_after": None},
        }
    ]  # fmt: skip


def test_several_runs_have_one_line(tmp_path, capsys):
    folders = {tmp_path / f"run_seed{seed}": {} for seed in (1, 2)}
    with result_line(config_of(tmp_path / "run", "--seeds", "1", "2"), folders):
        finish(tmp_path / "run_seed1", 1, gold_after=0.5)
    (found,) = printed(capsys)
    assert found["status"] == "not started" and found["output"] == str(tmp_path / "run")
    assert [run["status"] for run in found["runs"]] == ["finished", "not started"]
    assert found["runs"][0]["figures"] == {"gold_after": 0.5}


def test_runs_of_a_sweep_have_their_settings(tmp_path, capsys):
    folder = tmp_path / "run_learning_rate=1e-05_seed1"
    with result_line(
        config_of(tmp_path / "run", "--sweep", "learning_rate=1e-5"), {folder: {"learning_rate": "1e-05"}}
    ):
        finish(folder)
    assert printed(capsys)[0]["runs"][0]["settings"] == {"learning_rate": "1e-05"}


def test_a_failed_run_is_reported_and_an_older_result_is_not(tmp_path, capsys):
    folder = tmp_path / "run"
    with pytest.raises(RunError), result_line(config_of(folder), {folder: {}}):
        folder.mkdir()
        with RunLog(folder, **facts_of()):
            raise RunError("a test")
    (found,) = printed(capsys)
    assert (found["status"], found["reason"], found["figures"]) == ("failed", "RunError: a test", {})
    with pytest.raises(UserError), result_line(config_of(folder), {folder: {}}):
        raise UserError("the folder already contains a run")
    assert printed(capsys) == []


def test_only_the_first_process_of_a_launcher_prints(tmp_path, capsys, monkeypatch):
    """The processes leave their group before the command ends."""
    folder = tmp_path / "run"
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    with result_line(config_of(folder), {folder: {}}):
        finish(folder)
        for variable in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(variable)
    assert printed(capsys) == []


def test_several_runs_have_the_status_that_needs_attention_first(tmp_path, capsys):
    folders = {tmp_path / f"run_seed{seed}": {} for seed in (1, 2, 3)}
    with result_line(config_of(tmp_path / "run", "--seeds", "1", "2", "3"), folders):
        finish(tmp_path / "run_seed1", 1)
        (tmp_path / "run_seed3").mkdir()
        with pytest.raises(RunError), RunLog(tmp_path / "run_seed3", **facts_of(seed=3)):
            raise RunError("a test")
    (found,) = printed(capsys)
    assert (found["status"], [run["status"] for run in found["runs"]]) == (
        "failed", ["finished", "not started", "failed"],
    )  # fmt: skip


@pytest.mark.parametrize("flag", ["--dry-run", "--check", "--scan"])
def test_commands_without_a_result_refuse_the_flag(flag):
    with pytest.raises(UserError, match=f"print_json has no effect with {flag}: --print-json"):
        config_of(Path("run"), flag)

"""Tests which models and baselines are the arms of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.analysis.arms import find_arms
from rlhf.settings.evaluation import MeasureSettings, parse_comparison_cli, parse_plot_cli
from rlhf.settings.types import ArmName
from tests.records import record_of
from tests.shapes import make_start_model


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Three run folders and two model folders, as names relative to the current folder."""
    monkeypatch.chdir(tmp_path)
    make_start_model(tmp_path / "dpo_1")
    for name in ("dpo_2", "run_1", "run_2", "run_3"):
        make_start_model(tmp_path / name)
    for seed in (1, 2, 3):
        record_of(seed=seed).write(tmp_path / f"run_{seed}")


def arms(*words: str, **measure):
    models, groups = find_arms(parse_comparison_cli(words).comparison, MeasureSettings(**measure))
    return {group.label: [models[i].name for i in group.members] for group in groups}


def test_runs_and_models_with_one_name_are_the_seeds_of_one_arm(folders):
    assert arms("run_1", "run_2", "--arm", "DPO=dpo_1", "mine=run_3", "DPO=dpo_2", "best-of-4", "start") == {
        "PPO": ["run_1", "run_2"], "DPO": ["dpo_1", "dpo_2"], "mine": ["run_3"],
    }  # fmt: skip


def test_a_model_that_is_no_run_needs_a_name(folders, user_error):
    with user_error("dpo_1", "--arm NAME=dpo_1"):
        arms("run_1", "dpo_1")


def test_a_seed_twice_in_an_arm(folders, user_error):
    record_of(seed=1).write(Path("run_2"))
    with user_error("seed 1", "run_1 and run_2"):
        arms("run_1", "run_2")


def test_models_without_a_start_model(folders, user_error):
    with user_error("--baseline"):
        arms("--arm", "DPO=dpo_1")
    assert arms("--arm", "DPO=dpo_1", baseline="dpo_2") == {"DPO": ["dpo_1"]}


def test_a_mistyped_run(folders, user_error):
    with user_error("run_9"):
        arms("run_9")


@pytest.mark.parametrize("words", [[], ["--arm", "start", "best-of-4"]])
def test_no_model(words, user_error):
    with user_error("--arm NAME=MODEL"):
        parse_comparison_cli(words)


@pytest.mark.parametrize(
    "text",
    [
        "best-of-1",
        "best-of-",
        "best-of-4x",
        "middle",
        "=model",
        "name=",
        "a\x07=b",
    ],
)
def test_what_is_no_arm(text):
    with pytest.raises(ValueError):
        ArmName.parse(text)


@pytest.mark.parametrize("text", ["start=model", "START=model", "Start model=x", "best-of-4=x"])
def test_a_reserved_name_is_called_reserved(text, user_error):
    with user_error(text.partition("=")[0]) as error:
        parse_comparison_cli(["--arm", text])
    assert [problem.place for problem in error.value.problems] == [f"--arm {text}"]
    assert "NAME=" not in str(error.value), "the text has this form"


def test_parts_of_an_arm():
    named = ArmName.parse(" my, DPO = ./a=b ")
    baseline = ArmName.parse("best-of-16")
    assert (named.name, named.model, named.best_of) == ("my, DPO", "./a=b", 0)
    assert (baseline.name, baseline.model, baseline.best_of) == ("best-of-16", "", 16)


def test_a_baseline_has_no_curve(user_error):
    with user_error("--arm best-of-4"):
        parse_plot_cli(["--arm", "best-of-4"])

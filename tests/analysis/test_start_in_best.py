"""Tests that evaluations and comparisons print a sentence if best/ contains the start model."""

from __future__ import annotations

import json
import shutil

import pytest

import compare_runs
import evaluate_generations
from rlhf.analysis.models import ModelRef, equal_to_start

FLAGS = ["--which", "best", "--num-prompts", "2", "--completions", "2", "--output"]


def test_a_sentence_names_each_model_of_update_0():
    models = [ModelRef("a", "a", update=0), ModelRef("b", "b", update=1), ModelRef("c", "c")]
    (sentence,) = equal_to_start(models)
    assert sentence.startswith("a has the weights of the run's start model")


@pytest.fixture
def start_is_best(runs, start_model, tmp_path):
    """Return a copy of a run whose best evaluation is the start model's."""
    folder = shutil.copytree(runs["ppo", 1], tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "best": {**facts["best"], "update": 0}}))
    shutil.copy(start_model / "model.safetensors", folder / "best")
    return folder


def test_start_model_in_best_is_evaluated(start_is_best, tmp_path, capsys):
    """Both have the same random numbers, so they have the same completions."""
    evaluate_generations.main(["--model-path", str(start_is_best), *FLAGS, str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    (model,) = report["models"]
    assert model["figures"] == report["start"]["figures"] and model["warnings"] == []
    assert {c["win_rate"]["value"] for c in report["contrasts"]} == {0.5}
    (note,) = [note for note in report["notes"] if start_is_best.name in note]
    assert note in " ".join(capsys.readouterr().out.split())


def test_run_whose_best_is_the_start_model_is_compared(start_is_best, runs, tmp_path):
    compare_runs.main(
        [str(start_is_best), str(runs["grpo", 1]), "--limit-minutes", "0", *FLAGS, str(tmp_path / "out")]
    )
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    ppo = next(name for name, group in report["arms"].items() if group["algorithm"] == "ppo")
    assert report["figures"][ppo]["1"]["score"] == report["figures"]["start"]["score"]
    assert sum("start model" in caveat and start_is_best.name in caveat for caveat in report["notes"]) == 1

"""Tests that models with equal weights are found by what their runs recorded, and are evaluated once."""

from __future__ import annotations

import json
import shutil

import pytest

import compare_runs
import evaluate_generations
from rlhf.analysis.equal_weights import START, equal_in_words, equal_weights
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.models import ModelRef
from rlhf.config import make_config
from rlhf.utils.files import files_print
from tests.records import record_of


@pytest.fixture
def start(tmp_path) -> ModelRef:
    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return ModelRef(str(folder), str(folder))


@pytest.fixture
def saved(start):
    """Returns a function that makes a model of a run of 2 updates."""

    def make(update: int, which: str = "best", base: str | None = None, **facts) -> ModelRef:
        data = {"start_model": files_print(start.name, "*.safetensors")}
        run = record_of(make_config("demo", actor_model=start.name), **{"data": data, **facts})
        return ModelRef("run", f"run/{which}", base, run, which, update)

    return make


def test_model_of_update_0_is_the_start_model(saved, start):
    assert equal_weights([saved(0)], start) == {0: START}
    assert equal_weights([saved(1)], start) == {}
    assert equal_weights([saved(0)], None) == {}


def test_another_or_changed_start_model_is_not_equal(saved, start, tmp_path):
    model, other = saved(0), ModelRef(str(tmp_path), str(tmp_path))
    assert equal_weights([model], other) == {}, "another --baseline"
    (tmp_path / "start" / "model.safetensors").write_bytes(b"changed")
    assert equal_weights([model], start) == {}, "the folder has other weights than at the start of the run"


def test_models_of_one_run_and_update_are_equal(saved, start):
    models = [saved(2, "final"), saved(2), saved(1), saved(2, id="1" * 32), saved(2, "checkpoint-2", base="base")]
    assert equal_weights(models, start) == {1: 0}, "another update, another run and an adapter are not equal"


def test_a_sentence_names_each_pair(saved, start):
    sentences = equal_in_words([saved(2, "final"), saved(2), saved(0, id="1" * 32)], start)
    assert len(sentences) == 2
    assert "run (final, after update 2)" in sentences[0] and "start model" in sentences[1]
    assert "final weights" in equal_in_words([saved(2)], start)[0], "the final weights are not evaluated"
    assert equal_in_words([saved(1)], start) == []


@pytest.fixture
def start_is_best(runs, start_model, tmp_path):
    """Returns a copy of a run whose best evaluation is the start model's."""
    folder = shutil.copytree(runs["ppo", 1], tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "best": {**facts["best"], "update": 0}}))
    shutil.copy(start_model / "model.safetensors", folder / "best")
    return folder


@pytest.fixture
def evaluated(monkeypatch):
    """Returns the labels of the models that were evaluated."""
    labels, original = [], ModelEvaluator._evaluate

    def noted(self, label, *rest):
        labels.append(label)
        return original(self, label, *rest)

    monkeypatch.setattr(ModelEvaluator, "_evaluate", noted)
    return labels


def test_start_model_in_best_is_evaluated_once(start_is_best, runs, evaluated, tmp_path, capsys):
    flags = ["--which", "best", "--num-prompts", "2", "--completions", "2", "--output", str(tmp_path / "out")]
    evaluate_generations.main(["--model-path", str(start_is_best), *flags])
    assert evaluated == ["start model"]
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert report["models"] == [] and report["start"]["figures"] and len(report["notes"]) == 1
    assert report["notes"][0] in " ".join(capsys.readouterr().out.split())
    assert all([side["model"] for side in prompt["sides"]] == ["start model"] for prompt in report["prompts"])


def test_run_whose_best_is_the_start_model_is_compared(start_is_best, runs, evaluated, tmp_path):
    flags = ["--which", "best", "--num-prompts", "2", "--completions", "2", "--output", str(tmp_path / "out")]
    compare_runs.main([str(start_is_best), str(runs["grpo", 1]), *flags])
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert len(evaluated) == 2 and evaluated[0] == "start model" and "grpo_1" in evaluated[1]
    ppo = next(name for name, group in report["groups"].items() if group["algorithm"] == "ppo")
    assert report["figures"][ppo]["1"]["score"] == report["figures"]["start"]["score"]
    assert sum("start model" in caveat and str(start_is_best) in caveat for caveat in report["caveats"]) == 1

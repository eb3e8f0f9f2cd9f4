"""Tests the stored samples of the start model, and the other ways in which checkers are sampled."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.models import find_models
from rlhf.analysis.start_samples import read_samples, sample_start
from rlhf.data.chat_template import encode_prompt
from rlhf.data.examples import worked_examples
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.fields import replaced
from rlhf.utils.console import Screen
from tests.shapes import change_first_weight

HAS_E = "def has_e(completions, **_):\n    return [float('e' in text) for text in completions]\n"
SAMPLES = [[[[1, 2], [3]], [True, False]], [[[4], [5, 6, 7]], [False, True]]]


@pytest.fixture
def settings(start_model, reward_folder, pairs_file) -> MeasureSettings:
    return MeasureSettings(baseline=str(start_model), rm_model=str(reward_folder), prompts=str(pairs_file),
                           num_prompts=3, completions=2, max_new_tokens=6, temperature=0.7)  # fmt: skip


@pytest.fixture
def other(start_model, tmp_path):
    """A model with other weights than the start model, and the same tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(3)
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(start_model).save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def evaluator_of(name, settings, **more) -> tuple[ModelEvaluator, list]:
    models = find_models([str(name)], settings, "--model-path")
    return ModelEvaluator(models, settings, torch.device("cpu"), Screen(), **more), models


def test_samples_are_stored_with_what_they_were_sampled_from(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"key": "key", "minutes": 0.5, "samples": SAMPLES}))
    assert read_samples(tmp_path / "s.json", "key", Screen()) == ([tuple(part) for part in SAMPLES], 0.5)
    for name, key in (("s.json", "other"), ("none.json", "key")):
        assert read_samples(tmp_path / name, key, Screen()) == ([], 0.0)


def test_more_minutes_add_samples_and_keep_the_first_ones(settings, other, tmp_path):
    evaluator, _ = evaluator_of(other, settings)
    few = sample_start(evaluator, 0, 3, tmp_path / "s.json", Screen())
    assert few.scores.shape == (3, 3) and [len(row) for row in few.texts] == [3] * 3
    assert sample_start(evaluator, 0, 2, tmp_path / "s.json", Screen()).scores.tolist() == few.scores.tolist()
    more = sample_start(evaluator, 0, 5, tmp_path / "s.json", Screen())
    assert more.scores.shape == (3, 5) and [row[:3] for row in more.texts] == few.texts
    longer = sample_start(evaluator, 0.002, 5, tmp_path / "s.json", Screen())
    assert longer.scores.shape[1] > 5 and [row[:5] for row in longer.texts] == more.texts


@pytest.mark.parametrize("what", ["worked examples", "plain prompts", "chat template", "first weight"])
def test_samples_are_not_used_for_other_token_ids_or_another_model(settings, other, start_model, tmp_path, what):
    """The messages of the prompts, the sampling settings and the folder of the start model are the same."""
    start = shutil.copytree(start_model, tmp_path / "start")
    settings = dataclasses.replace(settings, baseline=str(start))
    evaluator, _ = evaluator_of(other, settings)
    sample_start(evaluator, 0, 2, tmp_path / "s.json", Screen())
    before = (tmp_path / "s.json").read_text()
    again, _ = evaluator_of(other, settings)
    sample_start(again, 0, 2, tmp_path / "s.json", Screen())
    assert (tmp_path / "s.json").read_text() == before, "used again"
    if what == "worked examples":
        shots = tmp_path / "shots.jsonl"
        shots.write_text(json.dumps({"question": "1 + 1", "answer": "2"}) + "\n")
        again.config = replaced(again.config, few_shot=str(shots))
    elif what == "plain prompts":
        again.tokenizer.chat_template = None  # what --plain-prompts does
    elif what == "chat template":
        again.tokenizer.chat_template = again.tokenizer.chat_template.replace("helpful", "careful")
    else:
        change_first_weight(start / "model.safetensors")
    sample_start(again, 0, 2, tmp_path / "s.json", Screen())
    assert json.loads((tmp_path / "s.json").read_text())["key"] != json.loads(before)["key"]


def test_checkers_are_sampled_in_other_ways(settings, other, tmp_path):
    (tmp_path / "rules.py").write_text(HAS_E)
    (tmp_path / "shots.jsonl").write_text(json.dumps({"prompt": "a letter?", "answer": "e"}) + "\n")
    settings = dataclasses.replace(settings, rm_model="none", reward_func=(f"{tmp_path / 'rules.py'}:has_e",))
    evaluator, (model,) = evaluator_of(other, settings, shots=worked_examples(str(tmp_path / "shots.jsonl")))
    ways = ["greedy", "greedy, cut off", "up to 12 tokens", "up to 12 tokens, cut off"]
    found = evaluator.evaluate(model, Screen()).variants
    assert list(found) == ways
    assert list(evaluator.evaluate_start(Screen()).variants) == [
        *ways,
        "1 worked examples",
        "1 worked examples, cut off",
    ]
    policy = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    tokenizer = evaluator.tokenizer
    greedy = []
    for example in evaluator.examples:
        ids = torch.tensor([encode_prompt(tokenizer, example.messages)])
        made = policy.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        greedy.append("e" in tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    assert found["greedy"] == pytest.approx(np.mean(greedy))
    plain, _ = evaluator_of(other, settings)
    assert plain.evaluate(model, Screen()).variants == {}


def test_worked_examples_are_messages_before_the_prompt(tmp_path, user_error):
    file = tmp_path / "shots.jsonl"
    rows = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2 + 2?", "answer": "4"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(m["role"], m["content"]) for m in worked_examples(str(file))] == [
        ("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?"), ("assistant", "4"),
    ]  # fmt: skip
    file.write_text(json.dumps({"prompt": "1 + 1?"}) + "\n")
    with user_error("--few-shot", "shots.jsonl"):
        worked_examples(str(file))

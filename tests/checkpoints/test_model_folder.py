"""Tests what the JSON files of a model folder tell about it, without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf.checkpoints.model_folder import reward_model_problems


@pytest.mark.parametrize(
    ("config", "start"),
    [
        ({"architectures": ["LlamaForCausalLM"], "num_labels": 1}, "a language model (LlamaForCausalLM)"),
        ({"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}, "3 outputs"),
        ({"num_labels": 2}, "2 outputs"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}, "2 outputs"),
    ],
)
def test_a_model_with_another_head_is_not_a_reward_model(config: dict, start: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": 0, **config}))
    save_file({"score.weight": torch.zeros(1, 2)}, tmp_path / "model.safetensors")
    (problem,) = reward_model_problems(str(tmp_path), "--rm-model")
    assert problem.startswith(start) and str(tmp_path) in problem

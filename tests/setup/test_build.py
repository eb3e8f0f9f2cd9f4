"""Tests that a trainer can be built from settings, and from prompts and rewards given in Python."""

from __future__ import annotations

import json

import pytest
import torch

from rlhf.setup.build import build_trainer, load_components
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError

CPU = torch.device("cpu")


def words(completions):
    return [float(len(text.split())) for text in completions]


def weights_after_an_update(config, components) -> torch.Tensor:
    trainer = build_trainer(config, components)
    trainer.update_step(1)
    return torch.cat([w.detach().flatten() for w in trainer.host.model.parameters()])


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_prompts_from_a_list_and_from_a_file_train_the_same_weights(configured, tmp_path, algorithm):
    """The weights are bit-identical, because a file and a list are split, encoded and checked in the same way."""
    prompts = [f"question {i}?" for i in range(60)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    config = configured("--prompts", file, *(["--K", 2] if algorithm == "grpo" else []), algorithm=algorithm)
    from_file = load_components(config, CPU, Screen())
    from_list = load_components(config, CPU, Screen(), prompts)
    ids = [[[p.ids for p in part] for part in (s.train, s.evaluation)] for s in (from_file.prompts, from_list.prompts)]
    assert ids[0] == ids[1] and len(ids[0][1]) > 1
    file_weights, list_weights = (weights_after_an_update(config, components) for components in (from_file, from_list))
    assert torch.equal(file_weights, list_weights)


def test_rewards_given_in_python_replace_the_configured_rewards(configured, tmp_path):
    config = configured("--rm-model", tmp_path / "nowhere", "--reward-func", "length_penalty")
    with pytest.raises(UserError, match="--rm-model"):
        load_components(config, CPU, Screen(), ["a cat?"])
    components = load_components(config, CPU, Screen(), ["a cat?"], rewards=[words], reward_weights=[0.5])
    assert str(components.rewards) == "0.5 x words" and components.reward_model is None
    assert str(load_components(config, CPU, Screen(), ["a cat?"], rewards=words).rewards) == "1 x words"


def test_eval_prompts_limits_evaluation_prompts_given_in_python(configured):
    config = configured("--eval-prompts", 3)
    held_out = [f"a held-out question {i}?" for i in range(5)]
    components = load_components(config, CPU, Screen(), ["a cat?"], held_out, rewards=[words])
    assert [p.example.question for p in components.prompts.evaluation] == held_out[:3]


def test_prompts_in_a_file_must_fill_a_batch_but_given_prompts_need_not(configured, tmp_path, user_error):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"question {i}?"}) for i in range(40)))
    config = configured("--prompts", file, "--max-prompts", 3)
    with user_error("(3)", "(4)"):
        load_components(config, CPU, Screen())
    assert len(load_components(config, CPU, Screen(), ["a cat?"], rewards=[words]).prompts.train) == 1

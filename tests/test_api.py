"""Tests the Python API: trainers from a config, held-out prompts, custom reward functions and callbacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf.algorithms.table import ALGORITHMS
from rlhf.api import make_trainer
from rlhf.config import make_config
from rlhf.utils.errors import UserError


def words(completions):
    return [float(len(text.split())) for text in completions]


class LearnedSum(torch.nn.Module):
    def forward(self, input_ids, attention_mask):
        return (input_ids * attention_mask).sum(1) / 1000


@pytest.fixture
def config(start_model, reward_folder, tmp_path):
    def make(algorithm="ppo", **settings):
        tiny = {"actor_model": str(start_model), "rm_model": str(reward_folder), "output": str(tmp_path / "run"),
                "batch_size": 2, "max_new_tokens": 6, "num_iterations": 2, "ppo_epochs": 1}  # fmt: skip
        return make_config(
            algorithm=algorithm, **{**tiny, **({"K": 2} if ALGORITHMS[algorithm].group_size > 1 else {}), **settings}
        )

    return make


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_trainer_from_a_config_and_a_list_of_prompts(config, algorithm, tmp_path):
    epochs = []
    trainer = make_trainer(
        config(algorithm, num_iterations=None, epochs=2),
        prompts=["What is a cat?", [{"role": "user", "content": "And a dog?"}]],
        rewards=[lambda completions, **_: [float(len(c)) for c in completions]],
        callbacks=[lambda epoch, metrics: epochs.append((epoch, metrics["rewards/mean"]))],
        evaluation_prompts=["What is a fox?"],
    )
    final = trainer.train()
    assert [e for e, _ in epochs] == [1, 2] and final["rewards/mean"] == epochs[-1][1]
    assert {"eval/score", "kl_divergence", "policy/loss"} <= set(final)
    trainer.save_model(tmp_path / "saved")
    trainer.load_model(tmp_path / "saved")
    assert trainer.evaluate()["eval/score"] == pytest.approx(final["eval/score"])
    assert not any(Path(trainer.config.run.output).iterdir()), "no files are written without a request"


def test_kl_controller_changes_beta_in_a_trainer_from_python(config):
    trainer = make_trainer(config(kl_coef=0.5, kl_horizon=4, kl_target="1/sequence"), prompts=["a cat?", "a dog?"],
                           rewards=[lambda completions, **_: [0.0] * len(completions)])  # fmt: skip
    trainer.train()
    assert trainer.kl_coef == pytest.approx(0.5 * (1 - 0.2 * 2 / 4) ** 2, rel=0.05), "the KL is far below its target"


def test_kl_coef_set_by_a_callback_is_used_in_the_next_update(config):
    class SetsKlCoef:
        def __init__(self, trainer=None):
            self.betas = []

        def on_train_begin(self, trainer):
            self.trainer = trainer

        def on_update_end(self, update, metrics):
            self.betas.append(metrics["kl_coef"])
            self.trainer.set_kl_coef(0.77)

    for schedule in ("fixed", "adaptive"):
        callback = SetsKlCoef()
        make_trainer(config(kl_coef=0.1, kl_schedule=schedule), ["a cat?"], [words], callbacks=[callback]).train()
        assert callback.betas == [0.1, 0.77]


def test_custom_rewards_have_weights(config):
    trainer = make_trainer(config(), ["a cat?"], rewards=[words, LearnedSum()], reward_weights=[1, 0.2])
    assert str(trainer.rewards) == "1 x words + 0.2 x LearnedSum"
    trainer.update_step(1)
    with pytest.raises(UserError, match="1 weights for 2 reward functions"):
        make_trainer(config(), ["a cat?"], rewards=[words, words], reward_weights=[1])


def test_a_tenth_of_the_prompts_is_held_out(config):
    prompts = [f"What is number {i}?" for i in range(200)]
    trainer = make_trainer(config(allow_weak_reward_model=True), prompts)
    assert 8 <= len(trainer.evaluation_prompts) <= 35
    assert len(trainer.evaluation_prompts) + len(trainer.train_prompts) == 200
    separate = make_trainer(config(), ["a cat?"], evaluation_prompts=["a dog?"])
    assert [p.example.question for p in separate.evaluation_prompts] == ["a dog?"]


def test_without_rewards_argument_the_configured_rewards_are_used(config):
    trainer = make_trainer(config(reward_func=["length_penalty"], reward_weights=[1, 0.5]), ["a cat?"])
    assert str(trainer.rewards) == "1 x reward_model + 0.5 x length_penalty"


def test_train_refuses_arguments_and_names_their_setting(config):
    trainer = make_trainer(config(), ["a cat?"], [words])
    with pytest.raises(UserError, match=r"train\(\) takes no arguments: .*num_epochs.*make_config\(epochs=\)"):
        trainer.train(["a cat?"], num_epochs=10)


def test_errors_in_prompts_and_settings(config):
    with pytest.raises(UserError, match="prompt is empty: prompt 2"):
        make_trainer(config(), ["fine", " "])
    with pytest.raises(UserError, match="no prompt has at most 2 tokens"):
        make_trainer(config(prompt_length=2), ["a long prompt"])
    with pytest.raises(UserError, match="unknown setting learning_rat: make_config.* Did you mean learning_rate"):
        make_config(learning_rat=1)
    with pytest.raises(UserError, match="batch_size is 0: make_config"):
        make_config(batch_size=0)

"""Tests the Python API: trainers from a config, held-out prompts, custom reward functions and callbacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf.algorithms.table import ALGORITHMS
from rlhf.api import make_trainer
from rlhf.config import make_config
from rlhf.run.python_run import OF_THE_SCRIPTS
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
    with pytest.raises(UserError, match=r"an empty list: evaluation_prompts\."):
        make_trainer(config(), ["a cat?"], evaluation_prompts=[])
    separate = make_trainer(config(), ["a cat?"], evaluation_prompts=["a dog?"])
    with pytest.raises(UserError, match=r"an empty list: evaluate\(\)\."):
        separate.evaluate([])
    assert [p.example.question for p in separate.evaluation_prompts] == ["a dog?"]


def test_without_rewards_argument_the_configured_rewards_are_used(config):
    trainer = make_trainer(config(reward_func=["length_penalty"], reward_weights=[1, 0.5]), ["a cat?"])
    assert str(trainer.rewards) == "1 x reward_model + 0.5 x length_penalty"


def test_rewards_are_functions_modules_or_names(config):
    trainer = make_trainer(config(), ["a cat?"], "length_penalty", eval_functions=["word_penalty", words])
    assert str(trainer.rewards) == "1 x length_penalty" and trainer.evaluator.functions.names == [
        "word_penalty",
        "words",
    ]
    with pytest.raises(UserError, match=r"function: rewards length_penalti\. Did you mean length_penalty"):
        make_trainer(config(), ["a cat?"], [words, "length_penalti"])
    for wrong in (0.5, [0.5]):
        with pytest.raises(UserError, match=r"not a function: rewards, 0\.5\. Give functions, nn\.Modules, or names"):
            make_trainer(config(), ["a cat?"], wrong)
    with pytest.raises(UserError, match=r"reward_weights without rewards: reward_weights=\. .*make_config\(reward_w"):
        make_trainer(config(), ["a cat?"], reward_weights=[0.5])


@pytest.mark.parametrize(
    "settings",
    [{"check": True}, {"dry_run": True}, {"scan": True}, {"replay": "folder"}, {"seeds": [1, 2]},
     {"seeds": [1, 2], "parallel": True}, {"sweep": ["learning_rate=1e-5,2e-5"]}],
)  # fmt: skip
def test_settings_that_only_the_scripts_use_are_refused(config, settings):
    given = config(**settings)
    with pytest.raises(UserError) as refused:
        make_trainer(given, ["a cat?"], [words])
    assert [line.split(":")[0] for line in refused.value.problems] == [
        f"only the scripts use {name}" for name in OF_THE_SCRIPTS if name in settings
    ]


def test_train_refuses_arguments_and_names_their_setting(config):
    trainer = make_trainer(config(), ["a cat?"], [words])
    with pytest.raises(UserError, match=r"train\(\) takes no arguments: prompts, num_epochs, callbacks\. ") as caught:
        trainer.train(["a cat?"], num_epochs=10, callbacks=[print])
    fix = "Write make_config(epochs=10), make_trainer(config, prompts=..., callbacks=...) and then train()"
    assert str(caught.value).endswith(fix)
    with pytest.raises(UserError, match=r"make_config\(resume=True\), make_trainer\(config, output=\.\.\.\) and"):
        trainer.train(resume_from_checkpoint="./checkpoint-10")
    for given, answer in (
        ({"resume_from_checkpoint": False}, "Write train()"),
        ({"progress": False}, "Write make_trainer(config, progress=...) and then train()"),
        ({"trial": 1}, "trial has no counterpart here. Write train()"),
        ({"beta": 0.1, "max_steps": 2}, "beta: Use kl_coef. Write make_config(num_iterations=2) and then train()"),
    ):
        with pytest.raises(UserError) as caught:
            trainer.train(**given)
        assert str(caught.value) == f"train() takes no arguments: {', '.join(given)}. {answer}"
    assert trainer.train()["eval/score"] > 0, "a refused call changes nothing"


def test_metrics_have_the_names_of_the_token_level_ppo_too(config):
    epochs = []
    trainer = make_trainer(
        config(), ["a cat?", "a dog?"], [words], callbacks=[lambda _, metrics: epochs.append(metrics)]
    )
    for metrics in (trainer.train(), *epochs):
        assert metrics["avg_reward"] == metrics["rewards/mean"] and metrics["policy_loss"] == metrics["policy/loss"]
        assert metrics["kl_div"] == metrics["kl_divergence"] and metrics["value_loss"] == metrics["value/loss"]
        assert "avg_reward" in metrics and metrics.get("avg_reward") == metrics["avg_reward"]
        assert not {"avg_reward", "policy_loss", "value_loss", "kl_div"} & set(metrics), "a logger writes each once"
        assert "entropy" not in metrics and metrics.get("entropy") is None and metrics.get("entropy", 1.0) == 1.0
    assert len(epochs) == 2
    group = make_trainer(config("grpo"), ["a cat?", "a dog?"], [words]).train()
    assert "value_loss" not in group
    with pytest.raises(KeyError, match="value_loss"):
        group["value_loss"]


def test_progress_is_printed_and_can_be_turned_off(config, start_model, tmp_path, capsys):
    tiny = {"actor_model": str(start_model), "output": str(tmp_path / "run"), "max_new_tokens": 6}
    tiny |= {"per_device_train_batch_size": 1, "num_iterations": 2, "ppo_epochs": 1}
    make_trainer(make_config(**tiny), ["a cat?"], [words]).train()
    printed = capsys.readouterr().out
    assert "PPO: 2 updates x 1 = 2 episodes" in printed and "num_iterations 2: 2 updates; TRL's" in printed
    assert "per_device_train_batch_size 1: 1 prompts per update" in printed
    assert "update 2/2 | score" in printed and "evaluation after update 2: score" in printed
    quiet = make_trainer(config(), ["a cat?", "a dog?"], [words], evaluation_prompts=["a fox?"], progress=False)
    quiet.train()
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("warning: ") for line in lines), "the tiny model never ends a completion"


@pytest.mark.parametrize("progress", [True, False])
def test_beta_is_doubled_if_the_kl_is_far_too_high(config, capsys, progress):
    settings = {"kl_target": "0.000001/sequence", "kl_coef": 0.5, "kl_horizon": 10**9, "learning_rate": 0.1}
    settings |= {"num_iterations": 4}
    trainer = make_trainer(config(**settings), ["a cat?", "a dog?"], [words], progress=progress)
    trainer.train()
    assert "times its target. Beta was doubled to" in capsys.readouterr().out and trainer.kl_coef >= 1.0
    with pytest.raises(UserError, match=r"a rollback needs checkpoints: rollback_on_kl\. Add output="):
        make_trainer(config(rollback_on_kl=True, save_every=1, keep=5), ["a cat?"], [words])


def test_an_error_is_one_line_in_a_notebook():
    assert UserError("a: b. c")._render_traceback_() == ["error: a: b. c"]
    assert UserError(["one", "two"])._render_traceback_() == ["error: one", "error: two"]


def test_errors_in_prompts_and_settings(config):
    with pytest.raises(UserError, match="prompt is empty: prompt 2"):
        make_trainer(config(), ["fine", " "])
    with pytest.raises(UserError, match="no prompt has at most 2 tokens"):
        make_trainer(config(prompt_length=2), ["a long prompt"])
    with pytest.raises(UserError, match="unknown setting learning_rat: make_config.* Did you mean learning_rate"):
        make_config(learning_rat=1)
    with pytest.raises(UserError, match="batch_size is 0: make_config"):
        make_config(batch_size=0)

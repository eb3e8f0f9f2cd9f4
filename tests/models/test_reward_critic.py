"""Tests of a critic that starts from the reward model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaForSequenceClassification

import train_ppo
from rlhf.checkpoints.model_folder import METRICS_FILE
from rlhf.checkpoints.run_record import RunRecord
from rlhf.models.packing import PackedMicroBatch
from rlhf.models.reward_critic import set_value_head
from rlhf.rewards.rewards import Rewards
from rlhf.setup.load_inputs import check_critic, load_inputs
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from tests.shapes import llama_config, make_base_model, make_reward_model, smollm2_tokenizer

FROM = ("--critic", "reward-model")
RECORD = {"accuracy": 0.9, "length_baseline": 0.5, "calibration": {"scale": {"mean": -0.4, "std": 0.25}}}


@pytest.fixture
def calibrated(tmp_path):
    """A reward model with other dimensions than the tiny start model, and calibrated scores."""
    folder = make_reward_model(tmp_path / "narrow")
    config = llama_config("tiny", len(smollm2_tokenizer()))
    config.num_labels = 1
    config.pad_token_id = 0
    config.num_hidden_layers = 1
    config.hidden_size = 48
    config.intermediate_size = 40
    config.num_attention_heads = 4
    config.num_key_value_heads = 2
    config.head_dim = 12
    torch.manual_seed(5)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    (folder / METRICS_FILE).write_text(json.dumps(RECORD))
    return folder


def values_and_scores(trainer) -> tuple[list[float], list[float]]:
    """Return the values at each token of a rollout, and the weighted calibrated scores of the same ids."""
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    model, weight = trainer.rewards.learned
    values = []
    sequences = []
    for row, (prompt, ids) in enumerate(zip(rollout.prompts, rollout.completions.rows(), strict=True)):
        for t in range(len(ids)):  # the value of token t is that of the text before it
            values.append(float(rollout.values[row, t]))
            sequences.append([*prompt.ids, *ids[:t]])
    return values, [weight * (raw + 0.4) / 0.25 for raw in model.raw_scores(sequences)]


KINDS = {
    "whole": (),
    "adapters": ("--use-lora",),
    "recomputed": ("--gradient-checkpointing",),
    "padded": ("--no-packed",),
    "weighted": ("--reward-weights", "3"),
    "with another reward": ("--reward-func", "length_penalty", "--reward-weights", "0.5", "0.1"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_first_values_are_the_scores_of_the_reward_model(build, calibrated, kind):
    trainer = build("--rm-model", calibrated, *FROM, *KINDS[kind])
    values, scores = values_and_scores(trainer)
    assert len(values) > 8 and max(values) - min(values) > 0.01
    assert_close(torch.tensor(values), torch.tensor(scores), rtol=0, atol=1e-4)
    assert trainer.actor.critic.config.hidden_size == 48 != trainer.actor.policy.config.hidden_size


def test_value_head_by_hand():
    """Raw score 2 x - 3 y, calibration mean 4 and std 2, weight 6: the value is 6 x - 9 y - 12."""
    config = llama_config("tiny", 30)
    config.num_labels = 1
    config.hidden_size = 2
    config.num_attention_heads = 1
    config.num_key_value_heads = 1
    classifier = LlamaForSequenceClassification(config)
    with torch.no_grad():
        classifier.score.weight.copy_(torch.tensor([[2.0, -3.0]]))
    head = torch.nn.Module()
    set_value_head(head, classifier, 4.0, 2.0, 6.0)
    assert head.summary.weight.tolist() == [[6, -9]] and head.summary.bias.tolist() == [-12]
    assert head.summary(torch.tensor([1.0, 1.0])).tolist() == [-15]


@pytest.mark.parametrize("kind", ["whole", "adapters", "recomputed"])
def test_training_changes_the_critic_and_not_the_reward_model(build, calibrated, tmp_path, kind):
    """A saved critic gives the same values to the bit."""
    flags = ("--rm-model", calibrated, *FROM, *KINDS[kind], "--learning-rate", "1e-2")
    trainer = build(*flags)
    model, _ = trainer.rewards.learned
    before = {name: w.clone() for name, w in model.model.state_dict().items()}
    critic = {name: w.detach().clone() for name, w in trainer.actor.critic.named_parameters()}
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    trainer.update_step(1)
    moved = {n for n, w in trainer.actor.critic.named_parameters() if not torch.equal(w, critic[n])}
    adapters = {n for n in critic if "lora_" in n}
    assert moved and (moved <= adapters if kind == "adapters" else not adapters)
    assert all(torch.equal(w, before[name]) for name, w in model.model.state_dict().items())
    assert not any(w.requires_grad for w in model.model.parameters())
    trainer.save_model(tmp_path / "saved")
    values = trainer.passes.logprobs(rollout.completions)[2]
    other = build(*flags)
    other.load_model(tmp_path / "saved")
    assert torch.equal(other.passes.logprobs(rollout.completions)[2], values)
    assert not torch.equal(values, rollout.values)


def test_dropout_of_the_reward_model_is_off(build, calibrated):
    """Otherwise the values of two passes in train mode would differ."""
    config = json.loads((calibrated / "config.json").read_text())
    (calibrated / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    trainer = build("--rm-model", calibrated, *FROM)
    trainer.host.model.train()
    completions = trainer.collector.collect(trainer.episodes_of(1), 1).completions
    trainer.host.model.train()
    micro_batch = PackedMicroBatch(completions, range(4))
    passes = [trainer.actor(micro_batch, 1.0).values for _ in range(2)]
    assert torch.equal(*passes)


def test_warm_up_trains_the_critic_only(build, calibrated):
    trainer = build("--rm-model", calibrated, *FROM, "--critic-warmup", 1, "--learning-rate", "1e-2")
    before = {n: w.detach().clone() for n, w in trainer.actor.named_parameters()}
    trainer.update_step(1)
    moved = {n for n, w in trainer.actor.named_parameters() if not torch.equal(w, before[n])}
    assert any(n.startswith("critic.") for n in moved) and not any(n.startswith("policy.") for n in moved)


def test_command_runs_and_resumes(run_flags, calibrated, tmp_path, capsys):
    train_ppo.main(run_flags("--rm-model", calibrated, *FROM, "--save-every", 1))
    printed = " ".join(capsys.readouterr().out.split())
    assert "separate backbone, from the reward model" in printed
    run = tmp_path / "run"
    saved = (run / "critic.safetensors").read_bytes()
    assert RunRecord.read(run).settings["critic"]["critic"] == "reward-model"
    shutil.rmtree(run / "checkpoint-2")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"status": "failed"}))
    train_ppo.main(["--resume", "--output", str(run)])
    assert (run / "critic.safetensors").read_bytes() == saved


def test_another_tokenizer_is_refused(build, calibrated, tmp_path):
    # without a chat template
    base = make_base_model(tmp_path / "base")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"question {i}?"}) for i in range(60)))
    words = "the reward model's tokenizer or chat template differs from the start model's: --critic reward-model"
    with pytest.raises(UserError, match=words):
        build("--rm-model", calibrated, *FROM, "--actor-model", base, "--prompts", prompts)


def test_rewards_without_a_reward_model_are_refused(build, calibrated, user_error):
    rewards = Rewards([lambda completions, **_: [1.0] * len(completions)], None, build().processing_class)
    with user_error():
        build("--rm-model", calibrated, *FROM, rewards=rewards)


def test_missing_lora_target_in_the_reward_model_is_refused(configured, calibrated, user_error):
    config = configured("--rm-model", calibrated, *FROM, "--use-lora")
    inputs = load_inputs(config, Screen())
    lora = replace(config.model, lora_targets=("c_attn",))
    with user_error("c_attn", "--lora-targets", "--rm-model"):
        check_critic(replace(config, model=lora), inputs.rewards.folder, inputs.start, inputs.prompts)

"""Tests the reward model's context limit: longer prompts are refused, longer training pairs skipped and counted."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForSequenceClassification

import evaluate_generations
import train_ppo
from reward_model.train import main as train_reward
from rlhf.data.chat_template import encode_prompt
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rewards import checks
from rlhf.rewards.checks import encodes_alike
from rlhf.rewards.reward_model import RewardModel
from rlhf.utils.errors import RunError
from tests.shapes import llama_config, smollm2_tokenizer

CPU = torch.device("cpu")


def short_reward_model(folder, context: int):
    """Makes a reward model with `context` positions. Rotary embeddings would accept longer input without an error."""
    tokenizer = smollm2_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    config = llama_config("tiny", len(tokenizer))
    config.num_labels = 1
    config.pad_token_id = 0
    config.max_position_embeddings = context
    torch.manual_seed(9)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def short(tmp_path):
    return short_reward_model(tmp_path / "short", 40)


@pytest.mark.parametrize("more", [[], ["--check"], ["--dry-run"]])
def test_prompts_beyond_the_context_are_refused_before_loading(run_flags, short, monkeypatch, more, user_error):
    monkeypatch.setattr(RewardModel, "load", lambda *_: pytest.fail("the weights were read"))
    with user_error(40, "--rm-model"):
        train_ppo.main([*run_flags("--max-new-tokens", 8), "--rm-model", str(short), *more])


def test_evaluation_beyond_the_context_is_refused(runs, short, tmp_path, user_error):
    flags = ["--model-path", str(runs["ppo", 1]), "--output", str(tmp_path / "out")]
    for flag in ("--rm-model", "--judge-model"):
        with user_error(40, flag):
            evaluate_generations.main([*flags, flag, str(short)])


def test_only_sequences_beyond_the_context_raise(short, user_error):
    model = RewardModel.load(str(short), CPU, None)
    assert len(model.raw_scores([[5] * 40, [6]])) == 2
    with user_error("1 of 2", 40, 41, kind=RunError):
        model.raw_scores([[5] * 41, [6]])


def test_pairs_beyond_the_base_models_context_are_skipped_and_counted(tmp_path, capsys, monkeypatch):
    """GPT-2 has learned positions: longer input is an index error on a CPU and a device assertion on a GPU."""
    tokenizer = smollm2_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=1, n_head=2, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"question": f"What is {i}?", "chosen": "yes " * (40 if i % 4 == 0 else 2), "rejected": "no"}
            for i in range(80)]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--base-model", tmp_path / "base", "--actor-model", tmp_path / "base", "--pairs",
             tmp_path / "pairs.jsonl", "--rm-output", tmp_path / "judge", "--split", "80/10/10",
             "--max-new-tokens", 8]  # fmt: skip
    monkeypatch.setattr(checks, "weakness", lambda _: None)
    train_reward([str(word) for word in flags])
    output = capsys.readouterr().out
    assert "pairs longer than 64 tokens (the base model's context)" in output
    assert (tmp_path / "judge" / "metrics.json").is_file()


def test_prompts_are_encoded_again_only_for_another_tokenizer_or_chat_template(start_model, reward_folder):
    start, same, other = (load_tokenizer(str(folder)) for folder in (start_model, reward_folder, reward_folder))
    messages = ({"role": "user", "content": "the capital of France?"},)
    assert encodes_alike(same, start) and encode_prompt(same, messages) == encode_prompt(start, messages)
    other.chat_template = other.chat_template.replace("assistant", "helper")
    assert not encodes_alike(other, start)
    same.add_tokens(["capital"])
    assert not encodes_alike(same, start)

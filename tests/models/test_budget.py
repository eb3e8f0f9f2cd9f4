"""Tests the chunk and micro-batch budgets of each device type."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlhf.models.budget import BUDGETS, budget_of
from rlhf.settings.fields import settings_of
from rlhf.settings.training import Config
from rlhf.setup.fit import SLOTS, TOKENS
from rlhf.setup.plan import batch_line

CPU = torch.device("cpu")
GPU = torch.device("cuda")
MiB = 2**20


def test_device_type_selects_the_budget():
    assert budget_of(torch.device("cuda", 1)) == budget_of(GPU) == BUDGETS["cuda"]
    assert budget_of(torch.device("meta")) == budget_of(CPU) == BUDGETS["cpu"]


def test_logits_chunk_has_the_documented_size():
    assert budget_of(CPU).logits_per_chunk * torch.bfloat16.itemsize == 64 * MiB
    assert budget_of(GPU).logits_per_chunk * torch.bfloat16.itemsize == 256 * MiB
    for device in (CPU, GPU):
        assert budget_of(device).floats_per_chunk <= budget_of(device).logits_per_chunk


@pytest.mark.parametrize(("device", "tokens"), [(CPU, "2,048"), (GPU, "16,384")])
def test_plan_prints_the_budget_of_the_device(configured, device, tokens):
    assert batch_line(configured(), 1, device).endswith(f"micro-batch: at most {tokens} tokens")


def test_help_texts_contain_the_budget_numbers():
    """The settings do not import torch, so their help texts repeat the numbers."""
    settings = settings_of(Config)
    cpu = budget_of(CPU)
    gpu = budget_of(GPU)
    tokens = f"up to {gpu.tokens_per_micro_batch:,}; {cpu.tokens_per_micro_batch:,} on a CPU"
    assert tokens in settings["micro_batch_tokens"].help and gpu.tokens_per_micro_batch == TOKENS[0]
    assert f"up to {SLOTS[0]:,}; {cpu.rollout_slots} on a CPU" in settings["rollout_slots"].help


def test_settings_of_a_run_replace_numbers_of_the_budget(configured):
    """An evaluation samples as many completions together as there are slots: 32 to 256."""
    found = budget_of(GPU, configured("--micro-batch-tokens", 2_048, "--rollout-slots", 64))
    assert (found.tokens_per_micro_batch, found.rollout_slots, found.eval_batch_size) == (2_048, 64, 64)
    assert [budget_of(GPU, configured("--rollout-slots", n)).eval_batch_size for n in (8, 1_024)] == [32, 256]
    assert budget_of(CPU, configured()) == BUDGETS["cpu"]


def test_texts_scored_together_on_a_gpu_follow_from_their_length(configured):
    found = budget_of(GPU, configured("--micro-batch-tokens", 16_384, "--rollout-slots", 1_024))
    assert [found.scored_together(n) for n in (32, 64, 128, 256, 1_024)] == [256, 256, 128, 64, 32]
    found = budget_of(GPU, configured("--micro-batch-tokens", 4_096, "--rollout-slots", 64))
    assert [found.scored_together(n) for n in (32, 64, 128)] == [64, 64, 32]
    assert [budget_of(CPU).scored_together(n) for n in (1, 1_024)] == [32, 32]


def test_micro_batches_respect_the_token_budget(build, monkeypatch):
    few = dataclasses.replace(BUDGETS["cpu"], tokens_per_micro_batch=1)
    monkeypatch.setitem(BUDGETS, "cpu", few)
    trainer = build()
    completions = trainer.collector.collect(trainer.episodes_of(1), 1).completions
    parts = trainer.passes.split(completions, range(4))
    assert sorted(list(part) for part in parts) == [[0], [1], [2], [3]]

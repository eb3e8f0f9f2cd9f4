"""Compares greedy sampling on real weights with transformers' generate."""

from __future__ import annotations

import pytest
import torch

from rlhf.data.prompts import ids_alone
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.settings.training import SamplingSettings
from tests.real.conftest import QUESTIONS
from tests.real.plain import chat_ids

pytestmark = pytest.mark.ci
LENGTH = 64


def test_greedy_completions_equal_generate(plain_model, plain_tokenizer):
    """8 chats, 64 tokens, with fewer slots than chats. Top-k 1 is greedy for any random numbers."""
    eos = plain_tokenizer.eos_token_id
    prompts = [chat_ids(plain_tokenizer, question) for question in QUESTIONS]
    found = sample_completions(
        plain_model, [ids_alone(p) for p in prompts], uniform_noise(1, 1, "rollout", range(8), LENGTH),
        SamplingSettings(LENGTH, 0.7, top_k=1), eos=eos, pad=0, device=torch.device("cpu"), slots=5,
    )  # fmt: skip
    plain_tokenizer.padding_side = "left"
    inputs = plain_tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    whole = plain_model.generate(**inputs, do_sample=False, max_new_tokens=LENGTH, eos_token_id=eos, pad_token_id=0)
    expected = []
    for row in whole[:, inputs["input_ids"].shape[1] :].tolist():
        expected.append(row[: row.index(eos) + 1] if eos in row else row)
    assert found.rows() == expected
    lengths = {len(row) for row in expected}
    assert LENGTH in lengths and len(lengths) > 2, "some completions must end early, and some must be cut off"

"""Trains real weights for one update, saves them, and loads the folder with plain transformers and peft."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_grpo
from tests.real.conftest import QUESTIONS
from tests.real.plain import chat_ids

pytestmark = pytest.mark.ci
TEXTS = (*QUESTIONS, "In 1984, 37% of 2,048 – “naïve” – cafés closed.\n\n\tdef f(x): return x**2", "<|im_end|> 日本")


@pytest.fixture
def ids(plain_tokenizer) -> torch.Tensor:
    return torch.tensor([chat_ids(plain_tokenizer, QUESTIONS[2])])


def load(folder) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def test_plain_transformers_loads_the_saved_model(real_trainer, plain_model, plain_tokenizer, large_folder, ids):
    """The logits are bit-identical, and the tokenizer gives the start model's ids."""
    trainer = real_trainer()
    with torch.enable_grad():
        trainer.update_step(1)
    trainer.save_model(large_folder / "saved")
    trained = trainer.host.model.policy.eval()(ids).logits
    loaded = load(large_folder / "saved")
    assert torch.equal(loaded(ids).logits, trained)
    assert float((trained - plain_model(ids).logits).abs().max()) > 1e-2, "the update must change the logits"
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(large_folder / "saved")
    for text in TEXTS:
        assert tokenizer(text).input_ids == plain_tokenizer(text).input_ids, text
        assert chat_ids(tokenizer, text) == chat_ids(plain_tokenizer, text), text


@torch.no_grad()
def test_merged_model_equals_the_adapter(real_flags, smollm2, plain_model, large_folder, ids):
    """Plain transformers loads RUN/merged, and its logits are those of the adapter on its base, within 1e-3."""
    with torch.enable_grad():
        train_grpo.main(real_flags("--use-lora", "--merge-lora", "--K", 2, "--batch-size", 2, "--learning-rate", 1e-3))
    start = plain_model(ids).logits
    adapted = PeftModel.from_pretrained(load(smollm2), large_folder / "run").eval()(ids).logits
    merged = load(large_folder / "run" / "merged")(ids).logits
    assert_close(merged, adapted, rtol=0, atol=1e-3)
    assert float((adapted - start).abs().max()) > 0.05, "the update must change the logits"

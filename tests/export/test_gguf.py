"""Tests the export to GGUF: transformers' own reader must find the run's model and tokenizer in the file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import export_model
from rlhf.checkpoints.model_folder import find_model
from rlhf.data.tokenizer import load_tokenizer
from rlhf.export.gguf import WORDS
from tests.shapes import smollm2_tokenizer

gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 300, 17, 1, 4, 200, 301]])
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 410}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 3e4}),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=128),
}
WORDS_OF = {"llama": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]}
QWEN = [
    pre_tokenizers.Split(Regex(WORDS), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
]
TEXTS = ["What is 12345 + 678?", "It's  a\n\n\ttest: naïve, 日本!", "<|im_start|>user\nx<|im_end|>\n"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The file is read through a new cache."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


@pytest.fixture
def finished(runs, tmp_path):
    """Return a function that copies a finished run of an algorithm. GRPO's run has an adapter."""
    return lambda algorithm: Path(shutil.copytree(runs[algorithm, 1], tmp_path / f"My {algorithm} run"))


def put_model(folder: Path, config) -> torch.nn.Module:
    """Replaces a model in its folder by one of another family, whose norms and biases are random, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0, 0.2)
    tokenizer = smollm2_tokenizer()
    words = WORDS_OF.get(config.model_type, QWEN)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def export_run(run: Path, *flags: object) -> Path:
    export_model.main([str(run), "--to", "gguf", *map(str, flags)])
    (file,) = (run / "gguf").glob("*.gguf")
    return file


@torch.no_grad()
def logprobs(model) -> torch.Tensor:
    return model(IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_model_and_tokenizer(finished, family, capsys):
    run = finished("ppo")
    model = put_model(run, FAMILIES[family])
    file = export_run(run)
    read = find_model(str(file), "--actor-model")
    assert_close(logprobs(AutoModelForCausalLM.from_pretrained(read)), logprobs(model), rtol=0, atol=5e-3)
    one, other = load_tokenizer(str(run)), load_tokenizer(str(read))
    assert [other(text).input_ids for text in TEXTS] == [one(text).input_ids for text in TEXTS]
    assert other.chat_template == one.chat_template
    assert (other.eos_token, other.bos_token, other.pad_token) == (one.eos_token, one.bos_token, one.pad_token)
    mean, largest = map(float, re.search(r"mean (\S+), largest (\S+) nats", capsys.readouterr().out).groups())
    assert 0 < mean < largest < 0.01

"""Tests of the numbers of weights that a plan reads from a model's files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from rlhf.setup import shape
from rlhf.setup.shape import adapter_weights, parameters_in, shape_of, weights_of
from rlhf.utils import hub

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "vocab_size": 60, "head_dim": 8}  # fmt: skip
CONFIGS = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=40),
}


@pytest.fixture(params=CONFIGS)
def saved(request, tmp_path):
    """Return a model and its folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_weights_are_those_of_the_loaded_model(saved):
    model, folder = saved
    found = shape_of(str(folder))
    assert parameters_in(weights_of(str(folder))) == found.parameters == model.num_parameters()
    assert (found.layers, found.hidden, found.vocabulary, found.heads) == (2, 32, 60, 4)


def test_copies_and_buffers_in_the_file_are_not_counted(saved):
    """Qwen 3's files contain the tied head, GPT-2's its attention masks, old Llama files their frequencies."""
    model, folder = saved
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        "h.0.attn.bias": torch.ones(1, 1, 40, 40),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    if model.config.tie_word_embeddings and "model.embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert parameters_in(weights_of(str(folder))) == model.num_parameters()


def test_adapters_of_every_linear_layer(saved):
    from peft import LoraConfig, get_peft_model

    model, folder = saved
    expected = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(w.numel() for w in expected.parameters() if w.requires_grad)
    assert adapter_weights(weights_of(str(folder)), 3, ["all-linear"]) == trained


def test_hub_models(saved, monkeypatch):
    """From the local cache, from the headers on the hub, or from the config alone."""
    model, folder = saved
    expected = parameters_in(weights_of(str(folder)))
    monkeypatch.setattr(shape, "config_values", lambda _: model.config.to_dict())
    monkeypatch.setattr(hub, "cached_folder", lambda _: folder)
    assert parameters_in(weights_of("someone/a-model")) == expected
    monkeypatch.setattr(hub, "cached_folder", lambda _: None)
    headers = {name: list(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    monkeypatch.setattr(hub, "tensors_on_hub", lambda _: headers)
    assert parameters_in(weights_of("someone/a-model")) == expected
    monkeypatch.setattr(hub, "tensors_on_hub", lambda _: {})
    monkeypatch.setattr(shape, "load_config", lambda _: model.config)
    head = 0 if model.config.tie_word_embeddings else 60 * 32
    assert parameters_in(weights_of("someone/a-model")) == expected - head

"""The dimensions of a transformer, from its config: numbers of weights, and bytes of its activations.

The activations are those of rlhf.models.llama. For other architectures they are an estimate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf.checkpoints.model_folder import ALL_LINEAR, tensors_of
from rlhf.checkpoints.trust import readable
from rlhf.data.tokenizer import TYPES, config_values, load_config, values_of
from rlhf.models.logprobs import base_of
from rlhf.utils.errors import UserError

FLOAT = 4  # bytes of a float32


@dataclass(frozen=True)
class Row:
    """The tokens of a micro-batch."""

    episodes: int
    completion: int  # completion tokens
    tokens: int
    padded: int  # tokens if each episode had the length of the longest one: attention gathers such rectangles

    @classmethod
    def of(cls, prompts: Sequence[int], length: int, packed: bool, shared: int = 1) -> Row:
        """Return the row of completions of `length` tokens to prompts with these numbers of tokens, in descending
        order. `shared` neighbours have the same prompt, which is then there once."""
        count = len(prompts)
        padded = count * (max(prompts) + length)
        if not packed:
            return cls(count, count * length, padded, padded)
        tokens = sum(prompts[::shared]) + count * (length - 1)  # nothing is predicted from a completion's last token
        return cls(count, count * length, tokens, padded)


@dataclass(frozen=True)
class Shape:
    """Dimensions count features of one token."""

    layers: int
    hidden: int
    inner: int  # width of the feed-forward part
    q: int  # queries of all heads together
    kv: int  # keys of all key-value heads together; the values have the same size
    heads: int
    vocabulary: int
    tied: bool  # the head is the embedding matrix
    parameters: int  # all weights

    @classmethod
    def of(cls, config: Any, parameters: int) -> Shape:
        """Return the dimensions in a transformers config or a dict of config.json. `parameters` is the number of
        weights."""
        values = config if isinstance(config, dict) else values_of(config)
        heads = values["num_attention_heads"]
        hidden = values["hidden_size"]
        size = values.get("head_dim") or hidden // heads
        return cls(
            layers=values["num_hidden_layers"],
            hidden=hidden,
            inner=values.get("intermediate_size") or 4 * hidden,
            q=heads * size,
            kv=(values.get("num_key_value_heads") or heads) * size,
            heads=heads,
            vocabulary=values["vocab_size"],
            tied=bool(values.get("tie_word_embeddings")),
            parameters=parameters,
        )

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The inputs and outputs of each linear layer of a transformer layer, by its name."""
        return {
            "q_proj": (self.hidden, self.q),
            "k_proj": (self.hidden, self.kv),
            "v_proj": (self.hidden, self.kv),
            "o_proj": (self.q, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }

    @property
    def matrices(self) -> int:
        """Weights of the linear layers, without the head."""
        return self.parameters - self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def linear(self) -> int:
        """Weights that are stored in 16 bits if they are frozen: those of the linear layers, and a head that is not
        tied to the embeddings."""
        return self.matrices + (0 if self.tied else self.vocabulary * self.hidden)

    def adapted(self, targets: Collection[str]) -> list[str]:
        """Return the names of the linear layers of a layer that have adapters."""
        return [name for name in self.sizes if name in targets or ALL_LINEAR in targets]

    def adapters(self, rank: int, targets: Collection[str]) -> int:
        """Return the number of weights of LoRA adapters."""
        return self.layers * rank * sum(sum(self.sizes[name]) for name in self.adapted(targets))

    def saved_by_layer(self, row: Row, element: int, attention: int, targets: Collection[str] | None) -> int:
        """Return the bytes that one layer saves for the backward pass over a row, rounded up.

        Args:
            row: the tokens.
            element: bytes of a number in linear layers.
            attention: bytes of a number in attention.
            targets: the adapted layers; None: all weights are trained.
        """
        adapted = ["o_proj"] if targets is None else self.adapted(targets)  # the others compute their inputs again
        read = sum(self.sizes[name][0] for name in adapted)
        # the inputs of both norms; gate and up; the inputs of linear layers
        size = 2 * self.hidden * FLOAT + (2 * self.inner + read) * element
        # queries, output, and keys and values as if each query head had its own
        return row.tokens * size + row.padded * 4 * self.q * attention

    def forward_peak(self, tokens: int, element: int) -> int:
        """Return the peak bytes of a pass without gradients: hidden states, and the largest tensors of a layer."""
        feed_forward = 3 * self.inner * element
        attention = (self.q + 2 * self.kv) * element + 3 * self.q * FLOAT
        return tokens * (3 * self.hidden * FLOAT + max(feed_forward, attention))


# --- numbers of weights ----------------------------------------------------------------------------------------------

Tensors = Mapping[str, Sequence[int]]  # name -> dimensions


def weights_of(model: str) -> Tensors:
    """Return the weights in the safetensors files of a folder or of a model on the hub, from the files' headers.
    Raises UserError if a folder has none.

    Files also contain tensors that are not separate weights and are not returned: a copy of tied embeddings (Qwen
    3), attention masks (GPT-2) and frequencies (Llama 2).
    """
    tensors = tensors_of(Path(model)) if Path(model).is_dir() else _tensors_of_hub_model(model)
    tied = config_values(model).get("tie_word_embeddings") and any("embed_tokens" in name for name in tensors)
    return {
        name: size
        for name, size in tensors.items()
        if not (tied and name == "lm_head.weight")
        and not (name.endswith((".attn.bias", ".masked_bias")) and len(size) != 1)
        and not name.endswith("inv_freq")
    }


def _tensors_of_hub_model(model: str) -> Tensors:
    """Return the weights of a model on the hub: from the local cache, otherwise from the headers on the hub, otherwise
    (weights of another format) from the same network on torch's meta device."""
    from rlhf.utils.hub import cached_folder, tensors_on_hub

    cached = cached_folder(model)
    if cached is not None:
        with contextlib.suppress(UserError):  # only a part of the model is in the cache
            return tensors_of(cached)
    if found := tensors_on_hub(model):
        return found
    from transformers import AutoModel

    with torch.device("meta"):
        network = AutoModel.from_config(load_config(model), trust_remote_code=False)
    return {name: tuple(weight.shape) for name, weight in network.named_parameters()}


def shape_of(model: str) -> Shape:
    """Return the dimensions of the model in a folder or on the hub."""
    return Shape.of(config_values(model), parameters_in(weights_of(model)))


def is_packable(model: str) -> bool:
    """Return whether episodes of the model in a folder or on the hub can be packed, as
    `rlhf.models.attention.packable` and the self-test decide when it is loaded."""
    if config_values(model).get("model_type") in TYPES:
        return True
    from transformers import AutoModelForCausalLM  # takes two seconds

    from rlhf.models.attention import packable

    with readable(model), torch.device("meta"):
        network = AutoModelForCausalLM.from_config(load_config(model), trust_remote_code=False)
    has_sinks = any(name.endswith(".sinks") for name, _ in network.named_parameters())  # GPT-OSS fails the self-test
    return packable(network) and not has_sinks


def parameters_in(tensors: Tensors) -> int:
    """Return the number of weights in a model's files."""
    return sum(map(prod, tensors.values()))


def adapter_weights(tensors: Tensors, rank: int, targets: Collection[str]) -> int:
    """Return the number of weights of LoRA adapters for a model with these tensors. `targets` are names of modules,
    or "all-linear": every linear layer except the head."""
    adapted = 0
    for name, size in tensors.items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        outside = "embed" in module or module in ("wte", "wpe", "lm_head")  # embeddings and the head
        is_linear = len(size) == 2 and name.endswith(".weight") and not outside
        if module in targets or (ALL_LINEAR in targets and is_linear):
            adapted += rank * sum(size) * (len(size) == 2)
    return adapted


def base_parameters(policy: nn.Module) -> int:
    """Return the number of the start model's parameters, without adapters. A 4-bit weight counts as one."""
    adapters = sum(w.numel() for name, w in policy.named_parameters() if "lora_" in name)
    return base_of(policy).num_parameters() - adapters

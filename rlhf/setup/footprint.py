"""Computes the size of a transformer's tensors from shapes: its weights, and the activations saved for backward.

The sums list every tensor that autograd saves in a layer of the Llama family (Llama, SmolLM2, Mistral, Qwen).
tests/setup/test_memory.py counts the same tensors with hooks. For other architectures the sums are an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.logprobs import backbone_of
from rlhf.models.packing import MicroBatch, PackedMicroBatch
from rlhf.models.reference import store_frozen_weights
from rlhf.models.reward_critic import critic_of_reward_model
from rlhf.settings.training import Config

FLOAT = 4  # bytes of a float32
QKV, GATE_UP, OUT, DOWN = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), "o_proj", "down_proj"


def _first_layer(model: PreTrainedModel, layers: int) -> nn.Module:
    """Return the first transformer layer: the first entry of the first ModuleList with `layers` modules."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers)[0]


# --- weights ---------------------------------------------------------------------------------------------------------


def weights_of(model: nn.Module, trained: bool | None = None) -> int:
    """Return the bytes of all weights, or only of the trained or frozen ones. A shared weight counts once."""
    return sum(_stored(w) for w in model.parameters() if trained is None or w.requires_grad == trained)


def _stored(weight: Tensor) -> int:
    state = getattr(weight, "quant_state", None)  # only bitsandbytes' 4-bit weights have it
    scales = 0 if state is None else state.absmax.nbytes  # one scale per block
    return weight.nbytes + scales


MIN_8BIT, BLOCK_8BIT = 4096, 256  # bitsandbytes: smaller tensors have float32 moments; weights per scale


def moments_8bit(model: nn.Module) -> int:
    """Return the bytes of the moments of bitsandbytes' 8-bit AdamW for the trained weights of a model.

    Each of the two moments has one byte per weight, and one float32 scale per block. Embeddings and small tensors have
    float32 moments, as in transformers' Trainer.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    total = 0
    for weight in model.parameters():
        if weight.requires_grad and (weight.numel() < MIN_8BIT or id(weight) in embeddings):
            total += 2 * FLOAT * weight.numel()
        elif weight.requires_grad:
            total += 2 * (weight.numel() + FLOAT * -(-weight.numel() // BLOCK_8BIT))
    return total


def linear_floats(model: PreTrainedModel) -> Iterator[Tensor]:
    """Yield the float32 weights of linear layers, which autocast casts. A head tied to the embeddings is excluded."""
    tied = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not tied and module.weight.dtype == torch.float32:
            yield module.weight


def second_network(
    config: Config,
    policy: PreTrainedModel | PeftModel,
    reward_model: PreTrainedModel | None,
    dtype: torch.dtype | None,
) -> PreTrainedModel | None:
    """Return the backbone of a critic that is a second network, or a model of the same shape without weights; None if
    the critic shares the policy's backbone."""
    if not config.critic_from_reward_model or reward_model is None:
        return backbone_of(policy) if config.separate_critic else None
    with torch.device("meta"):
        copied = type(reward_model)(reward_model.config).requires_grad_(False)
    store_frozen_weights(copied, dtype)
    return critic_of_reward_model(config, copied)


# --- passes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """The dimensions of a transformer, and which weights are trained. Dimensions count features of one token."""

    layers: int
    hidden: int
    inner: int  # width of the feed-forward part
    heads: int
    q_dim: int  # queries of all heads together
    kv_dim: int  # keys of all key-value heads together; the values have the same size
    vocabulary: int
    norms: tuple[tuple[int, int], ...]  # per norm of a layer: normalised vectors per token, features of all of them
    whole: bool  # all weights are trained
    adapters: dict[
        str, tuple[int, int]
    ]  # linear layer of one transformer layer -> rank and output size of its adapter
    element: int  # bytes of a number in the forward pass: 4, or 2 under autocast
    attention_element: int  # the same for attention; always 4 on a CPU
    inner_element: int  # the same for the feed-forward part; 4-bit layers return the input's type, float32
    checkpointing: bool
    dropout: bool  # dropout on the adapters' inputs
    dropout_mask_bytes: int  # per number: a float on a CPU, a boolean on a GPU

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype | None, checkpointing: bool = False) -> Network:
        """Return the dimensions of a causal LM or a classifier with its adapters.

        Args:
            dtype: the autocast type of the forward pass. None: float32.
            checkpointing: gradient checkpointing is on.
        """
        c = model.config.get_text_config()
        heads = c.num_attention_heads
        size = getattr(c, "head_dim", None) or c.hidden_size // heads
        q_dim, kv_dim = heads * size, (getattr(c, "num_key_value_heads", None) or heads) * size
        layer = _first_layer(model, c.num_hidden_layers)
        adapted = [(name.split(".")[-1], m) for name, m in layer.named_modules() if isinstance(m, LoraLayer)]
        by_head = {"q_norm": (heads, q_dim), "k_norm": (kv_dim // size, kv_dim)}  # Qwen3 normalises each head
        norms = [name.split(".")[-1] for name, m in layer.named_modules() if type(m).__name__.endswith("Norm")]
        embeddings, element = model.get_input_embeddings(), FLOAT if dtype is None else dtype.itemsize
        on_cpu = embeddings.weight.device.type == "cpu"
        quantized = any(not w.is_floating_point() for w in layer.parameters())
        return cls(
            layers=c.num_hidden_layers,
            hidden=c.hidden_size,
            inner=getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
            heads=heads,
            q_dim=q_dim,
            kv_dim=kv_dim,
            vocabulary=embeddings.num_embeddings,
            norms=tuple(by_head.get(name, (1, c.hidden_size)) for name in norms),
            whole=embeddings.weight.requires_grad,
            adapters={name: (m.r["default"], m.out_features) for name, m in adapted},
            element=element,
            attention_element=FLOAT if on_cpu else element,
            inner_element=FLOAT if quantized else element,
            checkpointing=checkpointing,
            dropout=any(isinstance(d, nn.Dropout) and d.p > 0 for _, m in adapted for d in m.lora_dropout.values()),
            dropout_mask_bytes=FLOAT if on_cpu else 1,
        )

    @property
    def rounded(self) -> bool:
        """True if the forward pass runs under autocast: linear layers in 16 bits, norms and residuals in 32."""
        return self.element < FLOAT

    def saved_activations(self, micro_batch: MicroBatch) -> int:
        """Return the bytes that all layers save for the backward pass."""
        tokens = micro_batch.ids.numel()
        ends = 2 * tokens * self.hidden * FLOAT  # the last norm's input, and its normalised input
        if self.checkpointing:  # each layer saves its input
            return ends + self.layers * tokens * self.hidden * FLOAT
        return ends + self.layers * self.saved_by_layer(micro_batch)

    def saved_by_layer(self, micro_batch: MicroBatch) -> int:
        """Return the bytes that one layer saves for the backward pass without gradient checkpointing."""
        tokens, trained = micro_batch.ids.numel(), (*QKV, *GATE_UP, OUT, DOWN) if self.whole else tuple(self.adapters)
        # A norm saves its input and the reciprocal root mean square; if its gain is trained, the normalised input too.
        norms = sum(size * (2 if self.whole else 1) + number for number, size in self.norms) * FLOAT
        # Inputs of trained linear layers: q, k and v share one tensor, gate and up share another.
        reading = [name for name in trained if name not in (OUT, DOWN)]
        apart = self.rounded or self.dropout  # autocast and dropout make a separate copy for each layer
        read = self.hidden * (len(reading) if apart else len({name in GATE_UP for name in reading}))
        if DOWN in trained:
            read += self.inner
        own = self.rounded and (not self.whole or self.attention_element != self.element)
        if OUT in trained and (gathered(micro_batch) or own or self.dropout):  # otherwise attention has saved it
            read += self.q_dim
        # The feed-forward part saves the gate before and after its activation, and up.
        inner = 3 * self.inner * self.inner_element
        ranks = sum(rank for rank, _ in self.adapters.values())
        dropped = self.dropout_mask_bytes * read if self.dropout else 0
        sums = norms + (read + ranks) * self.element + inner + dropped
        return tokens * sums + self._saved_by_attention(micro_batch)

    def _saved_by_attention(self, micro_batch: MicroBatch) -> int:
        """Return the bytes of queries, keys, values, output and softmax normaliser of each attention call."""
        total = 0
        for rows, queries, keys, masked in rectangles(micro_batch):
            total += rows * queries * (2 * self.q_dim * self.attention_element + self.heads * FLOAT)
            # With a mask, key and value heads are repeated for each query head, and the mask becomes floats.
            total += rows * keys * 2 * (self.q_dim if masked else self.kv_dim) * self.attention_element
            total += rows * queries * keys * self.attention_element if masked else 0
        return total

    def freed_in_forward(self, tokens: int) -> int:
        """Return the bytes that all layers allocate in the forward pass and free again."""
        # each norm's squares, and its later tensors that are not saved
        norms = sum(size for _, size in self.norms) * FLOAT * (1 + self.rounded if self.whole else 3)
        # queries and keys before the rotary embedding, and four intermediate tensors (one of half the size)
        turned = (self.q_dim + self.kv_dim) * (self.element + 3.5 * FLOAT + self.rounded * FLOAT)
        outputs = 2 * self.hidden * self.element
        # an adapter's output, the scaled output, and its sum with the linear layer's output
        adapted = 3 * sum(output for _, output in self.adapters.values()) * self.element
        return int(self.layers * tokens * (norms + turned + outputs + adapted))

    def forward_peak(self, tokens: int) -> int:
        """Return the peak bytes of a pass without gradients: four hidden states and three tensors of a layer."""
        feed_forward = 3 * self.inner * self.inner_element
        attention = (self.q_dim + 2 * self.kv_dim) * self.element + 3 * self.q_dim * FLOAT
        return tokens * (4 * self.hidden * FLOAT + max(feed_forward, attention))

    def backward_peak(self, tokens: int) -> int:
        """Return the peak bytes of a layer's backward pass: gradients of three inner tensors and two hidden states."""
        return tokens * (3 * self.inner * self.inner_element + 2 * self.hidden * FLOAT)

    def cache(self, tokens: int) -> int:
        """Return the bytes of the KV cache for this number of tokens."""
        return self.layers * tokens * self.kv_dim * 2 * self.element


def critic_network(second: PreTrainedModel, policy: Network, dtype: torch.dtype | None) -> Network:
    """Return the dimensions of a critic's backbone, which may have no weights, on the device of the policy."""
    own = Network.of(second, dtype, policy.checkpointing)
    on_device = {"attention_element": policy.attention_element, "dropout_mask_bytes": policy.dropout_mask_bytes}
    return replace(own, **on_device)


def rectangles(micro_batch: MicroBatch) -> list[tuple[int, int, int, bool]]:
    """Return the attention calls of one layer as (rows, queries per row, keys per row, needs a mask)."""
    if isinstance(micro_batch, PackedMicroBatch):
        return [(*s.shape, s.mask(None, micro_batch.ids.device) is not None) for s in micro_batch.layout.segments]
    rows, width = micro_batch.ids.shape
    return [(rows, width, width, not bool(micro_batch.attention.all()))]


def gathered(micro_batch: MicroBatch) -> bool:
    """True if attention's output is copied, to restore the order of the tokens or to make it contiguous."""
    return not isinstance(micro_batch, PackedMicroBatch) or micro_batch.layout.inverse_index is not None

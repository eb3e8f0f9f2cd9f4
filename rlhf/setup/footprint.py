"""What a transformer's tensors take, from shapes alone: its weights, and what a pass keeps for the backward pass.

The sums name every tensor that torch's autograd keeps in a layer of the Llama family (Llama, SmolLM2, Mistral, Qwen);
tests/setup/test_memory.py counts the same tensors with hooks. For other architectures they are an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.packing import MicroBatch, PackedMicroBatch

FLOAT = 4  # bytes of a float32
QKV, GATE_UP, OUT, DOWN = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), "o_proj", "down_proj"


def _first_layer(model: PreTrainedModel, layers: int) -> nn.Module:
    """The first of a transformer's equal layers: that of its first list of so many modules."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers)[0]


# --- weights ---------------------------------------------------------------------------------------------------------


def weights_of(model: nn.Module, trained: bool | None = None) -> int:
    """Bytes of all weights, or of those that are (not) trained; one that is used twice counts once."""
    return sum(_stored(w) for w in model.parameters() if trained is None or w.requires_grad == trained)


def _stored(weight: Tensor) -> int:
    state = getattr(weight, "quant_state", None)  # of bitsandbytes' 4-bit weights alone
    scales = 0 if state is None else state.absmax.nbytes  # one to a block
    return weight.nbytes + scales


def linear_floats(model: PreTrainedModel) -> Iterator[Tensor]:
    """Float32 weights of linear layers, which autocast rounds; without a head that is tied to the embeddings."""
    tied = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not tied and module.weight.dtype == torch.float32:
            yield module.weight


# --- passes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A transformer's measures, and what of it is trained. Sizes are features of one token; all else is bytes."""

    layers: int
    hidden: int
    inner: int  # of the feed-forward part
    heads: int
    q_dim: int  # of the queries of all heads
    kv_dim: int  # of the keys of all key heads; the values have as many
    vocabulary: int
    norms: tuple[tuple[int, int], ...]  # of a layer: how many each takes of a token, and of how many features together
    whole: bool  # all weights are trained
    adapters: dict[str, tuple[int, int]]  # rank and output of a layer's adapters, by the linear layer they belong to
    element: int  # bytes of a number in the forward pass: 4, or 2 under autocast
    attention_element: int  # the same in attention: on a processor always 4
    inner_element: int  # the same in the feed-forward part: 4-bit layers give what they were given, float32
    checkpointing: bool
    dropout: bool  # of what the adapters read
    dropout_mask_bytes: int  # per number, whether it was dropped: a float on a CPU, a flag on a GPU

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype | None, checkpointing: bool = False) -> Network:
        """Of a causal LM or a classifier, with the adapters inside it; `dtype` is its forward's, None: float32."""
        c = model.config.get_text_config()
        heads = c.num_attention_heads
        size = getattr(c, "head_dim", None) or c.hidden_size // heads
        q_dim, kv_dim = heads * size, (getattr(c, "num_key_value_heads", None) or heads) * size
        layer = _first_layer(model, c.num_hidden_layers)
        adapted = [(name.split(".")[-1], m) for name, m in layer.named_modules() if isinstance(m, LoraLayer)]
        by_head = {"q_norm": (heads, q_dim), "k_norm": (kv_dim // size, kv_dim)}  # Qwen's
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
        """Whether the forward runs under autocast: norms and residuals stay in float32, linear layers round."""
        return self.element < FLOAT

    def saved_activations(self, micro_batch: MicroBatch) -> int:
        """Bytes that all layers save for the backward pass."""
        tokens = micro_batch.ids.numel()
        ends = 2 * tokens * self.hidden * FLOAT  # the last norm's input, and that over its size
        if self.checkpointing:  # what each layer was given
            return ends + self.layers * tokens * self.hidden * FLOAT
        return ends + self.layers * self.saved_by_layer(micro_batch)

    def saved_by_layer(self, micro_batch: MicroBatch) -> int:
        """Bytes that one layer saves for the backward pass, without gradient checkpointing."""
        tokens, trained = micro_batch.ids.numel(), (*QKV, *GATE_UP, OUT, DOWN) if self.whole else tuple(self.adapters)
        # a norm's input and 1 / its size; where its gain is trained, the input over its size
        norms = sum(size * (2 if self.whole else 1) + number for number, size in self.norms) * FLOAT
        # inputs of trained linear layers: q, k, v read one tensor, gate and up another; rounded each has its own copy
        reading = [name for name in trained if name not in (OUT, DOWN)]
        apart = self.rounded or self.dropout  # each has a copy of its own, rounded or with some of it dropped
        read = self.hidden * (len(reading) if apart else len({name in GATE_UP for name in reading}))
        if DOWN in trained:
            read += self.inner
        own = self.rounded and (not self.whole or self.attention_element != self.element)
        if OUT in trained and (gathered(micro_batch) or own or self.dropout):  # else attention's
            read += self.q_dim
        # the feed-forward part: gate before and after its activation, up
        inner = 3 * self.inner * self.inner_element
        ranks = sum(rank for rank, _ in self.adapters.values())
        dropped = self.dropout_mask_bytes * read if self.dropout else 0
        sums = norms + (read + ranks) * self.element + inner + dropped
        return tokens * sums + self._saved_by_attention(micro_batch)

    def _saved_by_attention(self, micro_batch: MicroBatch) -> int:
        """Queries, keys, values, output and normalizer of each rectangle."""
        total = 0
        for rows, queries, keys, masked in rectangles(micro_batch):
            total += rows * queries * (2 * self.q_dim * self.attention_element + self.heads * FLOAT)
            # with a mask each query head gets its own copy of its key head, and the mask becomes numbers
            total += rows * keys * 2 * (self.q_dim if masked else self.kv_dim) * self.attention_element
            total += rows * queries * keys * self.attention_element if masked else 0
        return total

    def freed_in_forward(self, tokens: int) -> int:
        """Bytes that all layers make in the forward pass and free again."""
        # each norm's squares; of what comes after, that which is not kept
        norms = sum(size for _, size in self.norms) * FLOAT * (1 + self.rounded if self.whole else 3)
        # queries and keys before their rotation, and four pieces on the way (one a half)
        turned = (self.q_dim + self.kv_dim) * (self.element + 3.5 * FLOAT + self.rounded * FLOAT)
        outputs = 2 * self.hidden * self.element
        # an adapter's output, that scaled, and the sum with the layer's own
        adapted = 3 * sum(output for _, output in self.adapters.values()) * self.element
        return int(self.layers * tokens * (norms + turned + outputs + adapted))

    def forward_peak(self, tokens: int) -> int:
        """Bytes at once in a pass without gradients: four hidden states, and three tensors of one part of a layer."""
        feed_forward = 3 * self.inner * self.inner_element
        attention = (self.q_dim + 2 * self.kv_dim) * self.element + 3 * self.q_dim * FLOAT
        return tokens * (4 * self.hidden * FLOAT + max(feed_forward, attention))

    def backward_peak(self, tokens: int) -> int:
        """Bytes at once in one layer of a backward pass: gradients of three inner tensors and of two hidden states."""
        return tokens * (3 * self.inner * self.inner_element + 2 * self.hidden * FLOAT)

    def cache(self, tokens: int) -> int:
        """Keys and values."""
        return self.layers * tokens * self.kv_dim * 2 * self.element


def rectangles(micro_batch: MicroBatch) -> list[tuple[int, int, int, bool]]:
    """Attention's calls in one layer: rows, queries and keys of a row, and whether they need a mask."""
    if isinstance(micro_batch, PackedMicroBatch):
        return [(*s.shape, s.mask(None, micro_batch.ids.device) is not None) for s in micro_batch.layout.segments]
    rows, width = micro_batch.ids.shape
    return [(rows, width, width, not bool(micro_batch.attention.all()))]


def gathered(micro_batch: MicroBatch) -> bool:
    """Whether attention's output is put back into the order of the row, or made contiguous, which copies it."""
    return not isinstance(micro_batch, PackedMicroBatch) or micro_batch.layout.inverse_index is not None

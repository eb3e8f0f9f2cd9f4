"""One decoding step of a policy: from the last token of each slot to the logits of the next one.

`ModelDecoder` calls the model's own layers. `FusedDecoder` uses copies of the weights of Llama and its relatives, in
half as many operators: q, k and v are one matrix, so are gate and up, adapters are merged, and the rotary embedding
rotates queries and keys together, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from rlhf.models import llama
from rlhf.models.attention import Kernel
from rlhf.models.logprobs import backbone_of, base_of, forward_dtype, joined, scaled_logits, upcast
from rlhf.rollout.cpu_weights import copied_product
from rlhf.rollout.kv_cache import DecodeLayout, SlotKVCache

Product = Callable[[Tensor], Tensor]  # (S, in) -> (S, out)


class Decoder(Protocol):
    """From tokens to logits."""

    def hidden(self, tokens: Tensor, at: Tensor, span: int, cache: SlotKVCache) -> Tensor:
        """Return the hidden states (S, H) of tokens (S,) at positions (S,), after storing their keys and values.

        The first `span` columns of the cache are attended to.
        """

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """Return the logits (S, V) of hidden states (S, H), divided by the temperature."""


def make_decoder(policy: PreTrainedModel | PeftModel, slots: int, columns: int) -> Decoder:
    """Return the decoder with the fewest operators for this policy. `columns` are the tokens of the longest text."""
    return FusedDecoder(policy, slots, columns) if can_fuse(policy) else ModelDecoder(policy)


class ModelDecoder:
    """The layers of the model, for every architecture whose attention can be replaced."""

    def __init__(self, policy: PreTrainedModel | PeftModel):
        self.policy, self.backbone = policy, backbone_of(policy)

    def hidden(self, tokens: Tensor, at: Tensor, span: int, cache: SlotKVCache) -> Tensor:
        cache.begin_decode(at, span)
        layout = DecodeLayout(at, span)
        if llama.supports(self.backbone):
            return llama.forward(self.backbone, tokens, at, layout, cache)
        output = self.backbone(
            input_ids=tokens.unsqueeze(1),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device),
            position_ids=at.unsqueeze(1),
            past_key_values=cache,
            use_cache=True,
            layout=layout,
        )
        return output.last_hidden_state[:, 0]

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        return scaled_logits(self.policy, hidden, temperature)


def can_fuse(policy: PreTrainedModel | PeftModel) -> bool:
    """True if a FusedDecoder can copy the weights of this policy.

    Adapters are merged in float32 only: in bfloat16 the sum would lose most of a small update. 4-bit weights are not
    copied.
    """
    backbone = backbone_of(policy)
    if not llama.supports(backbone):
        return False
    exact = forward_dtype(policy.get_input_embeddings().weight) != torch.bfloat16
    kinds = {type(m) for layer in backbone.layers for m in _linears(layer)}
    return kinds <= ({nn.Linear, LoraLinear} if exact else {nn.Linear})


def _linears(layer: nn.Module) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    return [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def merged_weight(layer: nn.Linear | LoraLinear) -> Tensor:
    """Return the weight of a linear layer with its active adapters."""
    if type(layer) is nn.Linear:
        return layer.weight.detach()
    weight = layer.get_base_layer().weight.detach()
    if not layer.disable_adapters and not layer.merged:
        for name in layer.active_adapters:
            weight = weight + layer.get_delta_weight(name).detach()
    return weight


class FusedDecoder:
    """Copies of the weights of a policy; on a GPU the weights themselves, where no copy is needed. The weights must
    not change while the decoder is used."""

    def __init__(self, policy: PreTrainedModel | PeftModel, slots: int, columns: int):
        self.policy, self.backbone = policy, backbone_of(policy)
        embeddings, head = policy.get_input_embeddings().weight, base_of(policy).get_output_embeddings()
        self.dtype = forward_dtype(embeddings)

        def product(*layers: nn.Module) -> Product:
            weight = joined([merged_weight(layer) for layer in layers]).to(self.dtype)
            biases = [layer.bias for layer in layers if layer.bias is not None]
            return copied_product(weight, torch.cat(biases) if biases else None, slots)

        self.norm = _Norm(self.backbone.norm)
        self.layers = [_FusedLayer(layer, product) for layer in self.backbone.layers]
        self.head = product(head) if type(head) is nn.Linear else None  # None: another kind of head
        self.columns = torch.arange(columns, device=embeddings.device)
        # cosines and signed sines of all positions, (columns, 2, 1, D)
        self.cos_sin = torch.stack(llama.rotary(self.backbone, upcast(embeddings), self.columns), 1)

    def hidden(self, tokens: Tensor, at: Tensor, span: int, cache: SlotKVCache) -> Tensor:
        cache.begin_decode(at, span)
        hidden, layout = self.backbone.embed_tokens(tokens), DecodeLayout(at, span, self.columns)
        cos, sin = self.cos_sin.index_select(0, at).unbind(1)  # (S, 1, D) each
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, layout, cache, number)
        return self.norm(hidden, self.dtype)

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        if self.head is None:
            return scaled_logits(self.policy, hidden, temperature)
        logits = upcast(self.head(hidden.to(self.dtype)))
        return logits if temperature == 1 else logits.div_(temperature)


class _Norm:
    """A norm of rlhf.models.llama in fewer operators, with precomputed constants."""

    def __init__(self, module: nn.Module):
        gain = upcast(module.weight.detach())
        self.module, width = module, gain.numel()
        self.gain = gain * width**0.5
        self.floor = torch.full((1,), (width * module.variance_epsilon) ** 0.5, dtype=gain.dtype, device=gain.device)

    def __call__(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norm of hidden states (..., H) in `dtype`."""
        if hidden.is_cuda:
            return llama.norm(self.module, hidden, dtype)
        hidden = upcast(hidden)
        # sqrt(mean x^2 + eps) = sqrt(sum x^2 + H eps) / sqrt(H)
        size = torch.hypot(torch.linalg.vector_norm(hidden, dim=-1, keepdim=True), self.floor)
        return (hidden / size).mul_(self.gain).to(dtype)


class _FusedLayer:
    """One transformer layer of a FusedDecoder."""

    def __init__(self, layer: nn.Module, product: Callable[..., Product]):
        self.attention = layer.self_attn
        self.before, self.between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        query, key, value, out, gate, up, down = _linears(layer)
        self.qkv, self.out = product(query, key, value), product(out)
        self.gate_up, self.down = product(gate, up), product(down)
        self.kv_heads = key.out_features // self.attention.head_dim
        self.window, self.kernel = llama.window_of(self.attention), Kernel(self.attention.scaling, None)

    def __call__(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, layout: DecodeLayout, cache: SlotKVCache, number: int
    ) -> Tensor:
        """Return the hidden states (S, H) after the layer."""
        attention, count, dtype = self.attention, self.kv_heads, forward_dtype(hidden)
        row = self.before(hidden, dtype)
        heads = upcast(self.qkv(row)).unflatten(-1, (-1, attention.head_dim))  # (S, heads + 2 KV heads, D)
        if hasattr(attention, "q_norm"):
            heads[:, : -2 * count] = llama.norm(attention.q_norm, heads[:, : -2 * count])
            heads[:, -2 * count : -count] = llama.norm(attention.k_norm, heads[:, -2 * count : -count])
        rotated = heads[:, :-count]  # queries and keys
        swapped = rotated.roll(attention.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        keys, values = cache.store(heads[:, -2 * count :].unflatten(1, (2, count)), number)
        attended = layout.attend_row(heads[:, : -2 * count], keys, values, self.window, self.kernel)
        hidden = hidden + self.out(attended.flatten(1))
        gate, up = self.gate_up(self.between(hidden, dtype)).chunk(2, -1)
        return hidden + self.down(silu(gate).mul_(up))

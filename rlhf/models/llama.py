"""The forward pass of Llama and its relatives over a packed row, in few operators.

It computes the same as the model in transformers, up to rounding, and saves less for the backward pass. A small model
waits for the launch of each operator on a GPU, and for the overhead of each call on a CPU, so fewer operators are
faster:

- The norm with q, k and v, the rotary embedding, and the norm with the feed-forward part are one autograd node each,
  with a hand-written gradient. The matrix products sum the gradients of all readers of a tensor.
- Norms and SwiGLU are computed again in the backward pass instead of being saved.

Linear layers with a bias, adapters or 4-bit weights are called as modules. `self_test.check_forward_matches` compares
this forward pass with the model's own when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhf.models.attention import Kernel, Layout
from rlhf.models.logprobs import forward_dtype, upcast

BACKBONES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")  # do not depend on the length of the text
USED = "_few_operators"  # attribute of a backbone; False: its self-test failed
ROTARY_TABLE = "_rotary_table"  # attribute of a backbone: the table of `known_rotary`


def supports(backbone: nn.Module) -> bool:
    """True if `forward` computes the same as this backbone."""
    config = getattr(backbone, "config", None)
    return (
        type(backbone).__name__ in BACKBONES
        and type(backbone).__module__.startswith("transformers.models.")
        and config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type", "default") in STATIC_ROTARY
        and getattr(backbone, USED, True)
    )


def disable(backbone: nn.Module) -> None:
    """Make `supports` return False for this backbone."""
    setattr(backbone, USED, False)


def forward(backbone: PreTrainedModel, ids: Tensor, positions: Tensor, layout: Layout, cache: Any = None) -> Tensor:
    """Returns the hidden states (N, H) of a packed row with ids and positions (N,). `cache` stores keys and values."""
    hidden = backbone.embed_tokens(ids.unsqueeze(0)).squeeze(0)  # hooks of the embedding expect a batch
    cos_sin = (rotary if cache is not None else known_rotary)(backbone, hidden, positions)
    again = backbone.training and getattr(backbone, "gradient_checkpointing", False) and torch.is_grad_enabled()
    for number, layer in enumerate(backbone.layers):
        store = None if cache is None else partial(cache.store, layer=number)
        arguments = (layer, hidden, cos_sin, layout, store)
        hidden = checkpoint(_layer, *arguments, use_reentrant=False) if again else _layer(*arguments)
    return norm(backbone.norm, hidden)


def _layer(
    layer: nn.Module, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], layout: Layout, store: Callable | None
) -> Tensor:
    """Returns the hidden states (N, H) after one transformer layer."""
    attention = layer.self_attn
    query, key, value = attention_input(layer, hidden, cos_sin)
    if store is not None:
        key, value = store(torch.stack([key, value], 1))
    attended = layout.attend_row(query, key, value, window_of(attention), Kernel(attention.scaling, None))
    return feed_forward(layer, hidden + attention.o_proj(attended.flatten(1)))


def window_of(attention: nn.Module) -> int | None:
    """Returns the sliding window of an attention layer; None: it attends to all earlier tokens."""
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))


def all_plain(*layers: nn.Module) -> bool:
    """True if these are linear layers without bias, adapters, quantization or replaced forward pass."""
    return all(type(layer) is nn.Linear and layer.bias is None and "forward" not in vars(layer) for layer in layers)


def attention_input(layer: nn.Module, hidden: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query (N, heads, D), key and value (N, KV heads, D) for the hidden states (N, H) of a layer's input."""
    attention, size = layer.self_attn, layer.self_attn.head_dim
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    if torch.is_grad_enabled() and all_plain(*layers):
        gain = layer.input_layernorm
        found = _NormedProducts.apply(hidden, gain.weight, gain.variance_epsilon, *(one.weight for one in layers))
    else:
        row = norm(layer.input_layernorm, hidden, forward_dtype(hidden))
        found = [one(row) for one in layers]
    query, key, value = (x.unflatten(-1, (-1, size)) for x in found)
    if hasattr(attention, "q_norm"):  # Qwen 3 normalizes each head
        query, key = norm(attention.q_norm, query), norm(attention.k_norm, key)
    return apply_rotary(query, *cos_sin), apply_rotary(key, *cos_sin), value


def feed_forward(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Returns hidden + down(silu(gate) * up), (N, H), in which gate and up are products with the normalized hidden
    states (N, H). Shazeer 2020, arXiv 2002.05202, eq. 6."""
    mlp, gain = layer.mlp, layer.post_attention_layernorm
    layers = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    if torch.is_grad_enabled() and all_plain(*layers):
        return _FeedForward.apply(hidden, gain.weight, gain.variance_epsilon, *(one.weight for one in layers))
    row = norm(gain, hidden, forward_dtype(hidden))
    gate, up = mlp.gate_proj(row), mlp.up_proj(row)
    return hidden + mlp.down_proj(_SwiGLU.apply(gate, up) if torch.is_grad_enabled() else silu(gate).mul_(up))


# --- norm ------------------------------------------------------------------------------------------------------------


def norm(module: nn.Module, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the root mean square norm of hidden states (..., H) with the module's gain, in `dtype` if given.

    Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4. It is computed in float32 or float64.
    """
    hidden, gain, eps, dtype = upcast(hidden), upcast(module.weight), module.variance_epsilon, dtype or hidden.dtype
    if torch.is_grad_enabled():
        return _Norm.apply(hidden, gain, eps, dtype)
    return _normed(hidden, gain, eps)[0].to(dtype)


def _normed(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns y = gain * x / r with r = sqrt(mean x^2 + eps), (..., H), and 1 / r, (..., 1)."""
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm(x, gain.shape, gain, eps)  # one kernel
    inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * inverse).mul_(gain), inverse


def _norm_gradients(
    by_output: Tensor, x: Tensor, gain: Tensor, inverse: Tensor, gain_trained: bool, normed: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients with respect to x and the gain, of that with respect to the norm's output. `normed` is
    x / r, if it is known."""
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm_backward(by_output, x, gain.shape, inverse, gain, [True, gain_trained])
    normed = x * inverse if normed is None else normed
    products = by_output * normed
    # dL/dx = (gain dL/dy - x/r mean(dL/dy gain x/r)) / r
    means = (products @ gain).unsqueeze(-1)
    by_x = torch.addcmul(by_output * gain, normed, means, value=-1 / x.shape[-1]).mul_(inverse)
    return by_x, products.flatten(0, -2).sum(0) if gain_trained else None


class _Norm(torch.autograd.Function):
    """The norm with its gradient. Saves x and 1 / r."""

    @staticmethod
    def forward(ctx, x, gain, eps, dtype):
        normed, inverse = _normed(x, gain, eps)
        ctx.save_for_backward(x, gain, inverse)
        return normed.to(dtype)

    @staticmethod
    def backward(ctx, by_output):
        x, gain, inverse = ctx.saved_tensors
        return *_norm_gradients(by_output.to(x.dtype), x, gain, inverse, ctx.needs_input_grad[1]), None, None


# --- rotary embedding ------------------------------------------------------------------------------------------------


def rotary(backbone: nn.Module, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and signed sines (N, 1, D) of positions (N,), for `turn`. Su et al. 2021, arXiv 2104.09864.

    transformers rotates the halves (a, b) of a head to (a cos - b sin, b cos + a sin).
    """
    cos, sin = backbone.rotary_emb(like, position_ids=positions.unsqueeze(0))
    half = sin.shape[-1] // 2
    return cos[0].unsqueeze(1), torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1).unsqueeze(1)


def known_rotary(backbone: nn.Module, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `rotary` for positions (N,) below N, from a table that is computed once."""
    table = getattr(backbone, ROTARY_TABLE, None)
    if table is None or len(table) < len(positions) or (table.dtype, table.device) != (like.dtype, like.device):
        count = 1 << (len(positions) - 1).bit_length()  # the next power of two
        table = torch.stack(rotary(backbone, like, torch.arange(count, device=like.device)), 1)  # (count, 2, 1, D)
        setattr(backbone, ROTARY_TABLE, table)
    return table.index_select(0, positions).unbind(1)


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads (N, heads, D) with the rotary embedding, in the precision of `cos`."""
    return _Rotary.apply(heads, cos, sin) if torch.is_grad_enabled() else _rotated(heads, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # y = x cos + swap(x) sin, in which swap exchanges the halves of each head
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1).to(cos.dtype), sin)


class _Rotary(torch.autograd.Function):
    """The rotary embedding with its gradient. Saves nothing of x."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, by_output):
        cos, sin = ctx.saved_tensors
        by_output = by_output.to(cos.dtype)
        swapped = (by_output * sin).roll(by_output.shape[-1] // 2, -1)
        return swapped.addcmul_(by_output, cos).to(ctx.dtype), None, None


# --- linear layers with plain weights, trained or frozen -------------------------------------------------------------


def _by_row(by_outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Returns the gradient with respect to a row (N, H) that several matrices multiply."""
    (first, *others) = zip(by_outputs, weights, strict=True)
    total = first[0] @ first[1]
    for by_output, weight in others:
        total.addmm_(by_output, weight)
    return total


def _by_weights(
    by_outputs: Sequence[Tensor], rows: Sequence[Tensor | None], weights: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradient with respect to each matrix, from the rows that it multiplies; None for a frozen one."""
    return [
        (b.t() @ row).to(w.dtype) if trained else None
        for b, row, w, trained in zip(by_outputs, rows, weights, needed, strict=True)
    ]


class _NormedProducts(torch.autograd.Function):
    """Products of the normalized hidden states with several matrices. Saves the hidden states and 1 / r."""

    @staticmethod
    def forward(ctx, hidden, gain, eps, *weights):
        row, inverse = _normed(hidden, gain, eps)
        ctx.dtype, ctx.eps = forward_dtype(hidden), eps
        ctx.save_for_backward(hidden, gain, inverse, *weights)
        row = row.to(ctx.dtype)
        return tuple(linear(row, weight.to(ctx.dtype)) for weight in weights)

    @staticmethod
    def backward(ctx, *by_outputs):
        hidden, gain, inverse, *weights = ctx.saved_tensors
        normed = hidden * inverse
        row = (normed * gain).to(ctx.dtype)
        by_row = _by_row(by_outputs, [w.to(ctx.dtype) for w in weights]).to(hidden.dtype)
        by_weights = _by_weights(by_outputs, [row] * len(weights), weights, ctx.needs_input_grad[3:])
        return *_norm_gradients(by_row, hidden, gain, inverse, ctx.needs_input_grad[1], normed), None, *by_weights


class _FeedForward(torch.autograd.Function):
    """The second half of a layer. Saves its input, 1 / r, gate and up."""

    @staticmethod
    def forward(ctx, hidden, gain, eps, gate_weight, up_weight, down_weight):
        row, inverse = _normed(hidden, gain, eps)
        ctx.dtype = forward_dtype(hidden)
        row = row.to(ctx.dtype)
        gate, up = linear(row, gate_weight.to(ctx.dtype)), linear(row, up_weight.to(ctx.dtype))
        ctx.save_for_backward(hidden, gain, inverse, gate, up, gate_weight, up_weight, down_weight)
        return hidden + linear(silu(gate).mul_(up), down_weight.to(ctx.dtype))

    @staticmethod
    def backward(ctx, by_output):
        hidden, gain, inverse, gate, up, *weights = ctx.saved_tensors
        gate_weight, up_weight, down_weight = (w.to(ctx.dtype) for w in weights)
        by_down, active = by_output.to(ctx.dtype), silu(gate)
        inner = active * up if ctx.needs_input_grad[5] else None
        by_inner = by_down @ down_weight
        by_up = active.mul_(by_inner)
        by_gate = torch.ops.aten.silu_backward(by_inner.mul_(up), gate)
        normed = hidden * inverse
        row = (normed * gain).to(ctx.dtype)
        by_row = _by_row((by_gate, by_up), (gate_weight, up_weight)).to(hidden.dtype)
        by_hidden, by_gain = _norm_gradients(by_row, hidden, gain, inverse, ctx.needs_input_grad[1], normed)
        by_weights = _by_weights((by_gate, by_up, by_down), (row, row, inner), weights, ctx.needs_input_grad[3:])
        return by_hidden.add_(by_output), by_gain, None, *by_weights


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up. Saves gate and up."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, by_inner):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(by_inner * up, gate), by_inner * silu(gate)

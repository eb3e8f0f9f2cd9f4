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

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhf.models.attention import Kernel, Layout
from rlhf.models.cast_weights import product, stored
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
    """Return the hidden states (N, H) of a packed row with ids and positions (N,). `cache` stores keys and values."""
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
    """Return the hidden states (N, H) after one transformer layer."""
    attention = layer.self_attn
    query, key, value = attention_input(layer, hidden, cos_sin)
    if store is not None:
        key, value = store(torch.stack([key, value], 1))
    attended = layout.attend_row(query, key, value, window_of(attention), Kernel(attention.scaling, None)).flatten(1)
    out = attention.o_proj
    return feed_forward(layer, hidden + (_Product.apply(attended, out.weight) if all_plain(out) else out(attended)))


def plain_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the weights that `forward` multiplies without a module, in all backbones of a model."""
    for backbone in filter(supports, model.modules()):
        yield from (module.weight for module in backbone.layers.modules() if all_plain(module))


def window_of(attention: nn.Module) -> int | None:
    """Return the sliding window of an attention layer; None: it attends to all earlier tokens."""
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))


def all_plain(*layers: nn.Module) -> bool:
    """True if these are linear layers without bias, adapters, quantization, hooks or replaced forward pass."""
    plain = (type(m) is nn.Linear and m.bias is None and "forward" not in vars(m) for m in layers)
    return all(plain) and not any(m._forward_hooks for m in layers)


def attention_input(layer: nn.Module, hidden: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return query (N, heads, D), key and value (N, KV heads, D) for the hidden states (N, H) of a layer's input."""
    attention = layer.self_attn
    size = layer.self_attn.head_dim
    gain = layer.input_layernorm
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    own_norms = hasattr(attention, "q_norm")  # Qwen 3 normalizes each head before the rotary embedding
    if all_plain(*layers):
        more = (size, *((None, None) if own_norms else cos_sin), *(one.weight for one in layers))
        query, key, value = _AttentionInput.apply(hidden, gain.weight, gain.variance_epsilon, *more)
        if not own_norms:
            return query, key, value
    else:
        row = norm(gain, hidden, forward_dtype(hidden))
        query, key, value = (one(row).unflatten(-1, (-1, size)) for one in layers)
    if own_norms:
        query = norm(attention.q_norm, query)
        key = norm(attention.k_norm, key)
    return apply_rotary(query, *cos_sin), apply_rotary(key, *cos_sin), value


def feed_forward(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Return hidden + down(silu(gate) * up), (N, H), in which gate and up are products with the normalized hidden
    states (N, H). Shazeer 2020, arXiv 2002.05202, eq. 6."""
    mlp = layer.mlp
    gain = layer.post_attention_layernorm
    layers = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    if all_plain(*layers):
        return _FeedForward.apply(hidden, gain.weight, gain.variance_epsilon, *(one.weight for one in layers))
    row = norm(gain, hidden, forward_dtype(hidden))
    return hidden + mlp.down_proj(_SwiGLU.apply(mlp.gate_proj(row), mlp.up_proj(row)))


# --- norm ------------------------------------------------------------------------------------------------------------


def norm(module: nn.Module, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the root mean square norm of hidden states (..., H) with the module's gain, in `dtype` if given.

    Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4. It is computed in float32 or float64.
    """
    return _Norm.apply(upcast(hidden), upcast(module.weight), module.variance_epsilon, dtype or hidden.dtype)


def _normed(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y = gain * x / r with r = sqrt(mean x^2 + eps), (..., H), and 1 / r, (..., 1)."""
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm(x, gain.shape, gain, eps)  # one kernel
    inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * inverse).mul_(gain), inverse


def _norm_gradients(
    by_output: Tensor, x: Tensor, gain: Tensor, inverse: Tensor, gain_trained: bool, normed: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients with respect to x and the gain, of that with respect to the norm's output. `normed` is
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
    """Return cosines and signed sines (N, 1, D) of positions (N,), for `turn`. Su et al. 2021, arXiv 2104.09864.

    transformers rotates the halves (a, b) of a head to (a cos - b sin, b cos + a sin).
    """
    cos, sin = backbone.rotary_emb(like, position_ids=positions.unsqueeze(0))
    half = sin.shape[-1] // 2
    return cos[0].unsqueeze(1), torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1).unsqueeze(1)


def known_rotary(backbone: nn.Module, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rotary` for positions (N,) below N, from a table that is computed once."""
    table = getattr(backbone, ROTARY_TABLE, None)
    if table is None or len(table) < len(positions) or (table.dtype, table.device) != (like.dtype, like.device):
        count = 1 << (len(positions) - 1).bit_length()  # the next power of two
        table = torch.stack(rotary(backbone, like, torch.arange(count, device=like.device)), 1)  # (count, 2, 1, D)
        setattr(backbone, ROTARY_TABLE, table)
    return table.index_select(0, positions).unbind(1)


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads (N, heads, D) with the rotary embedding, in the precision of `cos`."""
    return _Rotary.apply(heads, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # y = x cos + swap(x) sin, in which swap exchanges the halves of each head
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _rotated_back(by_output: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (by_output * sin).roll(by_output.shape[-1] // 2, -1).addcmul_(by_output, cos)


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
        return _rotated_back(by_output, cos, sin).to(ctx.dtype), None, None


# --- linear layers with plain weights, trained or frozen -------------------------------------------------------------


def _products(row: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the products of a row (N, H) with matrices (out, H), side by side, (N, sum of out)."""
    found = row.new_empty(len(row), sum(map(len, weights)))
    for into, weight in zip(found.split([*map(len, weights)], 1), weights, strict=True):
        torch.mm(row, weight.to(row.dtype).t(), out=into)
    return found


def _gradients(
    by_products: Tensor, row: Tensor, weights: Sequence[Tensor], needed: Sequence[bool], dtype: torch.dtype
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the gradients with respect to the row (N, H) of `_products` and its weights, in `dtype`; None for a
    frozen weight. `by_products` is (N, sum of out)."""
    sizes = [*map(len, weights)]
    (first, *others) = parts = by_products.split(sizes, 1)
    by_row = first @ weights[0].to(row.dtype)
    for part, weight in zip(others, weights[1:], strict=True):
        by_row.addmm_(part, weight.to(row.dtype))
    if all(needed):
        return by_row.to(dtype), product(by_products.t(), row, dtype).split(sizes)
    each = zip(parts, needed, strict=True)
    return by_row.to(dtype), [product(part.t(), row, dtype) if trained else None for part, trained in each]


class _Product(torch.autograd.Function):
    """The product of a row with one matrix, with its gradient in the precision of the weight."""

    @staticmethod
    def forward(ctx, row, weight):
        ctx.full = weight.dtype
        weight = stored(weight)
        ctx.save_for_backward(row, weight)
        return linear(row, weight.to(row.dtype))

    @staticmethod
    def backward(ctx, by_output):
        row, weight = ctx.saved_tensors
        by_weight = product(by_output.t(), row, ctx.full) if ctx.needs_input_grad[1] else None
        return by_output @ weight.to(row.dtype) if ctx.needs_input_grad[0] else None, by_weight


class _AttentionInput(torch.autograd.Function):
    """Queries and keys with the rotary embedding, if `cos` is given, and values. Saves the hidden states and 1 / r."""

    @staticmethod
    def forward(ctx, hidden, gain, eps, size, cos, sin, *weights):
        row, inverse = _normed(hidden, gain, eps)
        ctx.dtype = forward_dtype(hidden)
        weights = [stored(weight) for weight in weights]
        ctx.save_for_backward(hidden, gain, inverse, cos, sin, *weights)
        row = row.to(ctx.dtype)
        *turning, last = weights  # those of queries and keys, and of values
        turned = _products(row, turning).unflatten(-1, (-1, size))
        value = linear(row, last.to(ctx.dtype))
        if cos is not None:
            # on a CPU, attention is in float32
            turned = _rotated(turned, cos, sin).to(ctx.dtype if hidden.is_cuda else cos.dtype)
        return *turned.split([len(weight) // size for weight in turning], 1), value.unflatten(-1, (-1, size))

    @staticmethod
    def backward(ctx, by_query, by_key, by_value):
        hidden, gain, inverse, cos, sin, *weights = ctx.saved_tensors
        by_heads = torch.cat([by_query, by_key], 1)
        by_heads = by_heads if cos is None else _rotated_back(by_heads, cos, sin).to(ctx.dtype)
        by_products = torch.cat([by_heads, by_value], 1).flatten(1)
        normed = hidden * inverse
        needed = ctx.needs_input_grad
        row = (normed * gain).to(ctx.dtype)
        by_row, by_weights = _gradients(by_products, row, weights, needed[6:], hidden.dtype)
        by_hidden, by_gain = _norm_gradients(by_row, hidden, gain, inverse, needed[1], normed)
        return by_hidden, by_gain, None, None, None, None, *by_weights


class _FeedForward(torch.autograd.Function):
    """The second half of a layer. Saves its input, 1 / r, gate and up."""

    @staticmethod
    def forward(ctx, hidden, gain, eps, *weights):
        row, inverse = _normed(hidden, gain, eps)
        ctx.dtype = forward_dtype(hidden)
        *halves, down = [stored(weight) for weight in weights]
        both = _products(row.to(ctx.dtype), halves)
        ctx.save_for_backward(hidden, gain, inverse, both, *halves, down)
        gate, up = both.chunk(2, 1)
        return hidden + linear(silu(gate).mul_(up), down.to(ctx.dtype))

    @staticmethod
    def backward(ctx, by_output):
        hidden, gain, inverse, both, *halves, down = ctx.saved_tensors
        gate, up = both.chunk(2, 1)
        needed = ctx.needs_input_grad
        by_down = by_output.to(ctx.dtype)
        active = silu(gate)
        by_down_weight = product(by_down.t(), active * up, hidden.dtype) if needed[5] else None
        by_inner = by_down @ down.to(ctx.dtype)
        by_both = torch.empty_like(both)
        by_gate, by_up = by_both.chunk(2, 1)
        torch.mul(active, by_inner, out=by_up)
        torch.ops.aten.silu_backward(by_inner.mul_(up), gate, grad_input=by_gate)
        normed = hidden * inverse
        row = (normed * gain).to(ctx.dtype)
        by_row, by_weights = _gradients(by_both, row, halves, needed[3:5], hidden.dtype)
        by_hidden, by_gain = _norm_gradients(by_row, hidden, gain, inverse, needed[1], normed)
        return by_hidden.add_(by_output), by_gain, None, *by_weights, by_down_weight


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

"""The forward pass of Llama and its relatives over a packed row, in few operators.

It computes the same as the model in transformers, up to rounding, and saves less for the backward pass. A small model on
a GPU waits for the launch of each operator, and on a CPU for the overhead of each call, so fewer operators are faster:

- Norm, rotary embedding and SwiGLU each have one autograd node with a hand-written gradient.
- q, k and v read one input, and so do gate and up. The gradients with respect to it are summed by the matrix products.
- The activations of SwiGLU are computed again in the backward pass instead of being saved.

Linear layers with adapters or 4-bit weights are called as modules. `self_test.check_forward_matches` compares this
forward pass with the model's own when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhf.models.attention import Kernel, Layout
from rlhf.models.logprobs import forward_dtype, upcast

BACKBONES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")  # do not depend on the length of the text
USED = "_few_operators"  # attribute of a backbone; False: its self-test failed


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
    turns = rotary(backbone, hidden, positions)
    again = backbone.training and getattr(backbone, "gradient_checkpointing", False) and torch.is_grad_enabled()
    for number, layer in enumerate(backbone.layers):
        store = None if cache is None else partial(cache.store, layer=number)
        arguments = (layer, hidden, turns, layout, store)
        hidden = checkpoint(_layer, *arguments, use_reentrant=False) if again else _layer(*arguments)
    return norm(backbone.norm, hidden)


def _layer(
    layer: nn.Module, hidden: Tensor, turns: tuple[Tensor, Tensor], layout: Layout, store: Callable | None
) -> Tensor:
    """Returns the hidden states (N, H) after one transformer layer."""
    attention, mlp, dtype = layer.self_attn, layer.mlp, forward_dtype(hidden)
    row = norm(layer.input_layernorm, hidden, dtype)
    query, key, value = products(row, attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (x.unflatten(-1, (-1, attention.head_dim)) for x in (query, key, value))  # (N, heads, D)
    if hasattr(attention, "q_norm"):  # Qwen 3 normalizes each head
        query, key = norm(attention.q_norm, query), norm(attention.k_norm, key)
    query, key = turn(query, *turns), turn(key, *turns)
    if store is not None:
        key, value = store(torch.stack([key, value], 1))
    attended = layout.attend_row(query, key, value, window_of(attention), Kernel(attention.scaling, None))
    hidden = hidden + attention.o_proj(attended.flatten(1))
    gate, up = products(norm(layer.post_attention_layernorm, hidden, dtype), mlp.gate_proj, mlp.up_proj)
    return hidden + swiglu_down(gate, up, mlp.down_proj)


def window_of(attention: nn.Module) -> int | None:
    """Returns the sliding window of an attention layer; None: it attends to all earlier tokens."""
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))


# --- norm ------------------------------------------------------------------------------------------------------------


def norm(module: nn.Module, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the root mean square norm of hidden states (..., H) with the module's gain, in `dtype` if given.

    Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4. It is computed in float32 or float64.
    """
    hidden, weight, eps = upcast(hidden), upcast(module.weight), module.variance_epsilon
    if hidden.is_cuda:
        with torch.autocast("cuda", enabled=False):
            normed = rms_norm(hidden, weight.shape, weight, eps)  # one kernel
        return normed if dtype is None else normed.to(dtype)
    if not torch.is_grad_enabled():
        return _normed(hidden, weight, eps)[0].to(dtype or hidden.dtype)
    return _RMSNorm.apply(hidden, weight, eps, dtype or hidden.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # y = g x / r with r = sqrt(mean x^2 + eps); also returns 1 / r
    inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * inverse).mul_(weight), inverse


class _RMSNorm(torch.autograd.Function):
    """The norm with its gradient. Saves x and 1 / r."""

    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        normed, inverse = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return normed.to(dtype)

    @staticmethod
    def backward(ctx, by_output):
        x, weight, inverse = ctx.saved_tensors
        by_output, normed = by_output.to(x.dtype), x * inverse
        products = by_output * normed
        by_weight = products.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        # dL/dx = (g dL/dy - y/g mean(dL/dy y)) / r
        means = (products @ weight).unsqueeze(-1)
        by_x = torch.addcmul(by_output * weight, normed, means, value=-1 / x.shape[-1]).mul_(inverse)
        return by_x, by_weight, None, None


# --- rotary embedding ------------------------------------------------------------------------------------------------


def rotary(backbone: nn.Module, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and signed sines (N, 1, D) of positions (N,), for `turn`. Su et al. 2021, arXiv 2104.09864.

    transformers rotates the halves (a, b) of a head to (a cos - b sin, b cos + a sin).
    """
    cos, sin = backbone.rotary_emb(like, position_ids=positions.unsqueeze(0))
    half = sin.shape[-1] // 2
    return cos[0].unsqueeze(1), torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1).unsqueeze(1)


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads (N, heads, D) with the rotary embedding, in the precision of `cos`."""
    return _Turn.apply(heads, cos, sin) if torch.is_grad_enabled() else _turned(heads, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # y = x cos + swap(x) sin, in which swap exchanges the halves of each head
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1).to(cos.dtype), sin)


class _Turn(torch.autograd.Function):
    """The rotary embedding with its gradient. Saves nothing of x."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx, by_output):
        cos, sin = ctx.saved_tensors
        by_output = by_output.to(cos.dtype)
        swapped = (by_output * sin).roll(by_output.shape[-1] // 2, -1)
        return swapped.addcmul_(by_output, cos).to(ctx.dtype), None, None


# --- linear layers ---------------------------------------------------------------------------------------------------


def is_plain(layer: nn.Module) -> bool:
    """True for a linear layer without bias, adapters, quantization or hooks."""
    return type(layer) is nn.Linear and layer.bias is None and "forward" not in vars(layer)


def products(row: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """Returns the outputs of several linear layers with the same input (N, H)."""
    if torch.is_grad_enabled() and all(map(is_plain, layers)):
        return _Products.apply(row, *(layer.weight for layer in layers))
    return [layer(row) for layer in layers]


class _Products(torch.autograd.Function):
    """Several matrix products with one input. Saves the input once."""

    @staticmethod
    def forward(ctx, row, *weights):
        dtype = forward_dtype(row)
        row, used = row.to(dtype), [w.to(dtype) for w in weights]
        ctx.save_for_backward(row if any(ctx.needs_input_grad[1:]) else None, *used)
        ctx.dtypes = [w.dtype for w in weights]
        return tuple(linear(row, w) for w in used)

    @staticmethod
    def backward(ctx, *by_outputs):
        row, *weights = ctx.saved_tensors
        by_row, (first, *others) = None, zip(by_outputs, weights, strict=True)
        if ctx.needs_input_grad[0]:
            by_row = first[0] @ first[1]
            for by_output, weight in others:
                by_row.addmm_(by_output, weight)
        by_weights = [
            (by_output.t() @ row).to(dtype) if needed else None
            for by_output, needed, dtype in zip(by_outputs, ctx.needs_input_grad[1:], ctx.dtypes, strict=True)
        ]
        return by_row, *by_weights


def swiglu_down(gate: Tensor, up: Tensor, down: nn.Module) -> Tensor:
    """Returns down(silu(gate) * up), (N, H), of gate and up (N, I). Shazeer 2020, arXiv 2002.05202, eq. 6."""
    if torch.is_grad_enabled() and is_plain(down):
        return _SwiGLUDown.apply(gate, up, down.weight)
    return down(_SwiGLU.apply(gate, up) if torch.is_grad_enabled() else silu(gate).mul_(up))


class _SwiGLU(torch.autograd.Function):
    """h = silu(gate) * up. Saves gate and up."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, by_inner):
        gate, up = ctx.saved_tensors
        return _by_gate(by_inner * up, gate), by_inner * silu(gate)


class _SwiGLUDown(torch.autograd.Function):
    """The product with the last matrix, too. Saves gate and up, and computes its input again."""

    @staticmethod
    def forward(ctx, gate, up, weight):
        dtype = forward_dtype(gate)
        ctx.dtype, used = weight.dtype, weight.to(dtype)
        ctx.save_for_backward(gate, up, used)
        return linear(silu(gate).mul_(up), used)

    @staticmethod
    def backward(ctx, by_output):
        gate, up, weight = ctx.saved_tensors
        active, by_inner, by_weight = silu(gate), by_output @ weight, None
        if ctx.needs_input_grad[2]:
            by_weight = (by_output.t() @ (active * up)).to(ctx.dtype)
        by_up = active.mul_(by_inner)
        return _by_gate(by_inner.mul_(up), gate), by_up, by_weight


def _by_gate(by_active: Tensor, gate: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(by_active, gate)

"""Weights in oneDNN's blocked layout, which makes products with few rows fast on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlhf.models.logprobs import forward_dtype


@contextlib.contextmanager
def prepacked_weights(model: nn.Module, rows: int, device: torch.device) -> Iterator[None]:
    """Context manager: linear layers use copies of their weights in oneDNN's blocked layout.

    A decoding step multiplies a few rows by all weights, and most of its time is spent reading the weights. The
    blocked layout makes it up to twice as fast on a CPU. `rows` is the number of rows of each product. Gradients are
    not supported, and the weights must not change meanwhile. Nothing happens on other devices, without oneDNN, or in
    precisions other than float32 and bfloat16.
    """
    modules = model.modules() if device.type == "cpu" and torch.backends.mkldnn.is_available() else ()
    layers = [m for m in modules if type(m) is nn.Linear and "forward" not in vars(m)]
    try:
        for layer in layers:
            dtype = forward_dtype(layer.weight)
            if supports_prepacking(dtype):
                layer.forward = _prepacked_forward(layer, dtype, rows)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def supports_prepacking(dtype: torch.dtype) -> bool:
    """True if this CPU can multiply blocked weights in this precision. bfloat16 requires AVX-512."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _MKLDNN._is_mkldnn_bf16_supported())


_MKLDNN = torch.ops.mkldnn  # the operators that torch.compile uses for oneDNN


def _prepacked_forward(layer: nn.Linear, dtype: torch.dtype, rows: int) -> Callable[[Tensor], Tensor]:
    product = copied_product(layer.weight.detach().to(dtype), layer.bias, rows)
    return lambda states: product(states.to(dtype))


# With smaller matrices (outputs x inputs), the overhead of a call to oneDNN is larger than what it saves.
SMALLEST_BLOCKED = 2**18


def copied_product(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """Return a function (S, in) -> (S, out) that multiplies by a copy of `weight` (out, in) and adds `bias`.

    On a CPU, the copy has the layout that is fastest for `rows` rows.
    """
    bias = None if bias is None else bias.detach().to(weight.dtype)
    cpu = weight.device.type == "cpu"
    if cpu and weight.numel() >= SMALLEST_BLOCKED and supports_prepacking(weight.dtype):
        blocked = _MKLDNN._reorder_linear_weight(weight, rows)
        return lambda states: _MKLDNN._linear_pointwise(states, blocked, bias, "none", [], "")
    copied = weight.t().contiguous().t() if cpu else weight
    return lambda states: linear(states, copied, bias)

"""On a CPU: weights in oneDNN's blocked order, in which few rows are multiplied fast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from rlhf.models.logprobs import forward_dtype


@contextlib.contextmanager
def prepacked_weights(model: nn.Module, rows: int, device: torch.device) -> Iterator[None]:
    """While it lasts, linear layers multiply by copies of their weights in oneDNN's own blocked order.

    On a processor, a few rows times all weights is what decoding is, and reading the weights what it waits for: from
    blocks they come up to twice as fast. `rows` is how many rows a product will have. Without gradients only; weights
    may not change meanwhile. Elsewhere than in float32 and bfloat16 on a processor with oneDNN nothing is done.
    """
    layers = {layer: forward_dtype(layer.weight) for layer in prepackable_layers(model, device)}
    try:
        for layer, dtype in layers.items():
            if supports_prepacking(dtype):
                layer.forward = _prepacked_forward(layer, dtype, rows)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def prepackable_layers(model: nn.Module, device: torch.device) -> list[nn.Linear]:
    """The layers that `prepacked_weights` changes."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return []
    return [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]


def supports_prepacking(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies blocked weights of a precision: bfloat16 needs AVX-512."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _MKLDNN._is_mkldnn_bf16_supported())


_MKLDNN = torch.ops.mkldnn  # oneDNN's operators as torch's own compiler calls them


def _prepacked_forward(layer: nn.Linear, dtype: torch.dtype, rows: int) -> Callable[[Tensor], Tensor]:
    weight = _MKLDNN._reorder_linear_weight(layer.weight.detach().to(dtype), rows)
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    return lambda states: _MKLDNN._linear_pointwise(states.to(dtype), weight, bias, "none", [], "")

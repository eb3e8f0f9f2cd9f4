"""Weights in oneDNN's blocked layout, which makes products with few rows fast on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from rlhf.models.logprobs import forward_dtype


@contextlib.contextmanager
def prepacked_weights(model: nn.Module, rows: int, device: torch.device) -> Iterator[None]:
    """Context manager: linear layers use copies of their weights in oneDNN's blocked layout.

    A decoding step multiplies a few rows by all weights, and most of its time is spent reading the weights. The
    blocked layout makes it up to twice as fast on a CPU. `rows` is the number of rows of each product. Gradients are
    not supported, and the weights must not change meanwhile. Nothing happens on other devices, without oneDNN, or in
    precisions other than float32 and bfloat16.
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
    """Return the layers that `prepacked_weights` changes."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return []
    return [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]


def supports_prepacking(dtype: torch.dtype) -> bool:
    """True if this CPU can multiply blocked weights in this precision. bfloat16 requires AVX-512."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _MKLDNN._is_mkldnn_bf16_supported())


_MKLDNN = torch.ops.mkldnn  # the operators that torch.compile uses for oneDNN


def _prepacked_forward(layer: nn.Linear, dtype: torch.dtype, rows: int) -> Callable[[Tensor], Tensor]:
    product = BlockedProduct(layer.weight.detach().to(dtype), None if layer.bias is None else layer.bias.detach(), rows)
    return lambda states: product(states.to(dtype))


class Product:
    """A copied linear layer for decoding, alone or with what comes before or after it in a transformer layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (S, out), of x (S, in)."""
        return linear(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(x W^T + b)."""
        return silu(self(x), inplace=True)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return (x W^T + b) * factor."""
        return self(x).mul_(factor)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return x W^T + b + residual."""
        return residual + self(x)


class BlockedProduct(Product):
    """The same with oneDNN, in one operator each. The weight is in oneDNN's blocked layout for `rows` rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int):
        super().__init__(_MKLDNN._reorder_linear_weight(weight, rows), None if bias is None else bias.to(weight.dtype))

    def __call__(self, x: Tensor, activation: str = "none") -> Tensor:
        return _MKLDNN._linear_pointwise(x, self.weight, self.bias, activation, [], "")

    def silu(self, x: Tensor) -> Tensor:
        return self(x, "swish")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return _MKLDNN._linear_pointwise(x, factor, self.weight, self.bias, "mul")

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        if residual.dtype != x.dtype:  # under autocast the residual stream is float32
            return residual + self(x)
        return _MKLDNN._linear_pointwise(x, residual, self.weight, self.bias, "add")

"""Copies of the weights in the precision of the forward pass, made once per optimizer step.

The weights are trained in float32. Without copies, each would be converted in every forward and backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

HAS_FLOAT_OUTPUT = "dtype" in torch.ops.aten.mm.overloads()  # a bfloat16 product with a float32 result, on CUDA


class CastWeights:
    """Copies of float32 weights in `dtype`; no copies if it is None.

    They are read inside `in_use` only, because a change through `weight.data` cannot be detected. Other changes are: a
    changed weight has no copy until `refresh`.
    """

    _in_use: CastWeights | None = None

    def __init__(self, weights: Iterable[nn.Parameter], dtype: torch.dtype | None):
        self.weights = [] if dtype is None else [w for w in weights if w.dtype == torch.float32]
        self.dtype = dtype
        self.copies: dict[int, Tensor] = {}  # made on the first use: evaluations of models need none
        self.versions: dict[int, int] = {}  # of the weights when they were converted

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Context manager: converts all weights, then `stored` returns the copies."""
        before = CastWeights._in_use
        CastWeights._in_use = self
        try:
            if before is not self:
                self.refresh()
            yield
        finally:
            CastWeights._in_use = before

    @torch.no_grad()
    def refresh(self) -> None:
        """Convert all weights, with one operator. Call it after each optimizer step."""
        if self.weights:
            self.copies = self.copies or {id(w): torch.empty_like(w, dtype=self.dtype) for w in self.weights}
            torch._foreach_copy_(list(self.copies.values()), self.weights)
        self.versions = {id(w): w._version for w in self.weights}


def stored(weight: Tensor) -> Tensor:
    """Return the copy of a weight if one is in use, otherwise the weight."""
    used = CastWeights._in_use
    return used.copies[id(weight)] if used and used.versions.get(id(weight)) == weight._version else weight


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`. A GPU adds up a bfloat16 product in float32, and can write it without rounding."""
    if a.is_cuda and (a.dtype, dtype) == (torch.bfloat16, torch.float32) and HAS_FLOAT_OUTPUT:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)

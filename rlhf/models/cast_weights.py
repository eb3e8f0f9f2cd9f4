"""Copies of the weights in the precision of the forward pass, made once per optimizer step.

The weights are trained in float32. Without copies, the bfloat16 layers convert each of them in every forward pass and
in every backward pass. Matrices that multiply the same rows (q, k and v; gate and up) are one matrix in the copy, so
they are one product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

Group = tuple[nn.Parameter, ...]  # weights (out, in) that multiply the same rows


class CastWeights:
    """The copies of groups of float32 weights in `dtype`; no copies if it is None.

    They are used inside `in_use` only, because a change by `weight.data` cannot be detected. Any other change outside
    of `refresh` is detected: the weight is then converted where it is used.
    """

    _in_use: CastWeights | None = None

    def __init__(self, groups: Iterable[Group], dtype: torch.dtype | None):
        wanted = [] if dtype is None else [g for g in groups if all(w.dtype == torch.float32 for w in g)]
        self.groups, self.dtype, self.versions = wanted, dtype, {}
        self.matrices: dict[int, Tensor] = {}  # id of a group's first weight -> the copy, (sum of out, in)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Context manager: converts all weights, and `stored` returns the copies."""
        before, CastWeights._in_use = CastWeights._in_use, self
        try:
            if before is not self:
                self.refresh()
            yield
        finally:
            CastWeights._in_use = before

    @torch.no_grad()
    def refresh(self) -> None:
        """Convert all weights. Call it after each optimizer step."""
        for group in self.groups if not self.matrices else ():
            rows, width = sum(map(len, group)), group[0].shape[1]
            self.matrices[id(group[0])] = torch.empty(rows, width, dtype=self.dtype, device=group[0].device)
        if self.groups:
            parts = [self.matrices[id(group[0])].split([*map(len, group)]) for group in self.groups]
            torch._foreach_copy_([p for split in parts for p in split], [w for group in self.groups for w in group])
        self.versions = {id(group[0]): [w._version for w in group] for group in self.groups}

    def find(self, weights: Sequence[Tensor]) -> Tensor | None:
        """Return the copy of a group, or None if there is none or a weight has changed since."""
        key = id(weights[0])
        return self.matrices[key] if self.versions.get(key) == [w._version for w in weights] else None


def stored(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the copy of a group of weights, one matrix, or the weights if no copy is in use. `join` makes one matrix
    of frozen weights, too."""
    copy = CastWeights._in_use and CastWeights._in_use.find(weights)
    if copy is not None:
        return [copy]
    first, follows = weights[0], [b.storage_offset() - a.storage_offset() == a.numel() for a, b in pairwise(weights)]
    if first.element_size() == 2 and len({w.untyped_storage()._cdata for w in weights}) == 1 and all(follows):
        return [first.detach().as_strided((sum(map(len, weights)), first.shape[1]), first.stride())]
    return list(weights)


def converted(kept: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return what `stored` returned in `dtype`. Weights that must be converted become one matrix."""
    if all(w.dtype == dtype for w in kept):
        return list(kept)
    return [torch.cat([w.to(dtype) for w in kept]) if len(kept) > 1 else kept[0].to(dtype)]


def join(groups: Iterable[Group]) -> None:
    """Store each group of frozen weights as one matrix, of which the weights are parts."""
    for group in groups:
        for weight, part in zip(group, torch.cat([w.detach() for w in group]).split([*map(len, group)]), strict=True):
            weight.data = part


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`. A GPU adds up a product in bfloat16 in float32, and can write it without rounding."""
    if a.is_cuda and (a.dtype, dtype) == (torch.bfloat16, torch.float32):
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)

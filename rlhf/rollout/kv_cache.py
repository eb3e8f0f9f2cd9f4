"""The KV cache of continuous batching, its attention, and the packing of prompts for the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf.models.attention import Kernel, Layout
from rlhf.models.logprobs import forward_dtype
from rlhf.models.packing import on_device, pack_rows


class SlotKVCache:
    """Keys and values of all layers, with one slot per completion and one column per token.

    It replaces the cache of transformers: a layer passes its new keys and values to `update`, which returns the keys
    and values to attend to. The layers of rlhf.models.llama call `store`, whose shapes are those of a packed row.
    """

    def __init__(self, slots: int, columns: int, static: bool = False):
        """`static`: the tensors keep their memory when slots are dropped and used again."""
        self.most = slots
        self.slots = slots
        self.columns = columns
        self.static = static
        self.layers: dict[int, Tensor] = {}  # keys and values, (2, S, KV heads, columns, D)
        self.whole: dict[int, Tensor] = {}  # the same of all slots
        self.prompts: PackedPrompts | None = None  # of the next pass; None: a decoding step

    def use(self, slots: int) -> None:
        """Use the first `slots` slots."""
        self.slots = slots
        self.layers = {layer: stored[:, :slots] for layer, stored in self.whole.items()}

    def begin_decode(self, at: Tensor, span: int) -> None:
        """Prepare for a pass with one token per slot, stored in column `at` (S,). `span` columns are attended to."""
        self.prompts = None
        self.at = at
        self.span = span
        self.every = torch.arange(self.slots, device=at.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Store keys and values in the shapes of transformers: (1, KV heads, N, D), or to decode (S, KV heads, 1, D).
        Returns what to attend to."""
        both = torch.stack([keys, values], 1)
        if self.prompts is not None:
            self.store(both[0].movedim(2, 0), layer)
            return keys, values
        return self.store(both[:, :, :, 0], layer)

    def store(self, new: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store keys and values (N, 2, KV heads, D) of a packed row or of one token per slot.

        Returns those to attend to: after a prefill the new ones, (N, KV heads, D) each, otherwise those of the first
        `span` columns, (S, KV heads, span, D) each.
        """
        if layer not in self.layers:
            # keys are float32 after the rotary embedding; they are rounded once here, instead of at every step
            shape = 2, self.most, new.shape[2], self.columns, new.shape[3]
            self.whole[layer] = new.new_zeros(shape, dtype=forward_dtype(new))
            self.layers[layer] = self.whole[layer][:, : self.slots]
        stored = self.layers[layer]
        prompts = self.prompts
        if prompts is not None:
            own = new.index_select(0, prompts.gather_index)  # equal prompts are in the row once
            stored[:, prompts.slots, :, prompts.columns] = own.to(stored.dtype)
            return new[:, 0], new[:, 1]
        stored[:, self.every, :, self.at] = new.to(stored.dtype)
        keys, values = stored[:, :, :, : self.span].unbind()
        return keys, values

    def get_seq_length(self, *_) -> int:
        """Required by transformers. The result is unused, because positions are given."""
        return 0

    def compact(self, slots: Tensor) -> None:
        """Keep only these slots."""
        self.slots = len(slots)
        self.layers = {layer: chosen_rows(stored, slots, 1, self.static) for layer, stored in self.layers.items()}
        if not self.static:
            self.whole = self.layers  # frees the other slots


def chosen_rows(values: Tensor, rows: Tensor, dim: int, static: bool) -> Tensor:
    """Return these rows along a dimension; `static`: in the memory of the first rows of `values`."""
    chosen = values.index_select(dim, rows)
    return values.narrow(dim, 0, len(rows)).copy_(chosen) if static else chosen


class DecodeLayout(Layout):
    """One query per slot, which attends to the columns up to its own."""

    def __init__(self, at: Tensor, span: int, columns: Tensor | None = None):
        """`columns` (at least span,) are the numbers from 0; None: they are made for each mask."""
        self.at = at.view(-1, 1, 1, 1)
        self.span = span
        self.columns = columns
        self.masks: dict[tuple, Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what is added to attention scores, (S, 1, 1, span): 0, or minus infinity for columns not seen."""
        if (window, dtype) not in self.masks:
            columns = self.columns if self.columns is not None else torch.arange(self.span, device=self.at.device)
            unseen = columns[: self.span] > self.at
            if window is not None:
                unseen = unseen | (columns[: self.span] <= self.at - window)
            zeros = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
            self.masks[window, dtype] = zeros.masked_fill_(unseen, -torch.inf)
        return self.masks[window, dtype]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, kernel: Kernel) -> Tensor:
        return self.attend_row(query[:, :, 0], key, value, window, kernel).unsqueeze(1)

    def attend_row(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, kernel: Kernel) -> Tensor:
        """Treats the query heads of one key head as several queries, so that the keys need not be repeated."""
        grouped = query.unflatten(1, (key.shape[1], -1)).to(key.dtype)
        return kernel.as_given(grouped, key, value, self.mask(window, key.dtype), False).flatten(1, 2)


@dataclass(frozen=True)
class PackedPrompts:
    """Distinct prompts in one row of N tokens, and the slots of the R completions that start with them."""

    ids: Tensor  # (1, N)
    positions: Tensor  # (1, N)
    layout: Layout
    lengths: Tensor  # (R,) tokens of each completion's prompt
    last: Tensor  # (R,) index of the prompt's last token in the row
    # one entry per prompt token of each completion: where its keys and values are stored
    slots: Tensor
    columns: Tensor
    gather_index: Tensor  # index of the token in the row


def pack_prompts(prompts: Sequence[Sequence[int]], slots: Sequence[int], device: torch.device) -> PackedPrompts:
    """Pack one prompt per completion. Equal prompts are included once."""
    first: dict[tuple[int, ...], int] = {}
    which = [first.setdefault(tuple(p), len(first)) for p in prompts]
    lengths = [len(p) for p in first]
    starts = np.cumsum([0, *lengths])[:-1]
    positions, layout = pack_rows(lengths, device)
    numbers = [np.arange(lengths[w]) for w in which]
    return PackedPrompts(
        ids=torch.tensor([[t for p in first for t in p]], device=device),
        positions=positions,
        layout=layout,
        lengths=on_device(device, np.array([lengths[w] for w in which])),
        last=on_device(device, np.array([starts[w] + lengths[w] - 1 for w in which])),
        slots=on_device(device, np.repeat(slots, [len(n) for n in numbers])),
        columns=on_device(device, np.concatenate(numbers)),
        gather_index=on_device(device, np.concatenate([starts[w] + n for w, n in zip(which, numbers, strict=True)])),
    )

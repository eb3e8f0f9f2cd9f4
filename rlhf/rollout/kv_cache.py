"""The KV cache of continuous batching, its attention, and the packing of prompts for the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf.models.attention import Kernel, Layout, PackedLayout
from rlhf.models.logprobs import forward_dtype
from rlhf.models.packing import on_device, pack_rows


class SlotKVCache:
    """Keys and values of all layers, with one slot per completion and one column per token.

    It replaces the cache of transformers: a layer passes its new keys and values to `update`, which returns the keys
    and values to attend to.
    """

    def __init__(self, slots: int, columns: int):
        self.slots, self.columns = slots, columns
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys, values (S, KV heads, columns, D)
        self.prefill_index: tuple[Tensor, Tensor, Tensor] | None = None

    def begin_prefill(self, slots: Tensor, columns: Tensor, gather_index: Tensor) -> None:
        """Prepare for a pass over packed prompts: tokens at `gather_index` are stored in `columns` of `slots`."""
        self.prefill_index = slots, columns, gather_index

    def begin_decode(self, at: Tensor, span: int) -> None:
        """Prepare for a pass with one token per slot, stored in column `at` (S,). `span` columns are attended to."""
        self.prefill_index, self.at, self.span = None, at, span
        self.every = torch.arange(self.slots, device=at.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            # keys are float32 after the rotary embedding; they are rounded once here, instead of at every step
            self.layers[layer] = tuple(
                x.new_zeros(self.slots, x.shape[1], self.columns, x.shape[3], dtype=forward_dtype(x))
                for x in (keys, values)
            )
        stored = self.layers[layer]
        if self.prefill_index is not None:
            slots, columns, gather_index = self.prefill_index
            for store, new in zip(stored, (keys, values), strict=True):
                store[slots, :, columns] = new[0].transpose(0, 1).index_select(0, gather_index).to(store.dtype)
            return keys, values
        for store, new in zip(stored, (keys, values), strict=True):
            store[self.every, :, self.at] = new[:, :, 0].to(store.dtype)
        return stored[0][:, :, : self.span], stored[1][:, :, : self.span]

    def get_seq_length(self, *_) -> int:
        """Required by transformers. The result is unused, because positions are given."""
        return 0

    def compact(self, slots: Tensor) -> None:
        """Keep only these slots."""
        self.slots = len(slots)
        self.layers = {layer: (keys[slots], values[slots]) for layer, (keys, values) in self.layers.items()}


class DecodeLayout(Layout):
    """One query per slot, which attends to the columns up to its own."""

    def __init__(self, at: Tensor, span: int):
        self.at, self.span = at.view(-1, 1, 1, 1), span
        self.masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            columns = torch.arange(self.span, device=self.at.device)
            seen = columns <= self.at
            self.masks[window] = seen if window is None else seen & (columns > self.at - window)
        return self.masks[window]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, kernel: Kernel) -> Tensor:
        """Treats the query heads of one key head as several queries, so that the keys need not be repeated."""
        slots, heads, _, size = query.shape
        grouped = query.view(slots, key.shape[1], heads // key.shape[1], size)
        return kernel.as_given(grouped, key, value, self.mask(window), False).reshape(slots, 1, heads, value.shape[3])


@dataclass(frozen=True)
class PackedPrompts:
    """Distinct prompts in one row of N tokens, and the slots of the R completions that start with them."""

    ids: Tensor  # (1, N)
    positions: Tensor  # (1, N)
    layout: PackedLayout
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

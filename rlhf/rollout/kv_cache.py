"""The KV cache of continuous batching: a slot per completion, its attention, and the packed pass over prompts."""

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
    """Keys and values of all layers: a slot per completion, a column per token. It takes the place of transformers'
    cache: a layer passes its new keys and values to `update`, which returns those to attend to."""

    def __init__(self, slots: int, columns: int):
        self.slots, self.columns = slots, columns
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys, values (S, KV heads, columns, D)
        self.prefill_index: tuple[Tensor, Tensor, Tensor] | None = None

    def begin_prefill(self, slots: Tensor, columns: Tensor, gather_index: Tensor) -> None:
        """The next pass is over packed prompts: the row's tokens at `gather_index` go to `columns` of `slots`."""
        self.prefill_index = slots, columns, gather_index

    def begin_decode(self, at: Tensor, span: int) -> None:
        """The next pass is over one token for every slot, which goes to the column `at` (S,); `span` are in use."""
        self.prefill_index, self.at, self.span = None, at, span
        self.every = torch.arange(self.slots, device=at.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            # keys, which their rotation leaves in float32, are rounded once, and not whenever they are looked at
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
        """transformers asks; positions are given, so nothing depends on it."""
        return 0

    def compact(self, slots: Tensor) -> None:
        """Keep these slots alone."""
        self.slots = len(slots)
        self.layers = {layer: (keys[slots], values[slots]) for layer, (keys, values) in self.layers.items()}


class DecodeLayout(Layout):
    """One query a slot, which sees the columns up to its own."""

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
        """The query heads that share a key head take the place of its queries: keys are read once, not copied."""
        slots, heads, _, size = query.shape
        grouped = query.view(slots, key.shape[1], heads // key.shape[1], size)
        return kernel.as_given(grouped, key, value, self.mask(window), False).reshape(slots, 1, heads, value.shape[3])


@dataclass(frozen=True)
class PackedPrompts:
    """Prompts in one row of N tokens, each once, and the slots that they go to. R completions."""

    ids: Tensor  # (1, N)
    positions: Tensor  # (1, N)
    layout: PackedLayout
    lengths: Tensor  # (R,) of each completion's prompt
    last: Tensor  # (R,) place of its last token
    # where its keys and values go, one entry for each of its tokens
    slots: Tensor
    columns: Tensor
    gather_index: Tensor


def pack_prompts(prompts: Sequence[Sequence[int]], slots: Sequence[int], device: torch.device) -> PackedPrompts:
    """One prompt per completion; equal ones are run once."""
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

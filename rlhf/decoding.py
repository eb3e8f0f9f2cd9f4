"""What decoding in slots needs: a cache with a slot per reply, its attention, the packed pass over prompts, and, on a
processor, weights in the order in which few rows are multiplied fast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rlhf.models.attention import Kernel, Layout, PackedLayout
from rlhf.models.logprobs import forward_dtype
from rlhf.models.packing import on_device, pack_rows


class SlotCache:
    """Keys and values of all layers: a slot per reply being written, a column per token. Stands in for transformers'
    cache: a layer hands its new keys and values to `update` and gets back what to attend to."""

    def __init__(self, slots: int, columns: int):
        self.slots, self.columns = slots, columns
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys, values (S, KV heads, columns, D)
        self.filling: tuple[Tensor, Tensor, Tensor] | None = None

    def fill(self, slots: Tensor, columns: Tensor, places: Tensor) -> None:
        """The next pass is over packed prompts: what stands at `places` of the row goes to `columns` of `slots`."""
        self.filling = slots, columns, places

    def write(self, at: Tensor, span: int) -> None:
        """The next pass is over one token for every slot, which goes to the column `at` (S,); `span` are in use."""
        self.filling, self.at, self.span = None, at, span
        self.every = torch.arange(self.slots, device=at.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            # keys, which their rotation leaves in float32, are rounded once, and not whenever they are looked at
            self.layers[layer] = tuple(
                x.new_zeros(self.slots, x.shape[1], self.columns, x.shape[3], dtype=forward_dtype(x))
                for x in (keys, values)
            )
        stored = self.layers[layer]
        if self.filling is not None:
            slots, columns, places = self.filling
            for store, new in zip(stored, (keys, values), strict=True):
                store[slots, :, columns] = new[0].transpose(0, 1).index_select(0, places).to(store.dtype)
            return keys, values
        for store, new in zip(stored, (keys, values), strict=True):
            store[self.every, :, self.at] = new[:, :, 0].to(store.dtype)
        return stored[0][:, :, : self.span], stored[1][:, :, : self.span]

    def get_seq_length(self, *_) -> int:
        """transformers asks; positions are given, so nothing depends on it."""
        return 0

    def keep(self, slots: Tensor) -> None:
        """Go on with some slots."""
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
    """Prompts in one row of N tokens, each once, and the slots that they go to. R replies."""

    ids: Tensor  # (1, N)
    positions: Tensor  # (1, N)
    layout: PackedLayout
    lengths: Tensor  # (R,) of each reply's prompt
    last: Tensor  # (R,) place of its last token
    # where its keys and values go, one entry for each of its tokens
    slots: Tensor
    columns: Tensor
    places: Tensor


def pack_prompts(prompts: Sequence[Sequence[int]], slots: Sequence[int], device: torch.device) -> PackedPrompts:
    """One prompt per reply; equal ones are run once."""
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
        places=on_device(device, np.concatenate([starts[w] + n for w, n in zip(which, numbers, strict=True)])),
    )


# --- weights on a processor ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def blocked_weights(model: nn.Module, rows: int, device: torch.device) -> Iterator[None]:
    """While it lasts, linear layers multiply by copies of their weights in oneDNN's own blocked order.

    On a processor, a few rows times all weights is what decoding is, and reading the weights what it waits for: from
    blocks they come up to twice as fast. `rows` is how many rows a product will have. Without gradients only; weights
    may not change meanwhile. Elsewhere than in float32 and bfloat16 on a processor with oneDNN nothing is done.
    """
    layers = {layer: forward_dtype(layer.weight) for layer in blockable(model, device)}
    try:
        for layer, dtype in layers.items():
            if has_blocks(dtype):
                layer.forward = _blocked(layer, dtype, rows)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def blockable(model: nn.Module, device: torch.device) -> list[nn.Linear]:
    """The layers that `blocked_weights` changes."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return []
    return [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]


def has_blocks(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies blocked weights of a precision: bfloat16 needs AVX-512."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _MKLDNN._is_mkldnn_bf16_supported())


_MKLDNN = torch.ops.mkldnn  # oneDNN's operators as torch's own compiler calls them


def _blocked(layer: nn.Linear, dtype: torch.dtype, rows: int) -> Callable[[Tensor], Tensor]:
    weight = _MKLDNN._reorder_linear_weight(layer.weight.detach().to(dtype), rows)
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    return lambda states: _MKLDNN._linear_pointwise(states.to(dtype), weight, bias, "none", [], "")

"""Attention over packed episodes: which token attends to which.

A packed row has only real tokens, one episode after another. All layers except attention treat tokens separately, so
only attention needs the boundaries of episodes: it gathers the queries and keys of each episode from the row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

# name of `attend` in transformers' registry of attention functions. Without a `layout` it computes the same as "sdpa"
ATTENTION = "packed"


def packable(model: PreTrainedModel) -> bool:
    """True if this architecture accepts another attention function, and tokens interact only in attention.

    Recurrences and convolutions would mix neighbouring episodes of a packed row.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    exchangeable = getattr(model, "_supports_attention_backend", False) and not getattr(model, "_is_stateful", False)
    return bool(exchangeable) and kinds <= {"full_attention", "sliding_attention"}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    layout: Layout | None = None,
    **_,
) -> tuple[Tensor, None]:
    """Computes attention, with the interface of transformers. Returns the output (B, Q, heads, D), and None.

    Args:
        module: the attention layer.
        query: (B, heads, Q, D)
        key: (B, KV heads, K, D)
        value: (B, KV heads, K, D)
        attention_mask: mask from the model; used without a layout only.
        scaling: factor of the scores; None: D ** -0.5.
        sliding_window: number of positions that a query attends to, its own included; None: all.
        softcap: limit of soft-capped scores; None: no soft cap.
        layout: who attends to whom in a packed row (B = 1) or in the KV cache; None: `attention_mask` decides.
    """
    kernel = Kernel(scaling, softcap)
    if layout is None:
        causal = attention_mask is None and query.shape[2] > 1
        return kernel(query, key, value, attention_mask, causal).transpose(1, 2).contiguous(), None
    return layout.attend(query, key, value, sliding_window, kernel), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@dataclass(frozen=True)
class Kernel:
    """Scaled dot-product attention. Soft-capped scores (Gemma 2) are computed here, because torch has no kernel."""

    scaling: float | None
    softcap: float | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Computes attention in the shape of `query`, in float32 under autocast on a CPU.

        Query (R, heads, Q, D), key and value (R, KV heads, K, D), mask (R or 1, 1, Q, K) bool, or floats that are
        added to the scores. `causal` adds the causal mask, if `mask` is None.
        """
        if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # half the time of torch's bfloat16 kernel for CPUs, forward and backward (benchmarks/experiment_log.md)
            with torch.autocast("cpu", enabled=False):
                found = self.as_given(query.float(), key.float(), value.float(), mask, causal)
            return found.to(torch.get_autocast_dtype("cpu"))
        return self.as_given(query, key, value, mask, causal)

    def as_given(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """The same in the precision of autocast, or of the tensors."""
        groups = query.shape[1] // key.shape[1]
        if self.softcap is None and mask is None:
            return scaled_dot_product_attention(
                query, key, value, is_causal=causal, scale=self.scaling, enable_gqa=groups > 1
            )
        if groups > 1:
            key = key.repeat_interleave(groups, 1)
            value = value.repeat_interleave(groups, 1)
        if self.softcap is None:
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scaling)
        scores = query @ key.transpose(2, 3) * (self.scaling or query.shape[-1] ** -0.5)
        scores = torch.tanh(scores / self.softcap) * self.softcap
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None and mask.is_floating_point():
            scores = scores + mask
        elif mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1).to(value.dtype) @ value


class Layout(ABC):
    """Who attends to whom in one forward pass. Layers with the same sliding window share their masks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, kernel: Kernel) -> Tensor:
        """Computes attention for one layer, in the shapes of the function `attend`, for a packed row (B = 1).

        A query attends to at most `window` - 1 earlier positions; None: no limit.
        """
        rows = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return self.attend_row(*rows, window, kernel).unsqueeze(0)

    @abstractmethod
    def attend_row(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, kernel: Kernel) -> Tensor:
        """The same for queries of N tokens, (N, heads, D). Returns their output (N, heads, D).

        Key and value are those of the row, (N, KV heads, D), or while decoding those of the cache.
        """


@dataclass
class Segment:
    """The queries and keys of R episodes, as indices into the packed row.

    Padding repeats a row's last index. Outputs of padding queries are dropped, and no real query attends to a padding
    key.
    """

    queries: Tensor | None  # (R, Q); None: all indices of the row in order, Q per episode
    keys: Tensor | None  # (R, K); None: as `queries`
    shape: tuple[int, int, int]  # R, Q, K
    before: Tensor | None  # (R,) number of keys before the first query; None: the queries are the keys
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Return the mask (R or 1, 1, Q, K) bool, or None if the causal mask is enough."""
        if window is not None and window >= self.shape[2]:
            window = None
        if self.before is None and window is None:
            return None
        if window not in self.masks:
            query = torch.arange(self.shape[1], device=device)
            key = torch.arange(self.shape[2], device=device)
            before = self.before if self.before is not None else torch.zeros(1, dtype=torch.long, device=device)
            query = before.view(-1, 1, 1) + query.view(1, -1, 1)
            seen = key <= query
            if window is not None:
                seen = seen & (key > query - window)
            self.masks[window] = seen.unsqueeze(1)
        return self.masks[window]


@dataclass
class PackedLayout(Layout):
    """Episodes in one row of N tokens."""

    segments: list[Segment]
    inverse_index: Tensor | None  # (N,) index of each token among the segments' queries; None: in order

    def attend_row(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, kernel: Kernel) -> Tensor:
        parts = []
        for segment in self.segments:
            rows, queries, keys = segment.shape
            mask = segment.mask(window, query.device)
            given = kernel(
                _gather(query, segment.queries, rows, queries),
                _gather(key, segment.keys, rows, keys),
                _gather(value, segment.keys, rows, keys),
                mask,
                mask is None,
            )
            parts.append(given.transpose(1, 2).flatten(0, 1))  # (R * Q, heads, D)
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return packed if self.inverse_index is None else packed.index_select(0, self.inverse_index)


def _gather(row: Tensor, gather_index: Tensor | None, episodes: int, tokens: int) -> Tensor:
    """Gathers (R, heads, T, D) from a row (N, heads, D)."""
    taken = row if gather_index is None else row.index_select(0, gather_index.flatten())
    return taken.view(episodes, tokens, *row.shape[1:]).transpose(1, 2)

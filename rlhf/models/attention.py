"""Attention over packed episodes: which token may look at which.

Packed, the layers run over real tokens only, one after another in a single row. Attention alone has to know which
token belongs to which episode: it gathers each episode's queries and keys from the row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

ATTENTION = "packed"  # our name in transformers' table of attention functions


def packable(model: PreTrainedModel) -> bool:
    """Whether this architecture lets its attention be exchanged, and looks at other tokens in no other way: what runs
    along the row, as recurrences and convolutions do, would run from one episode into the next."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    exchangeable = getattr(model, "_supports_attention_backend", False) and not getattr(model, "_is_stateful", False)
    return bool(exchangeable) and kinds <= {"full_attention", "sliding_attention"}


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a model's attention ours. Without a `layout` it is what torch's scaled_dot_product_attention was."""
    model.config._attn_implementation = ATTENTION


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
    """transformers' attention interface: query (B, heads, Q, D), key, value (B, KV heads, K, D) to (B, Q, heads, D).

    With a `layout`, B is 1 and it says who attends to whom; without one, the mask that the model made does.
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
    """Scaled dot-product attention; by hand where scores are soft-capped (Gemma 2), which no kernel of torch does."""

    scaling: float | None
    softcap: float | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """query (R, heads, Q, D), key and value (R, KV heads, K, D), mask (R or 1, 1, Q, K) bool -> query's shape."""
        if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # half the time of torch's bfloat16 kernel for processors, forward and backward (NOTES.md)
            with torch.autocast("cpu", enabled=False):
                found = self.as_given(query.float(), key.float(), value.float(), mask, causal)
            return found.to(torch.get_autocast_dtype("cpu"))
        return self.as_given(query, key, value, mask, causal)

    def as_given(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """The same in whatever precision autocast, or the tensors, have."""
        groups = query.shape[1] // key.shape[1]
        if self.softcap is None and mask is None:
            return scaled_dot_product_attention(
                query, key, value, is_causal=causal, scale=self.scaling, enable_gqa=groups > 1
            )
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if self.softcap is None:
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scaling)
        scores = query @ key.transpose(2, 3) * (self.scaling or query.shape[-1] ** -0.5)
        scores = torch.tanh(scores / self.softcap) * self.softcap
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1).to(value.dtype) @ value


class Layout(ABC):
    """Who attends to whom in a forward pass of ours. Masks are made once for all layers that share a window."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, kernel: Kernel) -> Tensor:
        """As `attend`, for one layer: queries look at most `window` - 1 positions back, if it is not None."""


@dataclass
class Segment:
    """Some episodes' queries and the keys that they see, as places in the packed row. R episodes.

    Padding points at place 0: what a padding query yields is dropped, and no query sees a padding key."""

    queries: Tensor | None  # (R, Q); None: all places of the row in order, Q to an episode
    keys: Tensor | None  # (R, K); None likewise
    shape: tuple[int, int, int]  # R, Q, K
    before: Tensor | None  # (R,) keys before an episode's first query; None: its queries are its keys
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """(R or 1, 1, Q, K) bool, or None where plain causality is all there is."""
        if window is not None and window >= self.shape[2]:
            window = None
        if self.before is None and window is None:
            return None
        if window not in self.masks:
            query, key = torch.arange(self.shape[1], device=device), torch.arange(self.shape[2], device=device)
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
    inverse_index: Tensor | None  # (N,) each token's place among the segments' queries; None: in order

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, kernel: Kernel) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, D)
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
        return (packed if self.inverse_index is None else packed.index_select(0, self.inverse_index)).unsqueeze(0)


def _gather(row: Tensor, gather_index: Tensor | None, episodes: int, tokens: int) -> Tensor:
    """(N, heads, D) -> (R, heads, T, D)."""
    taken = row if gather_index is None else row.index_select(0, gather_index.flatten())
    return taken.view(episodes, tokens, *row.shape[1:]).transpose(1, 2)

"""Passages: what one forward pass reads of some episodes, padded or packed, and the attention that packing needs.

Packed, the layers run over real tokens only, one after another in a single row: no padding, no last token of a reply
(nothing is predicted from it), and a prompt once for all its replies. Attention alone has to know which token is
whose: it gathers each episode's queries and keys from the row. `Padded` is the plain twin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

ATTENTION = "packed"  # our name in transformers' table of attention functions


# --- attention -------------------------------------------------------------------------------------------------------


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
    back: Tensor | None  # (N,) each token's place among the segments' queries; None: in order

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
        return (packed if self.back is None else packed.index_select(0, self.back)).unsqueeze(0)


def _gather(row: Tensor, places: Tensor | None, episodes: int, tokens: int) -> Tensor:
    """(N, heads, D) -> (R, heads, T, D)."""
    taken = row if places is None else row.index_select(0, places.flatten())
    return taken.view(episodes, tokens, *row.shape[1:]).transpose(1, 2)


# --- passages --------------------------------------------------------------------------------------------------------


@dataclass
class Episodes:
    """What a passage is made from: B episodes with C prompt and T reply tokens at most, and how long each one is.

    Lengths are plain numbers, so that a layout is worked out without waiting for the device.
    """

    prompt_ids: Tensor  # (B, C) padded on the left
    prompt_mask: Tensor  # (B, C) True on real tokens
    reply_ids: Tensor  # (B, T) padded on the right
    mask: Tensor  # (B, T) True on the reply's tokens
    prompt_lengths: Sequence[int]
    reply_lengths: Sequence[int]
    groups: Sequence[int]  # episodes of one number have one prompt

    @property
    def ids(self) -> Tensor:
        """Prompt and reply, (B, C + T)."""
        return torch.cat([self.prompt_ids, self.reply_ids], dim=1)

    @property
    def attention(self) -> Tensor:
        """True on real tokens, (B, C + T)."""
        return torch.cat([self.prompt_mask, self.mask], dim=1)


class Passage(ABC):
    """One forward pass over the episodes `rows`. M reply tokens in all, row by row."""

    def __init__(self, episodes: Episodes, rows: Sequence[int]):
        device, width = episodes.reply_ids.device, episodes.reply_ids.shape[1]
        self.rows = list(rows)
        self.lengths = [episodes.reply_lengths[r] for r in self.rows]
        cells = [r * width + np.arange(n) for r, n in zip(self.rows, self.lengths, strict=True)]
        self.cells = on_device(device, np.concatenate(cells))  # (M,) places of the reply tokens in (B, T)
        self.index = on_device(device, np.array(self.rows))
        self.tokens = episodes.reply_ids.flatten().index_select(0, self.cells)  # (M,)
        self.mask = episodes.mask.index_select(0, self.index)  # (R, T)

    @abstractmethod
    def hidden(self, backbone: nn.Module) -> Tensor:
        """The hidden states that the reply tokens are predicted from, (M, H)."""


class Padded(Passage):
    """Episodes as rows of equal length: the plain twin."""

    def __init__(self, episodes: Episodes, rows: Sequence[int]):
        super().__init__(episodes, rows)
        self.ids = episodes.ids.index_select(0, self.index)
        self.attention = episodes.attention.index_select(0, self.index)

    def hidden(self, backbone: nn.Module) -> Tensor:
        positions = (self.attention.long().cumsum(1) - 1).clamp(min=0)
        output = backbone(
            input_ids=self.ids, attention_mask=self.attention, position_ids=positions, use_cache=False
        ).last_hidden_state
        context = self.ids.shape[1] - self.mask.shape[1]
        return output[:, context - 1 : -1][self.mask]


class Packed(Passage):
    """Episodes in one row without padding, in which a prompt that several share stands once."""

    def __init__(self, episodes: Episodes, rows: Sequence[int]):
        super().__init__(episodes, rows)
        device = episodes.reply_ids.device
        plan = _plan(episodes, self.rows, self.lengths)
        both = episodes.ids
        self.ids = both.flatten().index_select(0, on_device(device, plan.cells)).unsqueeze(0)  # (1, N)
        self.positions = on_device(device, plan.positions).unsqueeze(0)
        self.predictors = on_device(device, plan.predictors)
        self.layout = plan.layout(device)

    def hidden(self, backbone: nn.Module) -> Tensor:
        return run_packed(backbone, self.ids, self.positions, self.layout).index_select(0, self.predictors)


def run_packed(backbone: nn.Module, ids: Tensor, positions: Tensor, layout: Layout, cache=None) -> Tensor:
    """Hidden states (N, H) of a packed row, ids and positions (1, N)."""
    use_packed_attention(backbone)
    made = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)  # of four dimensions: models make none then
    output = backbone(
        input_ids=ids,
        attention_mask=made,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
        layout=layout,
    )
    return output.last_hidden_state[0]


# --- where every token stands ----------------------------------------------------------------------------------------


@dataclass
class _Plan:
    """A packed row of N tokens, as arrays of integers."""

    cells: np.ndarray  # (N,) places in the padded (B, C + T)
    positions: np.ndarray  # (N,)
    predictors: np.ndarray  # (M,) places in the row
    segments: list[tuple[list[np.ndarray], list[np.ndarray], list[int] | None]]  # queries, keys, keys before

    def layout(self, device: torch.device) -> PackedLayout:
        segments, places = [], []
        for queries, keys, before in self.segments:
            ours, starts = _rectangle(queries)
            theirs, _ = _rectangle(keys)
            places.append((queries, starts, ours.shape[1]))
            dense = before is None and min(map(len, queries)) == ours.shape[1] and len(self.segments) == 1
            segments.append(
                Segment(
                    None if dense else on_device(device, ours),
                    None if dense else on_device(device, theirs),
                    (*ours.shape, theirs.shape[1]),
                    None if before is None else on_device(device, np.array(before)),
                )
            )
        if len(segments) == 1 and segments[0].queries is None:
            return PackedLayout(segments, None)
        back, offset = np.empty(len(self.cells), dtype=np.int64), 0
        for (queries, starts, width), segment in zip(places, segments, strict=True):
            for places_of, start in zip(queries, starts, strict=True):
                back[places_of] = offset + start + np.arange(len(places_of))
            offset += segment.shape[0] * width
        return PackedLayout(segments, on_device(device, back))


def _plan(episodes: Episodes, rows: Sequence[int], lengths: Sequence[int]) -> _Plan:
    """Prompt by prompt: the prompt, then all its replies, each without its last token."""
    context = episodes.prompt_ids.shape[1]
    width = context + episodes.reply_ids.shape[1]
    shared = len({episodes.groups[r] for r in rows}) < len(rows)
    prompts: dict[int, np.ndarray] = {}
    order: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        order.setdefault(episodes.groups[row] if shared else at, []).append(at)
    cells, positions, replies, end = [], [], [np.empty(0)] * len(rows), 0
    for key, members in order.items():
        first, size = rows[members[0]], episodes.prompt_lengths[rows[members[0]]]
        cells.append(first * width + context - size + np.arange(size))
        positions.append(np.arange(size))
        prompts[key] = end + np.arange(size)
        end += size
        for at in members:
            run = lengths[at] - 1
            cells.append(rows[at] * width + context + np.arange(run))
            positions.append(size + np.arange(run))
            replies[at] = end + np.arange(run)
            end += run
    key_of = {at: key for key, members in order.items() for at in members}
    predictors = [np.concatenate([prompts[key_of[at]][-1:], replies[at]]) for at in range(len(rows))]
    whole = [np.concatenate([prompts[key_of[at]], replies[at]]) for at in range(len(rows))]
    if not shared:
        segments = [(whole, whole, None)]
    else:
        longer = [at for at in range(len(rows)) if len(replies[at])]
        segments = [(list(prompts.values()), list(prompts.values()), None)]
        if longer:
            before = [len(prompts[key_of[at]]) for at in longer]
            segments.append(([replies[at] for at in longer], [whole[at] for at in longer], before))
    return _Plan(np.concatenate(cells), np.concatenate(positions), np.concatenate(predictors), segments)


def _rectangle(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of unlike lengths as one (R, longest), filled up with 0, and where in it each row starts."""
    longest = max(map(len, rows))
    filled = np.zeros((len(rows), longest), dtype=np.int64)
    for into, row in zip(filled, rows, strict=True):
        into[: len(row)] = row
    return filled, np.arange(len(rows)) * longest


def on_device(device: torch.device, numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).to(device, non_blocking=True)


def pack_rows(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, PackedLayout]:
    """Positions (1, N) and layout of some texts in one row."""
    ends = np.cumsum(lengths)
    texts = [np.arange(end - size, end) for size, end in zip(lengths, ends, strict=True)]
    positions = np.concatenate([np.arange(size) for size in lengths])
    plan = _Plan(positions, positions, positions, [(texts, texts, None)])
    return on_device(device, positions).unsqueeze(0), plan.layout(device)

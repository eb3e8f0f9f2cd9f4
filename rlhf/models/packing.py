"""Micro-batches, the inputs of one forward pass over some episodes, padded or packed.

A packed row has no padding. It has each prompt once for all its completions, and lacks the last token of every
completion, because nothing is predicted from it. `PaddedMicroBatch` is the reference implementation in tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from rlhf.models import llama
from rlhf.models.attention import ATTENTION, Layout, PackedLayout, Segment


@dataclass
class TokenBatch:
    """B episodes with at most C prompt and T completion tokens, from which micro-batches are built.

    The completion is all that follows the prompt. The policy wrote its turns, an environment the other tokens. Lengths
    and turns are Python ints, so that a layout is computed without a synchronization with the device.
    """

    prompt_ids: Tensor  # (B, C) padded on the left
    prompt_mask: Tensor  # (B, C) True on real tokens
    completion_ids: Tensor  # (B, T) padded on the right
    mask: Tensor  # (B, T) True on the completion's tokens
    prompt_lengths: Sequence[int]
    completion_lengths: Sequence[int]
    groups: Sequence[int]  # episodes with the same number have the same prompt
    # where the turns of the policy are in each completion; None: all of it is one turn
    turns: list[list[range]] = field(default=None, kw_only=True)
    action_mask: Tensor = field(default=None, kw_only=True)  # (B, T) True on the tokens of turns

    def __post_init__(self):
        if self.turns is None:
            self.turns = [[range(length)] for length in self.completion_lengths]
            self.action_mask = self.mask
        elif self.action_mask is None:
            self.action_mask = self.true_at([self.actions(row) for row in range(len(self.turns))])

    def actions(self, row: int) -> np.ndarray:
        """Return the columns of the policy's tokens in a completion."""
        return np.concatenate([np.arange(0), *(np.arange(turn.start, turn.stop) for turn in self.turns[row])])

    def true_at(self, columns: Sequence[Sequence[int]]) -> Tensor:
        """Return a mask (B, T) that is True at these columns of each completion."""
        found = torch.zeros(self.mask.shape, dtype=torch.bool)
        for row, own in zip(found, columns, strict=True):
            row[own] = True
        return found.to(self.mask.device)

    def placed(self, parts: Sequence[Mapping[int, Tensor]], unknown: int) -> Tensor | None:
        """Return values of the policy's tokens at their places, (B, T, ...): of each completion parts (N, ...), by the
        number of its tokens before. Other tokens of the policy have `unknown`, and the rest 0. None without parts."""
        one = next((part for own in parts for part in own.values()), None)
        if one is None:
            return None
        found = one.new_zeros(*self.mask.shape, *one.shape[1:])
        for row, own in enumerate(parts):
            places = on_device(found.device, self.actions(row))
            found[row, places] = unknown
            for start, part in own.items():
                found[row, places[start : start + len(part)]] = part
        return found

    @property
    def turn_ends(self) -> Tensor:
        """True on the last token of each turn, (B, T)."""
        return self.true_at([[turn[-1] for turn in turns] for turns in self.turns])

    @property
    def ids(self) -> Tensor:
        """Prompt and completion ids, (B, C + T)."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention(self) -> Tensor:
        """True on real tokens, (B, C + T)."""
        return torch.cat([self.prompt_mask, self.mask], dim=1)


class MicroBatch(ABC):
    """The inputs of one forward pass over R episodes, `rows`, with M tokens of the policy in total, row by row."""

    def __init__(self, episodes: TokenBatch, rows: Sequence[int]):
        device = episodes.completion_ids.device
        width = episodes.completion_ids.shape[1]
        self.episodes = episodes
        self.rows = list(rows)
        actions = [episodes.actions(r) for r in self.rows]
        self.lengths = list(map(len, actions))  # tokens of the policy in each episode
        flat_index = [r * width + columns for r, columns in zip(self.rows, actions, strict=True)]
        self.flat_index = on_device(device, np.concatenate(flat_index))  # (M,) index of these tokens in (B * T,)
        self.row_index = on_device(device, np.array(self.rows))
        self.tokens = episodes.completion_ids.flatten().index_select(0, self.flat_index)  # (M,)
        self.mask = episodes.action_mask.index_select(0, self.row_index)  # (R, T)

    @property
    @abstractmethod
    def places(self) -> np.ndarray:
        """The index of each input token in the padded ids, (B * (C + T),)."""

    def token_numbers(self) -> np.ndarray:
        """Return a number for each input token, which depends on its completion, or its prompt, and its position, but
        not on the micro-batch."""
        episodes = self.episodes
        context = self.episodes.prompt_ids.shape[1]
        row, column = np.divmod(self.places, context + episodes.completion_ids.shape[1])
        position = column - context + np.array(episodes.prompt_lengths)[row]
        owner = np.where(column < context, np.array(episodes.groups)[row], len(episodes.groups) + row)
        return owner * 2**32 + position

    @abstractmethod
    def forward(self, backbone: nn.Module) -> Tensor:
        """Runs the backbone. Returns the hidden states from which the policy's tokens are predicted, (M, H)."""


class PaddedMicroBatch(MicroBatch):
    """Episodes as padded rows of equal length: the reference implementation."""

    def __init__(self, episodes: TokenBatch, rows: Sequence[int]):
        super().__init__(episodes, rows)
        self.ids = episodes.ids.index_select(0, self.row_index)
        self.attention = episodes.attention.index_select(0, self.row_index)

    @property
    def places(self) -> np.ndarray:
        width = self.ids.shape[1]
        return (np.array(self.rows)[:, None] * width + np.arange(width)).ravel()

    def forward(self, backbone: nn.Module) -> Tensor:
        # detail 5: padding is not counted (N details). Otherwise a long prompt shifts the positions of the others.
        positions = (self.attention.long().cumsum(1) - 1).clamp(min=0)
        output = backbone(
            input_ids=self.ids, attention_mask=self.attention, position_ids=positions, use_cache=False
        ).last_hidden_state
        context = self.ids.shape[1] - self.mask.shape[1]
        return output[:, context - 1 : -1][self.mask]


class PackedMicroBatch(MicroBatch):
    """Episodes in one row without padding, in which a prompt of several episodes occurs once."""

    def __init__(self, episodes: TokenBatch, rows: Sequence[int]):
        super().__init__(episodes, rows)
        device = episodes.completion_ids.device
        plan = _plan(episodes, self.rows)
        both = episodes.ids
        self._places = plan.flat_index
        self.ids = both.flatten().index_select(0, on_device(device, plan.flat_index)).unsqueeze(0)  # (1, N)
        self.positions = on_device(device, plan.positions).unsqueeze(0)
        self.predictors = on_device(device, plan.predictors)
        self.layout = plan.layout(device)

    @property
    def places(self) -> np.ndarray:
        return self._places

    def forward(self, backbone: nn.Module) -> Tensor:
        return run_packed(backbone, self.ids, self.positions, self.layout).index_select(0, self.predictors)


def run_packed(backbone: nn.Module, ids: Tensor, positions: Tensor, layout: Layout, cache=None) -> Tensor:
    """Return the hidden states (N, H) of a packed row with ids and positions (1, N), or of one token per slot of the
    cache, (N, 1)."""
    if llama.supports(backbone):
        return llama.forward(backbone, ids.flatten(), positions.flatten(), layout, cache)
    backbone.config._attn_implementation = ATTENTION
    # with a mask of four dimensions, models do not build one themselves
    full_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    output = backbone(
        input_ids=ids,
        attention_mask=full_mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
        layout=layout,
    )
    return output.last_hidden_state.flatten(0, 1)


@dataclass
class _Plan:
    """A packed row of N tokens, as integer arrays."""

    flat_index: np.ndarray  # (N,) index of each token in the padded ids, (B * (C + T),)
    positions: np.ndarray  # (N,)
    predictors: np.ndarray  # (M,) index in the row of the token from which each token of the policy is predicted
    segments: list[tuple[list[np.ndarray], list[np.ndarray], list[int] | None]]  # queries, keys, keys before

    def layout(self, device: torch.device) -> Layout:
        segments = []
        rectangles = []
        for queries, keys, before in self.segments:
            query_index, starts = _rectangle(queries)
            key_index, _ = _rectangle(keys)
            rectangles.append((queries, starts, query_index.shape[1]))
            dense = before is None and min(map(len, queries)) == query_index.shape[1] and len(self.segments) == 1
            segments.append(
                Segment(
                    None if dense else on_device(device, query_index),
                    None if dense else on_device(device, key_index),
                    (*query_index.shape, key_index.shape[1]),
                    None if before is None else on_device(device, np.array(before)),
                )
            )
        if len(segments) == 1 and segments[0].queries is None:
            return PackedLayout(segments, None)
        inverse_index = np.empty(len(self.flat_index), dtype=np.int64)
        offset = 0
        for (queries, starts, width), segment in zip(rectangles, segments, strict=True):
            for gather_index, start in zip(queries, starts, strict=True):
                inverse_index[gather_index] = offset + start + np.arange(len(gather_index))
            offset += segment.shape[0] * width
        return PackedLayout(segments, on_device(device, inverse_index))


def _plan(episodes: TokenBatch, rows: Sequence[int]) -> _Plan:
    """Return the plan of a row with each prompt, followed by all its completions without their last tokens."""
    context = episodes.prompt_ids.shape[1]
    width = context + episodes.completion_ids.shape[1]
    shared = len({episodes.groups[r] for r in rows}) < len(rows)
    prompts: dict[int, np.ndarray] = {}
    order: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        order.setdefault(episodes.groups[row] if shared else at, []).append(at)
    flat_index = []
    positions = []
    completions = [np.empty(0)] * len(rows)
    end = 0
    for key, members in order.items():
        first = rows[members[0]]
        size = episodes.prompt_lengths[rows[members[0]]]
        flat_index.append(first * width + context - size + np.arange(size))
        positions.append(np.arange(size))
        prompts[key] = end + np.arange(size)
        end += size
        for at in members:
            run = episodes.completion_lengths[rows[at]] - 1
            flat_index.append(rows[at] * width + context + np.arange(run))
            positions.append(size + np.arange(run))
            completions[at] = end + np.arange(run)
            end += run
    key_of = {at: key for key, members in order.items() for at in members}
    before = [np.concatenate([prompts[key_of[at]][-1:], completions[at]]) for at in range(len(rows))]
    predictors = [places[episodes.actions(row)] for places, row in zip(before, rows, strict=True)]
    whole = [np.concatenate([prompts[key_of[at]], completions[at]]) for at in range(len(rows))]
    if not shared:
        segments = [(whole, whole, None)]
    else:
        longer = [at for at in range(len(rows)) if len(completions[at])]
        segments = [(list(prompts.values()), list(prompts.values()), None)]
        if longer:
            before = [len(prompts[key_of[at]]) for at in longer]
            segments.append(([completions[at] for at in longer], [whole[at] for at in longer], before))
    return _Plan(np.concatenate(flat_index), np.concatenate(positions), np.concatenate(predictors), segments)


def _rectangle(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of different lengths as one array (R, longest), and the flat index of each start.

    A row is padded with its own last number. The gradient of a gather adds up the padding at that token; with one
    number for all rows, a GPU would add the padding of all rows to one token, one after another.
    """
    longest = max(map(len, rows))
    filled = np.empty((len(rows), longest), dtype=np.int64)
    for into, row in zip(filled, rows, strict=True):
        into[: len(row)] = row
        into[len(row) :] = row[-1]
    return filled, np.arange(len(rows)) * longest


def on_device(device: torch.device, numbers: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def pack_rows(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Layout]:
    """Return the positions (1, N) and the layout of texts with these lengths in one row."""
    ends = np.cumsum(lengths)
    texts = [np.arange(end - size, end) for size, end in zip(lengths, ends, strict=True)]
    positions = np.concatenate([np.arange(size) for size in lengths])
    plan = _Plan(positions, positions, positions, [(texts, texts, None)])
    return on_device(device, positions).unsqueeze(0), plan.layout(device)

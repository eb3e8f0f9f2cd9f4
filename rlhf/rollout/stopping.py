"""What ends a completion: an EOS id, or a stop string."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.tokenizer import eos_ids

CHECK_EVERY = 4  # decoding steps between checks for ended completions; each check synchronizes with the GPU


@dataclass(frozen=True)
class StoppingCriterion:
    """What ends a completion: one of the EOS ids, or the token that completes a stop string.

    Stop strings are searched in decoded text on the CPU, at the engines' checks, which read the device anyway. `mask`
    searches the whole text and decides alone; a check reads the last tokens and only saves time. An automaton over ids
    would run on the GPU, but needs the bytes of every token, which each kind of tokenizer stores in another way.
    """

    eos_ids: Sequence[int]  # the tokenizer's EOS first
    stop: tuple[str, ...] = ()
    tokenizer: PreTrainedTokenizerBase | None = None  # only used for stop strings

    @classmethod
    def of(cls, eos: int | StoppingCriterion) -> StoppingCriterion:
        """Return the criterion; for an id, the one that ends completions at this id only."""
        return eos if isinstance(eos, StoppingCriterion) else cls([eos])

    @property
    def eos(self) -> int:
        return self.eos_ids[0]

    @property
    def window(self) -> int:
        """How many last tokens contain each stop string that was completed since the last check: one for each of its
        bytes, those since the check, and one that may lose its space as the first of a text."""
        return max(len(text.encode()) for text in self.stop) + CHECK_EVERY + 1

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Return which token ids end a completion, in the shape of `tokens`. Copies nothing to the device."""
        return reduce(torch.logical_or, (tokens == eos for eos in self.eos_ids))

    def found(self, ids: Sequence[int]) -> bool:
        """Return whether the text of token ids contains a stop string."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return any(one in text for one in self.stop)

    def mask(self, completions: Tensor) -> tuple[Tensor, Tensor]:
        """Return a mask (B, T) that is True up to and including the token that ends each completion, and True for the
        completions that end, (B,). With stop strings, it synchronizes with the device."""
        is_eos = self.is_eos(completions)
        mask = is_eos.long().cumsum(1) - is_eos.long() == 0
        ended = is_eos.any(1)
        if not self.stop:
            return mask, ended
        rows = [row[:n] for row, n in zip(completions.tolist(), mask.sum(1).tolist(), strict=True)]
        lengths = torch.tensor([self.stop_length(row) for row in rows], device=mask.device)
        within = torch.arange(mask.shape[1], device=mask.device) < lengths.unsqueeze(1)
        return mask & (within | (lengths == 0).unsqueeze(1)), ended | (lengths > 0)

    def stop_length(self, ids: Sequence[int]) -> int:
        """Return the number of tokens up to the one that completes a stop string; 0 if there is none."""
        if not self.found(ids):
            return 0
        # a text that contains a stop string still contains it after more tokens
        return bisect_left(range(1, len(ids)), True, key=lambda n: self.found(ids[:n])) + 1


def stopping_criterion(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> StoppingCriterion:
    """Return what ends the completions of a model: the EOS ids of `eos_ids`, and stop strings. The name of a special
    token, which adds no text, stands for its id."""
    names = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = dict.fromkeys([*eos_ids(tokenizer), *(names[text] for text in stop if text in names)])
    return StoppingCriterion(list(ids), tuple(text for text in stop if text not in names), tokenizer)

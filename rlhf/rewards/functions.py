"""Reward functions: the built-in ones, a reward model, an nn.Module, and functions in a user's file.

A reward function has TRL's signature. It is called as `f(prompts=, completions=, completion_ids=, messages=, ended=,
COLUMN=, ..., trainer_state=, log_extra=, log_metric=)`: lists with one entry per completion, with a keyword for each
column of the dataset, and three arguments per call. If a function names them, also `prompt_ids=,
completion_logprobs=, turns=, group=, environments=, environment_rewards=`. It returns one number per completion, or
{"turn_scores": [...]} or {"token_scores": [...]}, or None for a completion to which it does not apply. It receives
copies, except of environments, so nothing that it changes reaches the trainer or another function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import encode_whole
from rlhf.rewards.arguments import RewardFunction, text_of

if TYPE_CHECKING:
    from rlhf.rewards.reward_model import RewardModel


class NetworkReward:
    """A neural network as a reward function. Subclasses have `score(messages, texts, ended)`."""

    # scores of completions in evaluations, where equal ones tie: the network's rounding depends on the batch
    known: dict[str, float] | None = None  # None: each completion is scored, as in training

    def __call__(self, completions: Sequence[str], *, messages, ended, **_) -> list[float]:
        texts = [text_of(c) for c in completions]
        if self.known is None:
            return self.score(messages, texts, ended)
        rows = list(zip(messages, texts, ended, strict=True))
        new = {key: row for row in rows if (key := repr(row)) not in self.known}
        if new:
            self.known |= zip(new, self.score(*map(list, zip(*new.values(), strict=True))), strict=True)
        return [self.known[repr(row)] for row in rows]


@dataclass
class LearnedReward(NetworkReward):
    """A reward model as a reward function: one calibrated score per completion."""

    __name__ = "reward_model"
    model: RewardModel

    def score(self, messages, texts: Sequence[str], ended: Sequence[bool]) -> list[float]:
        return self.model.score(messages, texts, ended)


class ModuleReward(NetworkReward):
    """An `nn.Module` as a reward function: it receives prompt and completion as ids and returns one score per row.

    The ids are those of the whole chat, as the tokenizer's chat template renders it. Called as
    `module(input_ids=, attention_mask=)`, both (B, T), padded on the right. It returns (B,) or (B, 1), or an
    object with `logits` of this shape. Encodes with `module.tokenizer` if it exists, otherwise with the policy's
    tokenizer.
    """

    def __init__(self, module: nn.Module, tokenizer: PreTrainedTokenizerBase):
        self.module = module.eval()
        self.tokenizer = getattr(module, "tokenizer", tokenizer)
        self.__name__ = type(module).__name__

    @torch.no_grad()
    def score(self, messages, texts: Sequence[str], ended: Sequence[bool]) -> list[float]:
        rows = [
            encode_whole(self.tokenizer, m, text, end) for m, text, end in zip(messages, texts, ended, strict=True)
        ]
        weights = next(self.module.parameters(), None)
        device = weights.device if weights is not None else torch.device("cpu")
        given = [torch.tensor(row, device=device) for row in rows]
        ids = pad_sequence(given, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        attention = pad_sequence([torch.ones_like(row) for row in given], batch_first=True)
        output = self.module(input_ids=ids, attention_mask=attention)
        scores = getattr(output, "logits", output)
        return scores.float().reshape(len(rows), -1).squeeze(1).tolist()


class EnvironmentReward:
    """The rewards of an environment as a reward function: those of its turns, and that of `get_reward`."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, environment_rewards: Sequence[float | dict | None], **_) -> list[float | dict | None]:
        return list(environment_rewards)


def length_penalty(completion_ids: Sequence[Sequence[int]], **_) -> list[float]:
    """Return minus the number of tokens of each completion, EOS included. The weight is the price per token."""
    return [-float(len(ids)) for ids in completion_ids]


def word_penalty(completions: Sequence[str], **_) -> list[float]:
    """Return minus the number of words of each completion. The weight is the price per word."""
    return [-float(len(text_of(completion).split())) for completion in completions]


def keyword_bonus(keywords: Sequence[str]) -> RewardFunction:
    """Return a reward function: 1 for a completion that contains one of `keywords` (ignoring case), otherwise 0."""
    wanted = [k.casefold() for k in keywords]

    def keyword_bonus(completions: Sequence[str], **_) -> list[float]:
        return [float(any(k in text_of(completion).casefold() for k in wanted)) for completion in completions]

    return keyword_bonus

"""Sampled completions as tensors, and a rollout: completions with their log-probabilities, values and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import decode_completion
from rlhf.data.prompts import Prompt
from rlhf.distributed.shares import by_tokens
from rlhf.models.packing import MicroBatch, TokenBatch
from rlhf.rollout.episodes import Episode
from rlhf.rollout.sampling import BadLogits, unpack_bits
from rlhf.rollout.stopping import StoppingCriterion

OF_PROMPTS = ("prompt_ids", "prompt_mask")  # (B, C), padded on the left; other tensors of several columns are (B, T)


@dataclass
class Completions(TokenBatch):
    """Sampled completions: B episodes, C prompt tokens, T completion tokens, V vocabulary. Masks include EOS."""

    ended: Tensor  # (B,) True if EOS was sampled, or a stop string
    # (B, T, ceil(V / 8)) uint8: one bit per token of the vocabulary, 1 if it passed top-k/top-p; None: all passed
    allowed_tokens: Tensor | None
    vocabulary: int  # V
    # (B, T) log pi(a|s) of the sampler, nats, if vLLM sampled; otherwise None
    sampled_logprobs: Tensor | None = None
    stop: tuple[str, ...] = ()  # the stop strings

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        completion_ids: Tensor,
        *,
        eos: int | StoppingCriterion,
        pad: int,
        vocabulary: int,
        allowed_tokens: Tensor | None = None,
        sampled_logprobs: Tensor | None = None,
    ) -> Completions:
        """Build completions from sampled ids, without the tokens after the one that ends each. Synchronizes with the
        device once. Raises BadLogits if a completion has an id of V or more (`sample_inverse_cdf`).

        Args:
            prompts: prompt of each episode.
            completion_ids: (B, T) sampled ids.
            eos: what ends a completion; a number is the id of EOS.
            pad: id of the pad token.
            vocabulary: V, number of the model's embeddings.
            allowed_tokens: as the field.
            sampled_logprobs: as the field.
        """
        criterion = StoppingCriterion.of(eos)
        mask, ended = criterion.mask(completion_ids)
        lengths, largest = torch.stack([mask.sum(1), completion_ids.masked_fill(~mask, 0).amax(1)]).tolist()
        if max(largest) >= vocabulary:
            bad = sum(token >= vocabulary for token in largest)
            raise BadLogits(
                f"NaN or infinity in the logits of {bad} of {len(largest)} completions",
                "sampling",
                "Check the weights of the model, and --temperature",
            )
        prompt_ids, prompt_mask = pad_prompts([p.ids for p in prompts], pad, completion_ids.device)
        longest = max(lengths)
        first = {}
        return cls(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=completion_ids[:, :longest].masked_fill(~mask[:, :longest], pad),
            mask=mask[:, :longest],
            prompt_lengths=[len(p.ids) for p in prompts],
            completion_lengths=lengths,
            groups=[first.setdefault(p.ids, len(first)) for p in prompts],
            ended=ended,
            allowed_tokens=None if allowed_tokens is None else allowed_tokens[:, :longest],
            vocabulary=vocabulary,
            sampled_logprobs=None if sampled_logprobs is None else sampled_logprobs[:, :longest],
            stop=criterion.stop,
        )

    def select(self, rows: Sequence[int]) -> Completions:
        """Return these rows, without columns that none of them uses."""
        index = torch.tensor(rows, device=self.mask.device)
        context = self.prompt_ids.shape[1] - max(self.prompt_lengths[row] for row in rows)
        longest = max(self.completion_lengths[row] for row in rows)
        found = {}
        for one in fields(self):  # all of them, so that a new one is never lost
            value = getattr(self, one.name)
            if isinstance(value, Tensor):
                value = value.index_select(0, index)
                if value.dim() > 1:
                    value = value[:, context:] if one.name in OF_PROMPTS else value[:, :longest]
            elif isinstance(value, list):
                value = [value[row] for row in rows]
            found[one.name] = value
        return type(self)(**found)

    def shares(self, rows: Sequence[int]) -> list[list[int]]:
        """Divide rows among the processes, with about the same number of tokens each, without the rows in which the
        policy wrote no token: nothing is computed for them."""
        rows = [row for row in rows if self.turns[row]]
        return by_tokens(rows, self.prompt_lengths, self.completion_lengths, self.groups)

    @property
    def tokens(self) -> int:
        """The number of the policy's tokens in all completions, EOS included."""
        return sum(len(turn) for turns in self.turns for turn in turns)

    def allowed_mask(self, micro_batch: MicroBatch) -> Tensor | None:
        """Return which tokens could be sampled at each completion token of a micro-batch, (M, V) bool; None: all."""
        if self.allowed_tokens is None:
            return None
        # detail 8: log-probs over these tokens only (this project). Otherwise they are not those of the sampling.
        return unpack_bits(self.allowed_tokens.flatten(0, 1).index_select(0, micro_batch.flat_index), self.vocabulary)

    def rows(self) -> list[list[int]]:
        """Return the ids of each completion, with the token that ends it."""
        return [row[:n] for row, n in zip(self.completion_ids.tolist(), self.completion_lengths, strict=True)]

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the text of each completion, without EOS and stop string."""
        return [decode_completion(tokenizer, row, self.stop) for row in self.rows()]


class LogProbs(NamedTuple):
    """What forward passes over B completions with at most T tokens compute."""

    logprobs: Tensor | None = None  # (B, T) log pi(a|s) of the policy, nats
    ref_logprobs: Tensor | None = None  # (B, T) of the frozen reference; NaN in rows that it has not scored
    values: Tensor | None = None  # (B, T) score units; None without a critic


@dataclass
class Rollout:
    """The sampled completions of one update: B episodes, T completion tokens."""

    completions: Completions
    episodes: list[Episode]
    # log pi(a|s), nats; None before they are computed, as in an update that a bad score ends
    logprobs: Tensor | None = None  # (B, T) rollout policy
    ref_logprobs: Tensor | None = None  # (B, T) frozen reference; NaN in rows that it has not scored
    values: Tensor | None = None  # (B, T) score units; None without a critic
    # (B, T) score units, the part of the score that is paid at each token; None: the score is paid at the last one
    token_scores: Tensor | None = None
    # (B, F) score units, of each reward function, before its weight; NaN: it gave none
    function_scores: Tensor | None = None
    function_weights: tuple[float, ...] = ()  # (F,)
    stale: list[int] = field(default_factory=list)  # rows that were not sampled with the present weights

    @property
    def mask(self) -> Tensor:
        """True on the policy's tokens, (B, T)."""
        return self.completions.action_mask

    @property
    def prompts(self) -> list[Prompt]:
        return [episode.prompt for episode in self.episodes]

    @property
    def texts(self) -> list[str]:
        return [episode.text for episode in self.episodes]


def pad_prompts(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompt ids and mask, both (B, C), padded on the left."""
    width = max(map(len, prompts))
    rows = [[pad] * (width - len(p)) + list(p) for p in prompts]
    mask = [[False] * (width - len(p)) + [True] * len(p) for p in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


def padded(rows: Sequence[Sequence[float]], filling: float, device: torch.device) -> Tensor:
    """Return rows of different lengths as one tensor, padded on the right with `filling`."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[filling] * (width - len(row))] for row in rows], device=device)


def token_batch(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad: int, device: torch.device
) -> TokenBatch:
    """Return a batch of prompts with given completions, both as ids."""
    width = max(map(len, completions))
    lengths = [len(r) for r in completions]
    prompt_ids, prompt_mask = pad_prompts(prompts, pad, device)
    return TokenBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=padded(completions, pad, device),
        mask=torch.arange(width, device=device) < torch.tensor(lengths, device=device).unsqueeze(1),
        prompt_lengths=[len(p) for p in prompts],
        completion_lengths=lengths,
        groups=list(range(len(prompts))),
    )

"""Sampled completions as tensors, and a rollout: completions with their log-probabilities, values and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import decode_completion
from rlhf.data.prompts import Prompt
from rlhf.distributed.shares import by_tokens
from rlhf.models.packing import MicroBatch, TokenBatch
from rlhf.rollout.sampling import BadLogits, unpack_bits
from rlhf.rollout.stopping import StoppingCriterion


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

    @classmethod
    def concatenate(cls, parts: Sequence[Completions], pad: int) -> Completions:
        """Return the completions of all parts, one part after the other. `pad` is the id of the pad token."""
        numbers = accumulate([0, *(max(part.groups) + 1 for part in parts)])  # groups of two parts stay apart

        def together(name: str, filling: float = 0, left: bool = False) -> Tensor | None:
            return stacked([getattr(part, name) for part in parts], filling, left)

        return cls(
            prompt_ids=together("prompt_ids", pad, left=True),
            prompt_mask=together("prompt_mask", False, left=True),
            completion_ids=together("completion_ids", pad),
            mask=together("mask", False),
            prompt_lengths=[n for part in parts for n in part.prompt_lengths],
            completion_lengths=[n for part in parts for n in part.completion_lengths],
            groups=[first + group for first, part in zip(numbers, parts, strict=False) for group in part.groups],
            ended=torch.cat([part.ended for part in parts]),
            allowed_tokens=together("allowed_tokens"),
            vocabulary=parts[0].vocabulary,
            sampled_logprobs=together("sampled_logprobs"),
            stop=parts[0].stop,
        )

    def select(self, rows: Sequence[int]) -> Completions:
        """Return these rows, without columns that none of them uses."""
        index = torch.tensor(rows, device=self.mask.device)
        prompts, completions = ([of[r] for r in rows] for of in (self.prompt_lengths, self.completion_lengths))
        context = self.prompt_ids.shape[1] - max(prompts)
        longest = max(completions)

        def chosen(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.index_select(0, index)[:, :longest]

        return Completions(
            prompt_ids=self.prompt_ids.index_select(0, index)[:, context:],
            prompt_mask=self.prompt_mask.index_select(0, index)[:, context:],
            completion_ids=chosen(self.completion_ids),
            mask=chosen(self.mask),
            prompt_lengths=prompts,
            completion_lengths=completions,
            groups=[self.groups[r] for r in rows],
            ended=self.ended.index_select(0, index),
            allowed_tokens=chosen(self.allowed_tokens),
            vocabulary=self.vocabulary,
            sampled_logprobs=chosen(self.sampled_logprobs),
            stop=self.stop,
        )

    def shares(self, rows: Sequence[int]) -> list[list[int]]:
        """Divide rows among the processes, with about the same number of tokens each."""
        return by_tokens(rows, self.prompt_lengths, self.completion_lengths, self.groups)

    @property
    def tokens(self) -> int:
        """The number of tokens in all completions, EOS included."""
        return sum(self.completion_lengths)

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

    logprobs: Tensor  # (B, T) log pi(a|s) of the policy, nats
    ref_logprobs: Tensor  # (B, T) of the frozen reference
    values: Tensor | None  # (B, T) score units; None without a critic


@dataclass
class Rollout:
    """The sampled completions of one update: B episodes, T completion tokens."""

    completions: Completions
    prompts: list[Prompt]
    texts: list[str]
    # log pi(a|s), nats
    logprobs: Tensor  # (B, T) rollout policy
    ref_logprobs: Tensor  # (B, T) frozen reference
    values: Tensor | None  # (B, T) score units; None without a critic

    @property
    def mask(self) -> Tensor:
        return self.completions.mask

    @classmethod
    def concatenate(cls, parts: Sequence[Rollout], pad: int) -> Rollout:
        """Return the completions of all parts, one part after the other. `pad` is the id of the pad token. Values are
        None if a part has none."""
        return cls(
            Completions.concatenate([part.completions for part in parts], pad),
            [prompt for part in parts for prompt in part.prompts],
            [text for part in parts for text in part.texts],
            stacked([part.logprobs for part in parts]),
            stacked([part.ref_logprobs for part in parts]),
            stacked([part.values for part in parts]),
        )

    def select(self, rows: Sequence[int]) -> Rollout:
        """Return these rows, without columns that none of them uses."""
        index = torch.tensor(rows, device=self.mask.device)
        completions = self.completions.select(rows)
        longest = completions.mask.shape[1]
        return Rollout(
            completions,
            [self.prompts[r] for r in rows],
            [self.texts[r] for r in rows],
            self.logprobs.index_select(0, index)[:, :longest],
            self.ref_logprobs.index_select(0, index)[:, :longest],
            None if self.values is None else self.values.index_select(0, index)[:, :longest],
        )


def stacked(parts: Sequence[Tensor | None], filling: float = 0, left: bool = False) -> Tensor | None:
    """Return tensors of different widths (B_i, T_i, ...) as one tensor, padded on the right, or with `left` on the
    left; None if one of them is None."""
    if any(part is None for part in parts):
        return None
    width = max(part.shape[1] for part in parts)
    gaps = [part.new_full((part.shape[0], width - part.shape[1], *part.shape[2:]), filling) for part in parts]
    return torch.cat([torch.cat([gap, p] if left else [p, gap], 1) for gap, p in zip(gaps, parts, strict=True)])


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

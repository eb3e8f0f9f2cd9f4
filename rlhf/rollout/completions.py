"""Sampled completions as tensors, and a rollout: completions with their log-probabilities, values and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

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
        found = joined_fields(parts, pad)
        numbers = accumulate([0, *(max(part.groups) + 1 for part in parts)])  # groups of two parts stay apart
        groups = [first + group for first, part in zip(numbers, parts, strict=False) for group in part.groups]
        return cls(**found | {"groups": groups})

    def select(self, rows: Sequence[int]) -> Completions:
        """Return these rows, without columns that none of them uses."""
        found = chosen_fields(self, rows)
        context = self.prompt_ids.shape[1] - max(found["prompt_lengths"])
        longest = max(found["completion_lengths"])
        return type(self)(**{name: trimmed(name, value, context, longest) for name, value in found.items()})

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

    logprobs: Tensor | None = None  # (B, T) log pi(a|s) of the policy, nats
    ref_logprobs: Tensor | None = None  # (B, T) of the frozen reference; NaN in rows that it has not scored
    values: Tensor | None = None  # (B, T) score units; None without a critic


@dataclass
class Rollout:
    """The sampled completions of one update: B episodes, T completion tokens."""

    completions: Completions
    prompts: list[Prompt]
    texts: list[str]
    # log pi(a|s), nats; None before they are computed, as in an update that a bad score ends
    logprobs: Tensor | None = None  # (B, T) rollout policy
    ref_logprobs: Tensor | None = None  # (B, T) frozen reference; NaN in rows that it has not scored
    values: Tensor | None = None  # (B, T) score units; None without a critic

    @property
    def mask(self) -> Tensor:
        return self.completions.mask

    @classmethod
    def concatenate(cls, parts: Sequence[Rollout], pad: int) -> Rollout:
        """Return the completions of all parts, one part after the other. `pad` is the id of the pad token. Log-probs
        and values are None if a part has none."""
        completions = Completions.concatenate([part.completions for part in parts], pad)
        return cls(**joined_fields(parts, pad) | {"completions": completions})

    def select(self, rows: Sequence[int]) -> Rollout:
        """Return these rows, without columns that none of them uses."""
        completions = self.completions.select(rows)
        longest = completions.mask.shape[1]
        found = {name: trimmed(name, value, 0, longest) for name, value in chosen_fields(self, rows).items()}
        return type(self)(**found | {"completions": completions})


# --- over all fields, so that a new one is never lost ----------------------------------------------------------------

OF_PROMPTS = ("prompt_ids", "prompt_mask")  # (B, C), padded on the left; other tensors of several columns are (B, T)
WITH_PAD = ("prompt_ids", "completion_ids")  # filled with the pad token; others with 0


def chosen_fields(whole: Completions | Rollout, rows: Sequence[int]) -> dict[str, Any]:
    """Return the fields for these rows: of a tensor and of a list the rows, otherwise what is the same for all."""
    index = torch.tensor(rows, device=whole.mask.device)
    found = {}
    for field in fields(whole):
        value = getattr(whole, field.name)
        if isinstance(value, Tensor):
            value = value.index_select(0, index)
        elif isinstance(value, list):
            value = [value[row] for row in rows]
        found[field.name] = value
    return found


def trimmed(name: str, value: Any, context: int, longest: int) -> Any:
    """Return a field without its first `context` columns of prompts, or after `longest` columns of completions."""
    if not isinstance(value, Tensor) or value.dim() == 1:
        return value
    return value[:, context:] if name in OF_PROMPTS else value[:, :longest]


def joined_fields(parts: Sequence[Completions] | Sequence[Rollout], pad: int) -> dict[str, Any]:
    """Return the fields of all parts, one part after the other. What is not one row per episode is the first one's."""
    found = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        value = values[0]
        if isinstance(value, list):
            value = [row for rows in values for row in rows]
        elif any(isinstance(other, Tensor) for other in values):
            filling = pad if field.name in WITH_PAD else 0
            value = stacked(values, filling, left=field.name in OF_PROMPTS)
        found[field.name] = value
    return found


def stacked(parts: Sequence[Tensor | None], filling: float = 0, left: bool = False) -> Tensor | None:
    """Return tensors (B_i,), or of different widths (B_i, T_i, ...), as one tensor. It is padded on the right, or with
    `left` on the left. None if one of them is None."""
    if any(part is None for part in parts):
        return None
    if parts[0].dim() == 1:
        return torch.cat(parts)
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

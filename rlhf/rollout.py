"""Rollouts: prompts in, replies with their log-probs, values and reference log-probs out.

Randomness comes from (seed, update, purpose, episode), never from a global stream: a resumed run has nothing to
forget, and a row's sample does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from config import SamplingSettings
from rlhf.actor_critic import Actor, Reference, backbone_of, scaled_logits
from rlhf.prompts import Prompt, decode_reply

LOOK_EVERY = 4  # decoding steps between looks at whether all rows have ended: each look waits for the device


@dataclass
class Replies:
    """Sampled replies. B episodes, C prompt tokens, T reply tokens, V vocabulary."""

    # which tokens
    prompt_ids: Tensor  # (B, C) padded on the left
    prompt_mask: Tensor  # (B, C) True on real tokens
    reply_ids: Tensor  # (B, T) padded on the right
    mask: Tensor  # (B, T) True up to and including EOS
    ended: Tensor  # (B,) True where EOS was sampled
    # what could have been sampled
    nucleus: Tensor | None  # (B, T, ceil(V / 8)) uint8: one bit a token that passed top-k/top-p; None: all passed
    vocabulary: int

    @property
    def ids(self) -> Tensor:
        """Prompt and reply, (B, C + T)."""
        return torch.cat([self.prompt_ids, self.reply_ids], dim=1)

    @property
    def attention(self) -> Tensor:
        """True on real tokens, (B, C + T)."""
        return torch.cat([self.prompt_mask, self.mask], dim=1)

    @property
    def lengths(self) -> Tensor:
        """Reply tokens, EOS included, (B,)."""
        return self.mask.sum(1)

    def allowed(self, rows: Tensor) -> Tensor | None:
        """The nucleus at the reply tokens of `rows`, (N, V), or None where nothing was filtered."""
        if self.nucleus is None:
            return None
        return unpack_bits(self.nucleus[rows][self.mask[rows]], self.vocabulary)

    def rows(self) -> list[list[int]]:
        """Each reply's ids, EOS included."""
        return [row[:n] for row, n in zip(self.reply_ids.tolist(), self.lengths.tolist(), strict=True)]

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Each reply's text, without EOS."""
        return [decode_reply(tokenizer, row) for row in self.rows()]


@dataclass
class Rollout:
    """One update's batch, as the rollout policy left it."""

    replies: Replies
    prompts: list[Prompt]
    texts: list[str]
    # under which policy: log pi(a|s), nats
    logprobs: Tensor  # (B, T) the policy that sampled
    ref_logprobs: Tensor  # (B, T) frozen reference
    values: Tensor | None  # (B, T) score units; None where there is no critic

    @property
    def mask(self) -> Tensor:
        return self.replies.mask


# --- randomness ------------------------------------------------------------------------------------------------------


def generator(seed: int, update: int, purpose: str, episode: int = 0) -> np.random.Generator:
    """The random numbers of one purpose in one update (and episode), the same whenever and wherever it is asked."""
    return np.random.default_rng([seed, update, *purpose.encode(), episode])


def uniforms(seed: int, update: int, purpose: str, episodes: Sequence[int], length: int) -> Tensor:
    """One uniform number in [0, 1) per token, (B, T) float64: row b depends on its episode number alone."""
    return torch.from_numpy(np.stack([generator(seed, update, purpose, e).random(length) for e in episodes]))


# --- sampling --------------------------------------------------------------------------------------------------------


def nucleus_of(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Which tokens may be sampled, (B, V) bool: the k likeliest, and of those the smallest set of mass >= top_p.

    Holtzman et al. 2020, arXiv 1904.09751, sec. 3.1. The likeliest token is always in, and so are ties with the k-th.
    """
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if 0 < top_k < logits.shape[-1]:
        allowed = logits >= logits.topk(top_k).values[:, -1:]
    if top_p < 1:
        ordered, order = logits.masked_fill(~allowed, -torch.inf).softmax(-1).sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        allowed = allowed & torch.zeros_like(allowed).scatter(-1, order, before < top_p)
    return allowed


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Token ids (B,) by inverse transform: the first token whose cumulative probability exceeds `uniform` (B,)."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    tokens = torch.searchsorted(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:], right=True).squeeze(1)
    return tokens.clamp(max=logits.shape[-1] - 1)


def pack_bits(flags: Tensor) -> Tensor:
    """(..., V) bool -> (..., ceil(V / 8)) uint8: a nucleus for 64 replies of 128 tokens is 50 MB, not 400."""
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """The inverse of `pack_bits`: (..., size) bool."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (bits & 1).flatten(-2)[..., :size].bool()


def pad_prompts(prompts: Sequence[Prompt], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompt ids and mask, both (B, C), padded on the left."""
    width = max(len(p.ids) for p in prompts)
    rows = [[pad] * (width - len(p.ids)) + list(p.ids) for p in prompts]
    mask = [[False] * (width - len(p.ids)) + [True] * len(p.ids) for p in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


@torch.no_grad()
def sample_replies(
    policy: PreTrainedModel,
    prompts: Sequence[Prompt],
    uniform: Tensor,
    sampling: SamplingSettings,
    *,
    eos: int,
    pad: int,
    device: torch.device,
) -> Replies:
    """Sample one reply per prompt, token by token over a key-value cache. `uniform` (B, reply_length).

    The policy must be in eval mode: with gradient checkpointing in train mode the cache is silently dropped.
    """
    prompt_ids, prompt_mask = pad_prompts(prompts, pad, device)
    (rows, context), length = prompt_ids.shape, sampling.reply_length
    uniform = uniform.to(device)
    attention = torch.cat([prompt_mask, torch.ones(rows, length, dtype=torch.bool, device=device)], dim=1)
    positions = (prompt_mask.long().cumsum(1) - 1).clamp(min=0)
    replies = torch.full((rows, length), pad, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    nucleus: list[Tensor] = []
    cache, inputs, backbone = DynamicCache(config=policy.config), prompt_ids, backbone_of(policy)
    for t in range(length):
        output = backbone(
            input_ids=inputs,
            attention_mask=attention[:, : context + t],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        logits = scaled_logits(policy, output.last_hidden_state[:, -1], sampling.temperature)
        if sampling.filters:
            allowed = nucleus_of(logits, sampling.top_k, sampling.top_p)
            nucleus.append(pack_bits(allowed))
            logits = logits.masked_fill(~allowed, -torch.inf)
        token = torch.where(done, pad, draw(logits, uniform[:, t]))
        replies[:, t] = token
        done = done | (token == eos)
        if t % LOOK_EVERY == LOOK_EVERY - 1 and bool(done.all()):
            break
        inputs, positions = token.unsqueeze(1), positions[:, -1:] + 1
    mask, ended = reply_mask(replies, eos)
    longest = int(mask.sum(1).max())
    return Replies(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        reply_ids=replies[:, :longest],
        mask=mask[:, :longest],
        ended=ended,
        nucleus=torch.stack(nucleus[:longest], dim=1) if nucleus else None,
        vocabulary=logits.shape[-1],
    )


def reply_mask(replies: Tensor, eos: int) -> tuple[Tensor, Tensor]:
    """True up to and including the first EOS, (B, T), and whether there is one, (B,)."""
    is_eos = replies == eos
    before = is_eos.long().cumsum(1) - is_eos.long()
    return before == 0, is_eos.any(1)


@torch.no_grad()
def measure(
    actor: Actor, reference: Reference, replies: Replies, temperature: float, rows: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, reference log-probs and values of sampled replies, each (B, T), `rows` at a time.

    With the training forward, not the decoder's: so the first ratio of an update is 1.
    """
    parts = []
    for index in torch.arange(len(replies.ended), device=replies.ids.device).split(rows):
        batch = (replies.ids[index], replies.attention[index], replies.mask[index], temperature)
        allowed = replies.allowed(index)
        logprobs, _, values = actor(*batch, allowed)
        parts.append((logprobs, reference.logprobs(*batch, allowed), values))
    logprobs, ref_logprobs, values = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(ref_logprobs), None if values[0] is None else torch.cat(values)

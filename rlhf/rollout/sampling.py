"""Sample tokens from logits: top-k, top-p, and inverse transform sampling with given random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf.models.determinism import cumulative_sum
from rlhf.settings.training import SamplingSettings
from rlhf.utils.rng import rng_for


def uniform_noise(seed: int, update: int, purpose: str, episodes: Sequence[int], length: int) -> Tensor:
    """Return one uniform number in [0, 1) per token, (B, T) float64.

    A row depends on (seed, update, purpose) and on its episode number, not on the other rows.
    """
    return torch.from_numpy(np.stack([rng_for(seed, update, purpose, e).random(length) for e in episodes]))


def top_k_top_p_mask(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return which tokens may be sampled, (B, V) bool.

    These are the k most likely tokens, and of them the smallest set with a probability of at least `top_p`. The most
    likely token is always included, and so are ties with the k-th token.
    Source of top-p: Holtzman et al. 2020, arXiv 1904.09751, sec. 3.1.
    """
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if 0 < top_k < logits.shape[-1]:
        allowed = logits >= logits.topk(top_k).values[:, -1:]
    if top_p < 1:
        ordered, order = logits.masked_fill(~allowed, -torch.inf).softmax(-1).sort(dim=-1, descending=True)
        before = cumulative_sum(ordered) - ordered
        allowed = allowed & torch.zeros_like(allowed).scatter(-1, order, before < top_p)
    return allowed


def sample_inverse_cdf(logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample token ids (B,): the first token whose cumulative probability exceeds the random number `uniform` (B,)."""
    cumulative = cumulative_sum(logits.double().softmax(-1))
    tokens = torch.searchsorted(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:], right=True).squeeze(1)
    return tokens.clamp(max=logits.shape[-1] - 1)


def pack_bits(flags: Tensor) -> Tensor:
    """Pack (..., V) bool into (..., ceil(V / 8)) uint8, an eighth of the memory."""
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """Invert `pack_bits`: returns (..., size) bool."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (bits & 1).flatten(-2)[..., :size].bool()


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: SamplingSettings) -> tuple[Tensor, Tensor | None]:
    """Sample tokens (B,) from logits (B, V) with random numbers (B,). Also returns the bit-packed mask of the allowed
    tokens, or None without top-k and top-p."""
    if not sampling.filters:
        return sample_inverse_cdf(logits, uniform), None
    allowed = top_k_top_p_mask(logits, sampling.top_k, sampling.top_p)
    return sample_inverse_cdf(logits.masked_fill(~allowed, -torch.inf), uniform), pack_bits(allowed)

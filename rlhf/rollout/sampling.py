"""Sample tokens from logits: top-k, top-p, and inverse transform sampling with given random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf.models.determinism import cumulative_sum
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import RunError
from rlhf.utils.rng import rng_for


def uniform_noise(
    seed: int, update: int, purpose: str, episodes: Sequence[int], length: int, first: Sequence[int] | None = None
) -> Tensor:
    """Return one uniform number in [0, 1) per token, (B, T) float64, from number `first` of each row's stream on (B of
    them; None: 0).

    A row depends on (seed, update, purpose) and on its episode number, not on the other rows.
    """
    # detail 6: one generator per episode (this project). With one for all, a completion would depend on its batch.
    starts = first or [0] * len(episodes)
    numbers = zip(episodes, starts, strict=True)
    rows = [rng_for(seed, update, purpose, e).random(start + length)[start:] for e, start in numbers]
    return torch.from_numpy(np.stack(rows))


def top_k_top_p_mask(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return which tokens may be sampled, (B, V) bool.

    These are the k most likely tokens, and of them the smallest set with a probability of at least `top_p`. The most
    likely token is always included, and so are ties with the k-th token.
    Source of top-p: Holtzman et al. 2020, arXiv 1904.09751, sec. 3.1.
    """
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if 0 < top_k < logits.shape[-1]:
        allowed = ~(logits < logits.topk(top_k).values[:, -1:])  # NaN remains, so that it is found
    if top_p < 1:
        allowed = allowed & _nucleus(logits.masked_fill(~allowed, -torch.inf).softmax(-1), top_p)
    return allowed


NUCLEUS = 256  # tokens that nearly every nucleus has at most


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Return which tokens belong to the nucleus, (B, V) bool. On a CPU, only rows with a large nucleus are sorted
    whole. On a GPU the test for it would wait for the GPU, which a CUDA graph cannot do."""
    if probabilities.is_cuda or probabilities.shape[-1] <= NUCLEUS:
        return _sorted_nucleus(probabilities, top_p)
    ordered = probabilities.topk(NUCLEUS).values
    before = cumulative_sum(ordered) - ordered
    size = (before < top_p).sum(1, keepdim=True)
    smallest = ordered.gather(1, (size - 1).clamp(min=0))
    allowed = probabilities >= smallest
    # unclear: a larger nucleus, or several tokens with the smallest probability, of which only some belong to it
    unclear = (before[:, -1:] < top_p + 1e-6) | (allowed.sum(1, keepdim=True) != size)
    rows = unclear.squeeze(1).nonzero().squeeze(1)
    return allowed.index_copy_(0, rows, _sorted_nucleus(probabilities[rows], top_p)) if len(rows) else allowed


def _sorted_nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = cumulative_sum(ordered) - ordered
    return torch.zeros_like(probabilities, dtype=torch.bool).scatter(-1, order, before < top_p)


BLOCK = 256  # tokens of the vocabulary whose probabilities are added in float32
BELOW_ONE = 1 - 2**-52  # keeps a product with a number below 1 from being rounded up to the whole


class BadLogits(RunError):
    """Completions were sampled from logits that are no distribution: NaN, +infinity, or -infinity for all tokens."""


def sample_inverse_cdf(logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample token ids (B,): the first token whose cumulative probability exceeds the random number `uniform` (B,).

    The search has two levels: first among blocks of the vocabulary, then in one block. Only the sums of blocks and the
    probabilities of that block are added in float64, which consumer GPUs compute at 1/64 of the speed of float32. The
    probability of each token is exact to 1e-6. A token with probability 0 is never sampled.

    For logits with NaN or +infinity, or with -infinity only, the result is no token: it is at least V. An error here
    would wait for the GPU at every token, and an index out of range would end the process's use of the GPU.
    """
    vocabulary = logits.shape[-1]
    blocks = torch.nn.functional.pad(logits.softmax(-1), (0, -vocabulary % BLOCK)).unflatten(-1, (-1, BLOCK))
    cumulative = cumulative_sum(blocks.sum(-1).double())  # (B, blocks)
    target = (uniform * BELOW_ONE).unsqueeze(1) * cumulative[:, -1:]
    # a search for NaN ends behind the last block, and in that block behind its last token
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=blocks.shape[1] - 1)  # (B, 1)
    cumulative = torch.nn.functional.pad(cumulative, (1, 0))
    ends = cumulative.gather(1, torch.cat([block, block + 1], 1))
    share = (target - ends[:, :1]) / (ends[:, 1:] - ends[:, :1])  # of the block's probability
    inside = cumulative_sum(blocks.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1).double())
    token = torch.searchsorted(inside, share.clamp(max=BELOW_ONE) * inside[:, -1:], right=True)
    return (block * BLOCK + token).squeeze(1)


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

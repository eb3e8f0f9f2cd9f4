"""Compute logits and log-probabilities of tokens from hidden states, chunk by chunk to save memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf.models.budget import budget_of
from rlhf.models.cast_weights import product, stored

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def base_of(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the causal LM without peft's wrapper. Adapters stay active, because they are inside its modules."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def backbone_of(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the transformer without the language-model head."""
    base = base_of(policy)
    return getattr(base, base.base_model_prefix)


def scaled_logits(policy: PreTrainedModel | PeftModel, hidden: Tensor, temperature: float) -> Tensor:
    """Return logits (..., V) of hidden states (..., H), divided by the temperature, in float32 or float64.

    They are soft-capped first if the model's config has a final_logit_softcapping.
    """
    base = base_of(policy)
    logits = upcast(base.get_output_embeddings()(hidden))
    cap = _softcap(policy)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    # detail 7: divided, as in sampling (N details). Otherwise these are the log-probs of another distribution.
    return logits / temperature


def _softcap(policy: PreTrainedModel | PeftModel) -> float | None:
    return getattr(base_of(policy).config, "final_logit_softcapping", None)


def upcast(values: Tensor) -> Tensor:
    """Return half precisions as float32; float32 and float64 unchanged."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def token_logprobs(
    policy: PreTrainedModel | PeftModel,
    hidden: Tensor,
    tokens: Tensor,
    temperature: float,
    allowed: Tensor | None = None,
    entropy: str = "none",
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token and the entropy of its distribution, both (N,) in nats.

    Args:
        policy: the causal LM.
        hidden: (N, H) hidden states from which the tokens are predicted.
        tokens: (N,) ids.
        temperature: sampling temperature; the distribution is computed at this temperature.
        allowed: (N, V) bool, tokens that could be sampled; the distribution is renormalized to them. None: all.
        entropy: "none" (zeros), "value" (no gradient) or "gradient".

    With gradients, only the probabilities are stored for the backward pass, if the head is a matrix without bias or
    soft cap, and the entropy has no gradient. Without gradients, the logits are computed chunk by chunk.
    """
    head = base_of(policy).get_output_embeddings()
    plain = type(head) is nn.Linear and head.bias is None and _softcap(policy) is None
    if torch.is_grad_enabled():
        if plain and entropy != "gradient":
            return _FusedLogprobs.apply(hidden, head.weight, tokens, temperature, allowed, entropy)
        return _logprobs_of(scaled_logits(policy, hidden, temperature), tokens, allowed, entropy)
    weight = stored(head.weight).to(forward_dtype(hidden)) if plain else None  # once, not once per block
    parts = []
    for rows in blocks(len(hidden), head.weight.shape[0], budget_of(hidden.device).logits_per_chunk):
        limits = None if allowed is None else allowed[rows]
        if plain:
            states = (hidden[rows] if temperature == 1 else upcast(hidden[rows]) / temperature).to(weight.dtype)
            parts.append(_probabilities(states, weight, tokens[rows], limits, entropy == "value")[:2])
        else:
            parts.append(_logprobs_of(scaled_logits(policy, hidden[rows], temperature), tokens[rows], limits, entropy))
    logprobs, entropies = zip(*parts, strict=True)
    return joined(logprobs), joined(entropies)


def blocks(rows: int, width: int, most: int) -> list[slice]:
    """Return slices that split `rows` rows of `width` numbers into blocks of at most `most` numbers."""
    size = max(1, most // width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def forward_dtype(values: Tensor) -> torch.dtype:
    """Return the precision of matrix products with `values`: that of autocast, or of `values`."""
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype


def _logprobs_of(logits: Tensor, tokens: Tensor, allowed: Tensor | None, entropy: str) -> tuple[Tensor, Tensor]:
    if allowed is not None:
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    log_total = logits.logsumexp(-1)
    logprobs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_total
    if entropy == "none":
        return logprobs, torch.zeros_like(log_total)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        return logprobs, log_total - (torch.softmax(logits, -1) * logits).sum(-1)


def _probabilities(
    states: Tensor, head: Tensor, tokens: Tensor, allowed: Tensor | None, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of the tokens and the entropies, both (N,), and the probabilities (N, V).

    The softmax of the logits, states (N, H) @ head (V, H)^T, is in float32 or float64, block by block. The entropies
    are 0 unless `entropy`. The probabilities are in the precision of `states`, on a CPU in the memory of the logits.
    """
    full = torch.float32 if states.dtype == torch.bfloat16 else states.dtype
    logits = product(states, head.t(), full if states.is_cuda else states.dtype)
    probabilities = logits if logits.dtype == states.dtype else torch.empty_like(logits, dtype=states.dtype)
    logprobs = []
    entropies = []
    for rows in blocks(*logits.shape, budget_of(logits.device).floats_per_chunk):
        values = upcast(logits[rows])
        if allowed is not None:
            values = values.masked_fill(~allowed[rows], torch.finfo(values.dtype).min)
        values = torch.log_softmax(values, -1)
        logprobs.append(values.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1))
        if entropy:
            block = values.exp()
            entropies.append(values.mul_(block).sum(-1).neg_())
            probabilities[rows] = block
        else:
            torch.exp(values, out=probabilities[rows])
    found = joined(logprobs)
    return found, joined(entropies) if entropy else torch.zeros_like(found), probabilities


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors as one, along their first dimension."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _FusedLogprobs(torch.autograd.Function):
    """Head, softmax and gather in one function. Of the tensors (N, V), only the probabilities are stored."""

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, allowed, entropy):
        head = stored(weight).to(forward_dtype(hidden))
        states = (hidden if temperature == 1 else upcast(hidden) / temperature).to(head.dtype)
        logprobs, entropies, ctx.probabilities = _probabilities(states, head, tokens, allowed, entropy == "value")
        ctx.temperature = temperature
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.save_for_backward(states, head, tokens, logprobs)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, by_logprobs, _):
        states, head, tokens, logprobs = ctx.saved_tensors
        # dL/dlogits = dL/dlogprob * (1[token] - p), computed in the memory of the probabilities
        by_logits = ctx.probabilities
        ctx.probabilities = None
        scale = by_logprobs.neg().unsqueeze(-1)
        by_logits.mul_(scale.to(by_logits.dtype))
        # 1 - p = -expm1(log p): with a rounded p near 1, the difference would be lost
        by_token = torch.expm1(logprobs).unsqueeze(-1).mul_(scale)
        by_logits.scatter_(1, tokens.unsqueeze(-1), by_token.to(by_logits.dtype))
        by_hidden = product(by_logits, head, ctx.dtypes[0]).div_(ctx.temperature) if ctx.needs_input_grad[0] else None
        by_weight = product(by_logits.t(), states, ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return by_hidden, by_weight, None, None, None, None

"""From hidden states to logits and log-probabilities of tokens, chunk by chunk."""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.budget import budget_of


def base_of(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The causal LM itself; adapters live inside its modules."""
    return policy.get_base_model() if isinstance(policy, PeftModel) else policy


def backbone_of(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformer under the language-model head."""
    base = base_of(policy)
    return getattr(base, base.base_model_prefix)


def scaled_logits(policy: PreTrainedModel | PeftModel, hidden: Tensor, temperature: float) -> Tensor:
    """Logits (..., V) in float32 at least, divided by the temperature; soft-capped where the architecture says so."""
    base = base_of(policy)
    logits = upcast(base.get_output_embeddings()(hidden))
    cap = _softcap(policy)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits / temperature


def _softcap(policy: PreTrainedModel | PeftModel) -> float | None:
    return getattr(base_of(policy).config, "final_logit_softcapping", None)


def upcast(values: Tensor) -> Tensor:
    """Half precisions as float32; float32 and float64 as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def token_logprobs(
    policy: PreTrainedModel | PeftModel,
    hidden: Tensor,
    tokens: Tensor,
    temperature: float,
    allowed: Tensor | None = None,
    entropy: str = "none",
    fused: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of its distribution, both (N,), nats, at the sampling temperature.

    hidden (N, H), tokens (N,), `allowed` (N, V) or None: which tokens could be sampled, to which the distribution is
    renormalised. `entropy` is "none" (zeros), "value" or "gradient". Without gradients, logits exist for some
    positions at a time. With them, `fused` keeps the probabilities alone, where the head is a plain matrix.
    """
    head = base_of(policy).get_output_embeddings()
    plain = type(head) is nn.Linear and head.bias is None and _softcap(policy) is None
    if torch.is_grad_enabled():
        if fused and plain and entropy != "gradient":
            return _FusedLogprobs.apply(hidden, head.weight, tokens, temperature, allowed, entropy)
        return _logprobs_of(scaled_logits(policy, hidden, temperature), tokens, allowed, entropy)
    dtype = forward_dtype(hidden)
    weight = head.weight.to(dtype) if plain else None  # under autocast rounded once, and not for every block
    parts = []
    for rows in blocks(len(hidden), head.weight.shape[0], budget_of(hidden.device).logits_per_chunk):
        limits = None if allowed is None else allowed[rows]
        if plain:
            logits = hidden[rows].to(dtype) @ weight.t()
            parts.append(_probabilities(logits, tokens[rows], temperature, limits, entropy == "value"))
        else:
            parts.append(_logprobs_of(scaled_logits(policy, hidden[rows], temperature), tokens[rows], limits, entropy))
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def blocks(rows: int, width: int, most: int) -> list[slice]:
    """Slices of `rows` rows of so many numbers, of which `most` may stand together."""
    size = max(1, most // width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def forward_dtype(values: Tensor) -> torch.dtype:
    """The precision of matrix products of `values`: autocast's, or their own."""
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
    logits: Tensor, tokens: Tensor, temperature: float, allowed: Tensor | None, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Turns logits (N, V) into probabilities, in place and in float32 block by block; returns the tokens'
    log-probabilities and, if asked, the entropies, (N,)."""
    logprobs = torch.empty(len(logits), dtype=upcast(logits[:0]).dtype, device=logits.device)
    entropies = torch.zeros_like(logprobs)
    for rows in blocks(*logits.shape, budget_of(logits.device).floats_per_chunk):
        values = upcast(logits[rows]).div_(temperature)
        if allowed is not None:
            values.masked_fill_(~allowed[rows], torch.finfo(values.dtype).min)
        values.sub_(values.logsumexp(-1, keepdim=True))
        logprobs[rows] = values.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
        if entropy:
            entropies[rows] = -(values.exp() * values).sum(-1)
        logits[rows] = values.exp_()
    return logprobs, entropies


class _FusedLogprobs(torch.autograd.Function):
    """Head, softmax and gather in one, which keeps the probabilities and nothing else of the vocabulary's width.

    The gradient by the logits is g (1[token] - p) / temperature, and takes the probabilities' place in memory.
    """

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, allowed, entropy):
        dtype = forward_dtype(hidden)
        states, head = hidden.to(dtype), weight.to(dtype)
        ctx.probabilities = states @ head.t()
        logprobs, entropies = _probabilities(ctx.probabilities, tokens, temperature, allowed, entropy == "value")
        ctx.temperature, ctx.dtypes = temperature, (hidden.dtype, weight.dtype)
        ctx.save_for_backward(states, head, tokens, logprobs)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, by_logprobs, _):
        states, head, tokens, logprobs = ctx.saved_tensors
        by_logits, ctx.probabilities = ctx.probabilities, None
        scale = (by_logprobs / ctx.temperature).unsqueeze(-1)
        by_logits.mul_(-scale.to(by_logits.dtype))
        # 1 - p from the log-probability: a rounded p near 1 would lose it
        by_token = -torch.expm1(logprobs).unsqueeze(-1) * scale
        by_logits.scatter_(1, tokens.unsqueeze(-1), by_token.to(by_logits.dtype))
        by_hidden = (by_logits @ head).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        by_weight = (by_logits.t() @ states).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return by_hidden, by_weight, None, None, None, None

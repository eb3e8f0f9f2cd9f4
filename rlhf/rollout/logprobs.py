"""Log-probabilities, reference log-probabilities and values of sampled completions."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.models.actor_critic import Actor
from rlhf.models.attention import packable
from rlhf.models.budget import budget_of
from rlhf.models.logprobs import base_of
from rlhf.models.reference import Reference
from rlhf.rollout.completions import Completions, ForwardPass


@torch.no_grad()
def compute_logprobs_and_values(
    actor: Actor,
    reference: Reference,
    completions: Completions,
    temperature: float,
    rows: int = 0,
    packed: bool = True,
    cached_forward: ForwardPass | None = None,
    tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, reference log-probs and values of sampled completions, each (B, T), at most `rows` (0: as many as
    `tokens` hold) at a time. If a `cached_forward` over all of them is given, its hidden states are used.

    With the training forward, not the decoder's: so the first ratio of an update is 1.
    """
    whole, packed = completions.mask, packed and packable(base_of(actor.policy))
    tokens = tokens or budget_of(whole.device).tokens_per_micro_batch
    parts, order = [], []
    for part in completions.split(range(len(whole)), rows, tokens, packed):
        micro_batch = cached_forward[0] if cached_forward is not None else completions.micro_batch(part, packed)
        hidden = cached_forward[1].detach() if cached_forward is not None else actor.forward_backbone(micro_batch)
        allowed = completions.allowed_mask(micro_batch)
        logprobs, _, values = actor.forward_heads(
            hidden, micro_batch.tokens, micro_batch.mask, temperature, allowed, "none"
        )
        parts.append((logprobs, reference.logprobs(micro_batch, temperature, allowed), values))
        order += part
    inverse_index = torch.tensor(order, device=whole.device).argsort()
    logprobs, ref_logprobs, values = zip(*parts, strict=True)
    critic = None if values[0] is None else torch.cat(values)[inverse_index]
    return torch.cat(logprobs)[inverse_index], torch.cat(ref_logprobs)[inverse_index], critic

"""Log-probabilities, reference log-probabilities and values of sampled completions."""

from __future__ import annotations

from collections.abc import Sequence

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
    max_rows: int = 0,
    packed: bool = True,
    cached_forward: ForwardPass | None = None,
    max_tokens: int | None = None,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes log-probs and reference log-probs (nats) and values of sampled completions, each (B, T).

    The forward pass is that of training, not that of decoding. Therefore the first ratio of an update is 1.

    Args:
        actor: the policy, with the critic if there is one. Without a critic, the values are None.
        reference: the frozen reference.
        completions: the sampled completions.
        temperature: sampling temperature.
        max_rows: largest number of completions in a forward pass; 0: no limit.
        packed: pack the completions, if the architecture supports it.
        cached_forward: a forward pass over all `rows`, whose hidden states are used instead of a new pass.
        max_tokens: largest number of tokens in a forward pass; None: the default of the device.
        rows: the completions to compute; None: all. The results of the others are 0.
    """
    whole, packed = completions.mask, packed and packable(base_of(actor.policy))
    max_tokens = max_tokens or budget_of(whole.device).tokens_per_micro_batch
    rows = range(len(whole)) if rows is None else rows
    parts, order = [], []
    for part in completions.split(rows, max_rows, max_tokens, packed):
        micro_batch = cached_forward[0] if cached_forward is not None else completions.micro_batch(part, packed)
        hidden = cached_forward[1].detach() if cached_forward is not None else actor.forward_backbone(micro_batch)
        allowed = completions.allowed_mask(micro_batch)
        logprobs, _, values = actor.forward_heads(
            hidden, micro_batch.tokens, micro_batch.mask, temperature, allowed, "none"
        )
        parts.append((logprobs, reference.logprobs(micro_batch, temperature, allowed), values))
        order += part
    index = torch.tensor(order, device=whole.device)
    logprobs, ref_logprobs, values = zip(*parts, strict=True)

    def in_rows(found: Sequence[Tensor]) -> Tensor:
        together = torch.cat(found)
        return together.new_zeros(whole.shape).index_copy_(0, index, together)

    return in_rows(logprobs), in_rows(ref_logprobs), None if values[0] is None else in_rows(values)

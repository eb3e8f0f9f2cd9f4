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
def measure(
    actor: Actor,
    reference: Reference,
    replies: Completions,
    temperature: float,
    rows: int = 0,
    packed: bool = True,
    begun: ForwardPass | None = None,
    tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, reference log-probs and values of sampled replies, each (B, T), at most `rows` (0: as many as
    `tokens` hold) at a time; of a pass over all of them that has `begun`, its hidden states serve.

    With the training forward, not the decoder's: so the first ratio of an update is 1.
    """
    whole, packed = replies.mask, packed and packable(base_of(actor.policy))
    tokens = tokens or budget_of(whole.device).tokens_per_micro_batch
    parts, order = [], []
    for part in replies.parts(range(len(whole)), rows, tokens, packed):
        passage = begun[0] if begun is not None else replies.passage(part, packed)
        hidden = begun[1].detach() if begun is not None else actor.hidden(passage)
        allowed = replies.allowed(passage)
        logprobs, _, values = actor.heads(hidden, passage.tokens, passage.mask, temperature, allowed, "none")
        parts.append((logprobs, reference.logprobs(passage, temperature, allowed), values))
        order += part
    back = torch.tensor(order, device=whole.device).argsort()
    logprobs, ref_logprobs, values = zip(*parts, strict=True)
    critic = None if values[0] is None else torch.cat(values)[back]
    return torch.cat(logprobs)[back], torch.cat(ref_logprobs)[back], critic

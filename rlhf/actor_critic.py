"""Actor, critic and reference: one backbone, two heads, and log-probs on reply positions only."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhf.trl_ppo import AutoModelForCausalLMWithValueHead


def base_of(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The causal LM itself; adapters live inside its modules."""
    return policy.get_base_model() if isinstance(policy, PeftModel) else policy


def backbone_of(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformer under the language-model head."""
    base = base_of(policy)
    return getattr(base, base.base_model_prefix)


def with_value_head(policy: PreTrainedModel | PeftModel) -> AutoModelForCausalLMWithValueHead:
    """TRL's container for the policy and its value head.

    The head starts at zero, the mean of calibrated scores, and has no dropout (TRL's default of 0.1 would make the
    first ratio differ from 1). Given a model object and not a name, TRL does not ask the hub for an adapter.
    """
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        policy, summary_dropout_prob=0.0, v_head_init_strategy="normal", v_head_initializer_range=0.0
    )


def reply_hidden(policy: PreTrainedModel | PeftModel, ids: Tensor, attention: Tensor, context: int) -> Tensor:
    """Hidden states from which each reply token is predicted: (B, T, H) for ids (B, C + T) and `context` C."""
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)
    output = backbone_of(policy)(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False)
    return output.last_hidden_state[:, context - 1 : -1]


def scaled_logits(policy: PreTrainedModel | PeftModel, hidden: Tensor, temperature: float) -> Tensor:
    """Logits (..., V) in float32 at least, divided by the temperature; soft-capped where the architecture says so."""
    base = base_of(policy)
    logits = upcast(base.get_output_embeddings()(hidden))
    cap = getattr(base.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits / temperature


def upcast(values: Tensor) -> Tensor:
    """Half precisions as float32; float32 and float64 as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


LOGITS_AT_ONCE = 2**24  # 64 MiB in float32: more positions than fit are done chunk by chunk


def token_logprobs(
    policy: PreTrainedModel | PeftModel,
    hidden: Tensor,
    tokens: Tensor,
    temperature: float,
    allowed: Tensor | None = None,
    entropy: str = "none",
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of its distribution, both (N,), nats, at the sampling temperature.

    hidden (N, H), tokens (N,), `allowed` (N, V) or None: the rollout policy's nucleus, to which the distribution is
    renormalised. `entropy` is "none" (zeros), "value" or "gradient". Logits exist for one chunk of positions at a
    time; where a gradient is wanted, a chunk's logits are computed again in the backward pass.
    """
    size = max(1, LOGITS_AT_ONCE // base_of(policy).get_input_embeddings().num_embeddings)
    if len(tokens) <= size:
        return _chunk_logprobs(policy, hidden, tokens, temperature, allowed, entropy)
    masks = allowed.split(size) if allowed is not None else [None] * -(-len(tokens) // size)
    parts = [
        checkpoint(_chunk_logprobs, policy, h, t, temperature, m, entropy, use_reentrant=False)
        if torch.is_grad_enabled()
        else _chunk_logprobs(policy, h, t, temperature, m, entropy)
        for h, t, m in zip(hidden.split(size), tokens.split(size), masks, strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def _chunk_logprobs(policy, hidden, tokens, temperature, allowed, entropy) -> tuple[Tensor, Tensor]:
    logits = scaled_logits(policy, hidden, temperature)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    log_total = logits.logsumexp(-1)
    logprobs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_total
    if entropy == "none":
        return logprobs, torch.zeros_like(log_total)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        return logprobs, log_total - (torch.softmax(logits, -1) * logits).sum(-1)


class Actor(nn.Module):
    """A causal LM as a policy over reply tokens."""

    def __init__(self, policy: PreTrainedModel | PeftModel):
        super().__init__()
        self.policy = policy

    @property
    def config(self):
        return self.policy.config

    def forward(
        self,
        ids: Tensor,
        attention: Tensor,
        mask: Tensor,
        temperature: float,
        allowed: Tensor | None = None,
        entropy: str = "none",
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs, entropy and values of the reply tokens, each (B, T) and 0 off the mask, in one backbone pass;
        an actor without a critic has no values.

        ids, attention (B, C + T); mask (B, T); `allowed` (N, V) for the N tokens of the mask, row by row; `entropy`
        as in token_logprobs.
        """
        context = ids.shape[1] - mask.shape[1]
        hidden = reply_hidden(self.policy, ids, attention, context)[mask]
        tokens = ids[:, context:][mask]
        logprobs, entropies = token_logprobs(self.policy, hidden, tokens, temperature, allowed, entropy)
        return spread(logprobs, mask), spread(entropies, mask), self.values(hidden, mask)

    def values(self, hidden: Tensor, mask: Tensor) -> Tensor | None:
        """Values of hidden states (N, H), as (B, T)."""
        return None


class ActorCritic(Actor):
    """One backbone, two heads. It takes the place of TRL's PolicyAndValueWrapper, which runs two backbones."""

    def __init__(self, container: AutoModelForCausalLMWithValueHead):
        super().__init__(container.pretrained_model)  # TRL looks for the policy under the name `policy`
        self.value_head = container.v_head

    def values(self, hidden: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):  # one column: float32 costs nothing here
            return spread(self.value_head(upcast(hidden)).squeeze(-1), mask)


def spread(flat: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the masked tokens, back to (B, T); 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


# --- reference -------------------------------------------------------------------------------------------------------


class Reference:
    """The frozen start model: a model of its own, or under LoRA the policy with its adapters switched off."""

    def __init__(self, policy: PreTrainedModel | PeftModel, copy: PreTrainedModel | None):
        """`copy` None: the adapters of `policy` can be switched off."""
        self.policy, self.copy = policy, copy

    @classmethod
    def before_training(cls, policy: PreTrainedModel | PeftModel, dtype: torch.dtype | None) -> Reference:
        """Of a policy that will be trained. `dtype` is its forward precision: a KL between unlike precisions would
        measure the rounding."""
        return cls(policy, None if isinstance(policy, PeftModel) else frozen_copy(policy, dtype))

    @contextlib.contextmanager
    def model(self) -> Iterator[PreTrainedModel | PeftModel]:
        """The reference as a causal LM, while the context lasts."""
        with contextlib.nullcontext() if self.copy is not None else self.policy.disable_adapter():
            yield self.copy if self.copy is not None else self.policy

    def logprobs(
        self, ids: Tensor, attention: Tensor, mask: Tensor, temperature: float, allowed: Tensor | None
    ) -> Tensor:
        """Log-probs of the reply tokens under the start model, (B, T); arguments as in ActorCritic.forward."""
        context = ids.shape[1] - mask.shape[1]
        with self.model() as model:
            hidden = reply_hidden(model, ids, attention, context)[mask]
            return spread(token_logprobs(model, hidden, ids[:, context:][mask], temperature, allowed)[0], mask)


def frozen_copy(policy: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """A copy without gradients. With `dtype` its linear layers are stored in that type.

    Those are the weights that autocast would round anyway, so the copy's outputs are the policy's to the bit.
    Embeddings and norms stay in float32, as autocast leaves them.
    """
    frozen = copy.deepcopy(policy).eval().requires_grad_(False)
    if dtype is not None:
        tied = frozen.get_input_embeddings().weight
        for module in frozen.modules():
            if isinstance(module, nn.Linear) and module.weight is not tied:
                module.to(dtype)
    return frozen

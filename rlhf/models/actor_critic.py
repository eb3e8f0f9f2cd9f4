"""Actor and critic: one or two backbones and two heads, computed at completion tokens only."""

from __future__ import annotations

import copy

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.logprobs import backbone_of, token_logprobs, upcast
from rlhf.models.packing import MicroBatch
from rlhf.models.trl_ppo import AutoModelForCausalLMWithValueHead


def with_value_head(policy: PreTrainedModel | PeftModel) -> AutoModelForCausalLMWithValueHead:
    """Returns TRL's container for the policy and a new value head.

    The weights of the head are 0, because calibrated scores have mean 0. It has no dropout: with TRL's default of 0.1
    the first ratio would differ from 1. TRL receives a model object instead of a name, so it makes no hub request.
    """
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        policy,
        summary_dropout_prob=0.0,
        v_head_init_strategy="normal",
        v_head_initializer_range=0.0,
        device_map={"": policy.device},  # its current device; without it TRL prints a warning for 4-bit models
    )


def set_adapter_dropout(policy: nn.Module, share: float) -> None:
    """Set the dropout probability of all LoRA adapters. TRL's __init__ has set every dropout of the policy to 0."""
    for module in policy.modules():
        if isinstance(module, LoraLayer):
            for dropout in module.lora_dropout.values():
                if isinstance(dropout, nn.Dropout):  # peft uses nn.Identity if the probability is 0
                    dropout.p = share


class Actor(nn.Module):
    """A causal LM as a policy over completion tokens."""

    def __init__(self, policy: PreTrainedModel | PeftModel):
        super().__init__()
        self.policy = policy

    @property
    def config(self):
        return self.policy.config

    def forward(
        self,
        micro_batch: MicroBatch,
        temperature: float,
        allowed: Tensor | None = None,
        entropy: str = "none",
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Computes log-probs and entropy (nats) and values of a micro-batch's completion tokens in one backbone pass.

        Each is (R, T), 0 where the mask is False. The values are None without a critic. `allowed` (M, V) and `entropy`
        as in `token_logprobs`.
        """
        return self.forward_heads(
            self.forward_backbone(micro_batch), micro_batch.tokens, micro_batch.mask, temperature, allowed, entropy
        )

    def forward_backbone(self, micro_batch: MicroBatch) -> Tensor:
        """Returns the hidden states from which a micro-batch's M completion tokens are predicted, (M, H)."""
        return micro_batch.forward(backbone_of(self.policy))

    def forward_heads(
        self,
        hidden: Tensor,
        tokens: Tensor,
        mask: Tensor,
        temperature: float,
        allowed: Tensor | None,
        entropy: str,
        fused: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Computes log-probs, entropy and values, as `forward` does, from hidden states (M, H).

        `tokens` (M,) and `mask` (R, T) are those of the micro-batch; the other arguments are as in `token_logprobs`.
        """
        states = self.policy_hidden(hidden)
        logprobs, entropies = token_logprobs(self.policy, states, tokens, temperature, allowed, entropy, fused)
        return scatter_to_padded(logprobs, mask), scatter_to_padded(entropies, mask), self.values(hidden, mask)

    def policy_hidden(self, hidden: Tensor) -> Tensor:
        """Returns the part of the hidden states that the language-model head uses, (..., H)."""
        return hidden

    def values(self, hidden: Tensor, mask: Tensor) -> Tensor | None:
        """Returns the values for hidden states (M, H), as (R, T); None without a critic."""
        return None


class ActorCritic(Actor):
    """One backbone with two heads. It replaces TRL's PolicyAndValueWrapper, which runs two backbones.

    With `critic`, a separate backbone, the value head uses the critic's hidden states. The hidden states of both
    backbones are then concatenated, (M, H + H of the critic), so that other code handles them as one tensor.
    """

    def __init__(self, container: AutoModelForCausalLMWithValueHead, critic: PreTrainedModel | None = None):
        super().__init__(container.pretrained_model)  # TRL expects the policy in the attribute `policy`
        self.value_head, self.critic = container.v_head, critic

    def forward_backbone(self, micro_batch: MicroBatch) -> Tensor:
        states = super().forward_backbone(micro_batch)
        return states if self.critic is None else torch.cat([states, micro_batch.forward(self.critic)], -1)

    def policy_hidden(self, hidden: Tensor) -> Tensor:
        return hidden if self.critic is None else hidden[..., : -self.critic_width]

    @property
    def critic_width(self) -> int:
        """Features of the critic's hidden states."""
        return self.value_head.summary.in_features

    def values(self, hidden: Tensor, mask: Tensor) -> Tensor:
        own = hidden if self.critic is None else hidden[..., -self.critic_width :]
        with torch.autocast(hidden.device.type, enabled=False):  # float32 is cheap for one output per token
            return scatter_to_padded(self.value_head(upcast(own)).squeeze(-1), mask)


def critic_backbone(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Returns a copy of the start model's backbone for a separate critic. Call it before training.

    The copy has the same trainable weights as the policy. With LoRA it has separate adapters; quantized weights are
    copied, too.
    """
    return backbone_of(copy.deepcopy(policy))


def scatter_to_padded(flat: Tensor, mask: Tensor) -> Tensor:
    """Returns the values (M,) of the masked tokens as (R, T), 0 where `mask` is False."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)

"""Actor and critic: one backbone or two, and two heads, on reply positions only."""

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
    """TRL's container for the policy and its value head.

    The head starts at zero, the mean of calibrated scores, and has no dropout (TRL's default of 0.1 would make the
    first ratio differ from 1). Given a model object and not a name, TRL does not ask the hub for an adapter.
    """
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        policy,
        summary_dropout_prob=0.0,
        v_head_init_strategy="normal",
        v_head_initializer_range=0.0,
        device_map={"": policy.device},  # where it is; without it TRL warns about a model in 4 bits
    )


def set_adapter_dropout(policy: nn.Module, share: float) -> None:
    """In all adapters; it acts in train mode. TRL's __init__ sets every dropout of the policy to 0."""
    for module in policy.modules():
        if isinstance(module, LoraLayer):
            for dropout in module.lora_dropout.values():
                if isinstance(dropout, nn.Dropout):  # without any, peft has an identity there
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
        """Log-probs, entropy and values of a micro-batch's completion tokens, each (R, T) and 0 off the mask, in one
        backbone pass; an actor without a critic has no values. `allowed` and `entropy` as in token_logprobs."""
        return self.forward_heads(
            self.forward_backbone(micro_batch), micro_batch.tokens, micro_batch.mask, temperature, allowed, entropy
        )

    def forward_backbone(self, micro_batch: MicroBatch) -> Tensor:
        """The hidden states from which a micro-batch's M completion tokens are predicted, (M, H)."""
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
        """Log-probs, entropy and values as `forward` returns them, from hidden states (M, H)."""
        states = self.policy_hidden(hidden)
        logprobs, entropies = token_logprobs(self.policy, states, tokens, temperature, allowed, entropy, fused)
        return scatter_to_padded(logprobs, mask), scatter_to_padded(entropies, mask), self.values(hidden, mask)

    def policy_hidden(self, hidden: Tensor) -> Tensor:
        """The part of the hidden states that the language-model head reads, (..., H)."""
        return hidden

    def values(self, hidden: Tensor, mask: Tensor) -> Tensor | None:
        """Values of hidden states (N, H), as (B, T)."""
        return None


class ActorCritic(Actor):
    """One backbone, two heads. It takes the place of TRL's PolicyAndValueWrapper, which runs two backbones.

    With a `critic`, a backbone of its own, the value head reads that one's hidden states. Both backbones' states of a
    token stand side by side, (M, 2H), so that all that is done with hidden states is done with both.
    """

    def __init__(self, container: AutoModelForCausalLMWithValueHead, critic: PreTrainedModel | None = None):
        super().__init__(container.pretrained_model)  # TRL looks for the policy under the name `policy`
        self.value_head, self.critic = container.v_head, critic

    def forward_backbone(self, micro_batch: MicroBatch) -> Tensor:
        states = super().forward_backbone(micro_batch)
        return states if self.critic is None else torch.cat([states, micro_batch.forward(self.critic)], -1)

    def policy_hidden(self, hidden: Tensor) -> Tensor:
        return hidden if self.critic is None else hidden.chunk(2, -1)[0]

    def values(self, hidden: Tensor, mask: Tensor) -> Tensor:
        own = hidden if self.critic is None else hidden.chunk(2, -1)[1]
        with torch.autocast(hidden.device.type, enabled=False):  # one column: float32 costs nothing here
            return scatter_to_padded(self.value_head(upcast(own)).squeeze(-1), mask)


def critic_backbone(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """A backbone for a critic of its own, before training: the start model's, trained where the policy's is (under
    LoRA in adapters of its own, over quantized weights of its own)."""
    return backbone_of(copy.deepcopy(policy))


def scatter_to_padded(flat: Tensor, mask: Tensor) -> Tensor:
    """Scatter the (N,) values of the masked tokens to (B, T); 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)

"""Actor and critic: one or two backbones and two heads, computed at completion tokens only."""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.logprobs import backbone_of, token_logprobs, upcast
from rlhf.models.packing import MicroBatch
from rlhf.models.trl_ppo import AutoModelForCausalLMWithValueHead


def with_value_head(policy: PreTrainedModel | PeftModel) -> AutoModelForCausalLMWithValueHead:
    """Return TRL's container for the policy and a new value head.

    The weights of the head are 0, because calibrated scores have mean 0. It has no dropout: with TRL's default of 0.1
    the values of two passes would differ. TRL receives a model object instead of a name, so it makes no hub request.
    """
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        policy,
        summary_dropout_prob=0.0,
        v_head_init_strategy="normal",
        # detail 23: values start at 0 (N details). With random weights, the first advantages would be noise.
        v_head_initializer_range=0.0,
        device_map={"": policy.device},  # its current device; without it TRL prints a warning for 4-bit models
    )


class DropoutKeys:
    """What the dropout masks of a forward pass depend on: a seed for each optimizer step, and the tokens."""

    def __init__(self):
        self.seed = 0
        self.active = False
        self.tokens: Tensor | None = None  # (N,) int32, a hash of each input token's number and the seed

    def set_tokens(self, micro_batch: MicroBatch) -> None:
        """Set the tokens of the next forward pass. They also serve its recomputation by gradient checkpointing."""
        numbers = micro_batch.token_numbers().astype(np.uint64) + np.uint64(self.seed)
        self.tokens = torch.from_numpy(_mixed(numbers).view(np.int32)).to(micro_batch.tokens.device, non_blocking=True)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return a hash (uint32) of each number (uint64). Source: splitmix64, Steele et al. 2014."""
    x = numbers * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(32)).astype(np.uint32)


class TokenDropout(nn.Dropout):
    """Dropout whose mask depends on the seed, the layer, the token and the feature, but not on the micro-batch.

    The number of processes and the micro-batch size therefore do not change it.
    """

    def __init__(self, share: float, layer: int, keys: DropoutKeys):
        super().__init__(share)
        self.layer = layer
        self.keys = keys
        self._features = torch.empty(0, dtype=torch.int32)

    def features(self, count: int, device: torch.device) -> Tensor:
        """Return a hash of each feature of this layer, (count,) int32."""
        if self._features.shape[0] != count or self._features.device != device:
            numbers = np.arange(count, dtype=np.uint64) + np.uint64(self.layer * 2**32 + 2**63)
            self._features = torch.from_numpy(_mixed(numbers).view(np.int32)).to(device)
        return self._features

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.keys.tokens is None:
            return super().forward(inputs)
        bits = self.keys.tokens.view(*inputs.shape[:-1], 1) ^ self.features(inputs.shape[-1], inputs.device)
        # the finalizer of MurmurHash3 (Appleby): every bit of the result depends on every bit of the input
        bits.bitwise_xor_((bits >> 16) & 0xFFFF).mul_(-2048144789)
        bits.bitwise_xor_((bits >> 13) & 0x7FFFF).mul_(-1028477387)
        bits.bitwise_xor_((bits >> 16) & 0xFFFF)
        kept = bits >= int(self.p * 2**32) - 2**31
        return torch.where(kept, inputs * (1 / (1 - self.p)), 0.0)  # the backward pass keeps one byte per number


def set_adapter_dropout(actor: nn.Module, share: float, keys: DropoutKeys) -> None:
    """Set the dropout probability of all LoRA adapters, and let their masks depend on `keys`. TRL's __init__ has set
    every dropout of the policy to 0."""
    adapters = [module for module in actor.modules() if isinstance(module, LoraLayer)]
    for layer, module in enumerate(adapters):
        for name, dropout in module.lora_dropout.items():
            if isinstance(dropout, nn.Dropout):  # peft uses nn.Identity if the probability is 0
                module.lora_dropout[name] = TokenDropout(share, layer, keys).train(dropout.training)
                keys.active = share > 0


class PolicyOutputs(NamedTuple):
    """Outputs of the current policy for R completions, each (R, T), 0 where the mask is False."""

    logprobs: Tensor  # nats
    entropy: Tensor  # nats
    values: Tensor | None  # score units; None without a critic


class Actor(nn.Module):
    """A causal LM as a policy over completion tokens."""

    def __init__(self, policy: PreTrainedModel | PeftModel):
        super().__init__()
        self.policy = policy
        self.dropout = DropoutKeys()

    @property
    def config(self):
        return self.policy.config

    def forward(
        self,
        micro_batch: MicroBatch,
        temperature: float,
        allowed: Tensor | None = None,
        entropy: str = "none",
    ) -> PolicyOutputs:
        """Computes the outputs for a micro-batch's completions in one backbone pass.

        `allowed` (M, V) and `entropy` as in `token_logprobs`.
        """
        return self.forward_heads(
            self.forward_backbone(micro_batch), micro_batch.tokens, micro_batch.mask, temperature, allowed, entropy
        )

    def forward_backbone(self, micro_batch: MicroBatch) -> Tensor:
        """Return the hidden states from which a micro-batch's M completion tokens are predicted, (M, H)."""
        if self.dropout.active and self.policy.training:
            self.dropout.set_tokens(micro_batch)
        return micro_batch.forward(backbone_of(self.policy))

    def forward_heads(
        self,
        hidden: Tensor,
        tokens: Tensor,
        mask: Tensor,
        temperature: float,
        allowed: Tensor | None,
        entropy: str,
    ) -> PolicyOutputs:
        """Computes the outputs, as `forward` does, from hidden states (M, H).

        `tokens` (M,) and `mask` (R, T) are those of the micro-batch; the other arguments are as in `token_logprobs`.
        """
        states = self.policy_hidden(hidden)
        found = *token_logprobs(self.policy, states, tokens, temperature, allowed, entropy), self.values(hidden)
        places = places_of(mask, len(tokens))
        return PolicyOutputs(*(None if flat is None else scatter_to_padded(flat, mask, places) for flat in found))

    def policy_hidden(self, hidden: Tensor) -> Tensor:
        """Return the part of the hidden states that the language-model head uses, (..., H)."""
        return hidden

    def values(self, hidden: Tensor) -> Tensor | None:
        """Return the values for hidden states (M, H), as (M,); None without a critic."""
        return None


class ActorCritic(Actor):
    """One backbone with two heads. It replaces TRL's PolicyAndValueWrapper, which runs two backbones.

    With `critic`, a separate backbone, the value head uses the critic's hidden states. The hidden states of both
    backbones are then concatenated, (M, H + H of the critic), so that other code handles them as one tensor.
    """

    def __init__(self, container: AutoModelForCausalLMWithValueHead, critic: PreTrainedModel | None = None):
        super().__init__(container.pretrained_model)  # TRL expects the policy in the attribute `policy`
        # detail 22: two heads, one backbone (37 details, 13). A second one costs the memory and time of another model.
        self.value_head = container.v_head
        self.critic = critic

    def forward_backbone(self, micro_batch: MicroBatch) -> Tensor:
        states = super().forward_backbone(micro_batch)
        return states if self.critic is None else torch.cat([states, micro_batch.forward(self.critic)], -1)

    def policy_hidden(self, hidden: Tensor) -> Tensor:
        return hidden if self.critic is None else hidden[..., : -self.critic_width]

    @property
    def critic_width(self) -> int:
        """Features of the critic's hidden states."""
        return self.value_head.summary.in_features

    def values(self, hidden: Tensor) -> Tensor:
        own = hidden if self.critic is None else hidden[..., -self.critic_width :]
        with torch.autocast(hidden.device.type, enabled=False):  # float32 is cheap for one output per token
            return self.value_head(upcast(own)).squeeze(-1)


def critic_backbone(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return a copy of the start model's backbone for a separate critic. Call it before training.

    The copy has the same trainable weights as the policy. With LoRA it has separate adapters; quantized weights are
    copied, too.
    """
    return backbone_of(copy.deepcopy(policy))


def scatter_to_padded(flat: Tensor, mask: Tensor, places: Tensor | None = None) -> Tensor:
    """Return the values (M,) of the masked tokens as (R, T), 0 where `mask` is False. `places` are `places_of` the
    mask, if they are known."""
    places = places_of(mask, len(flat)) if places is None else places
    return flat.new_zeros(mask.numel()).index_copy(0, places, flat).view(mask.shape)


def places_of(mask: Tensor, count: int) -> Tensor:
    """Return the index of each of the `count` masked tokens in the flat mask, (M,).

    A known count avoids a synchronization with the device, which `masked_scatter` has in its backward pass.
    """
    return torch.nonzero_static(mask.flatten(), size=count).squeeze(1)

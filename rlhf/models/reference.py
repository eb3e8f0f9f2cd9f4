"""The frozen reference, and the memory of weights that are not trained."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.actor_critic import scatter_to_padded
from rlhf.models.logprobs import backbone_of, token_logprobs
from rlhf.models.packing import MicroBatch


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

    def logprobs(self, micro_batch: MicroBatch, temperature: float, allowed: Tensor | None) -> Tensor:
        """Log-probs of a micro-batch's completion tokens under the start model, (R, T) and 0 off the mask."""
        with self.model() as model:
            hidden = micro_batch.forward(backbone_of(model))
            return scatter_to_padded(
                token_logprobs(model, hidden, micro_batch.tokens, temperature, allowed)[0], micro_batch.mask
            )


def frozen_copy(policy: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """A copy without gradients, its linear layers stored in `dtype` if there is one."""
    frozen = copy.deepcopy(policy).eval().requires_grad_(False)
    store_frozen_weights(frozen, dtype)
    return frozen


def store_frozen_weights(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Linear layers that are not trained, stored in the forward's precision.

    Those are the weights that autocast would round anyway, each time anew, so outputs stay the same to the bit.
    Embeddings and norms stay in float32, as autocast leaves them; so does a head that is tied to the embeddings.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if dtype is not None and type(module) is nn.Linear:
            weights = list(module.parameters(recurse=False))
            if not any(w.requires_grad or id(w) in embeddings for w in weights):
                module.to(dtype)


def release_mmap(model: nn.Module) -> None:
    """Copy the float32 CPU weights that still point into the memory-mapped weights file, if others were rounded or
    quantized: the whole file stays mapped as long as one weight points into it."""
    weights = list(model.parameters())
    if any(w.dtype != torch.float32 for w in weights):
        for weight in weights:
            if weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.requires_grad:
                weight.data = weight.data.clone()

"""The frozen models that score tokens, the reference and a teacher, and the memory of frozen weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from rlhf.distributed.weights import checksums
from rlhf.models.actor_critic import scatter_to_padded
from rlhf.models.logprobs import backbone_of, token_logprobs
from rlhf.models.packing import MicroBatch


@dataclass
class Reference:
    """A frozen model: the start model, as a separate copy or with LoRA as the policy with its adapters disabled, or a
    teacher."""

    policy: PreTrainedModel | PeftModel | None  # None: it is not needed, because there is a copy
    copy: PreTrainedModel | None  # None: the policy has LoRA adapters
    start: list[int] | None = None  # `checksums` of a policy that equals the reference; None: unknown
    name: str = "reference"  # in messages

    @classmethod
    def before_training(cls, policy: PreTrainedModel | PeftModel, dtype: torch.dtype | None) -> Reference:
        """Return the reference of a policy that is not trained yet.

        `dtype` is the precision of the policy's forward pass. With another one, the KL would include rounding errors.
        """
        if isinstance(policy, PeftModel):
            return cls(policy, None, checksums(policy))
        frozen = copy.deepcopy(policy).eval().requires_grad_(False)
        store_frozen_weights(frozen, dtype)
        return cls(policy, frozen, checksums(policy))

    @contextlib.contextmanager
    def model(self) -> Iterator[PreTrainedModel | PeftModel]:
        """Context manager that gives the reference as a causal LM."""
        with contextlib.nullcontext() if self.copy is not None else self.policy.disable_adapter():
            yield self.copy if self.copy is not None else self.policy

    def logprobs(self, micro_batch: MicroBatch, temperature: float, allowed: Tensor | None) -> Tensor:
        """Return the log-probs of a micro-batch's completion tokens under the reference, (R, T), nats.

        They are 0 where the mask is False. `allowed` as in `token_logprobs`, for the policy's vocabulary.
        """
        with self.model() as model:
            hidden = micro_batch.forward(backbone_of(model))
            if allowed is not None and (more := model.get_input_embeddings().num_embeddings - allowed.shape[1]):
                allowed = pad(allowed, (0, more))  # a teacher with more embeddings, for which there are no tokens
            return scatter_to_padded(
                token_logprobs(model, hidden, micro_batch.tokens, temperature, allowed)[0], micro_batch.mask
            )


def store_frozen_weights(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Store frozen linear layers in the precision of the forward pass; `dtype` None: change nothing.

    Autocast would convert these weights in every forward pass, so the outputs are bit-identical. Embeddings and norms
    remain in float32, because autocast does not convert them. So does a head that is tied to the embeddings.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if dtype is not None and type(module) is nn.Linear:
            weights = list(module.parameters(recurse=False))
            if not any(w.requires_grad or id(w) in embeddings for w in weights):
                # detail 11: only what autocast rounds anyway (this project). Otherwise the KL at the start is not 0.
                module.to(dtype)


def release_mmap(model: nn.Module) -> None:
    """Clone frozen float32 CPU weights that may point into the memory-mapped weights file, so that it can be freed.

    The whole file stays mapped as long as one weight points into it. Nothing is done if all weights are float32.
    """
    weights = list(model.parameters())
    if any(w.dtype != torch.float32 for w in weights):
        for weight in weights:
            if weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.requires_grad:
                weight.data = weight.data.clone()

"""A critic that starts from the reward model (Ouyang et al. 2022, arXiv 2203.02155, appendix C)."""

from __future__ import annotations

import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from rlhf.models.load import lora_modules
from rlhf.models.logprobs import upcast
from rlhf.settings.training import Config


def critic_of_reward_model(config: Config, classifier: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a reward model's backbone with the trainable weights of a critic: all, in float32, or with
    --use-lora adapters like the policy's on the frozen weights. `check_critic` has compared the LoRA targets."""
    backbone = backbone_of_classifier(copy.deepcopy(classifier))
    m = config.model
    backbone.requires_grad_(not m.use_lora)
    if m.use_lora:
        targets = lora_modules(m.lora_targets)
        shape = {"r": m.lora_r, "lora_alpha": m.lora_alpha, "lora_dropout": m.lora_dropout, "target_modules": targets}
        with torch.random.fork_rng():
            torch.manual_seed(config.run.seed)  # peft initialises adapters with torch's global generator
            backbone = get_peft_model(backbone, LoraConfig(**shape)).get_base_model()
    else:
        backbone.float()  # under bfloat16 the reward model's linear layers are stored in 16 bits
    if m.gradient_checkpointing:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        backbone.enable_input_require_grads()
    return backbone


def backbone_of_classifier(classifier: PreTrainedModel) -> PreTrainedModel:
    """Return a sequence classifier without its head."""
    return getattr(classifier, classifier.base_model_prefix)


def score_head(classifier: PreTrainedModel) -> nn.Linear | None:
    """Return the head of a causal classifier, one linear layer on the last hidden state; None for other models."""
    head = getattr(classifier, "score", None)
    return head if isinstance(head, nn.Linear) else None


def set_value_head(value_head: nn.Module, classifier: PreTrainedModel, mean: float, std: float, weight: float) -> None:
    """Make TRL's value head, in place, the reward model's head, in the score units that training uses.

    value = weight * (score - mean) / std
    """
    head = score_head(classifier)
    with torch.no_grad():
        bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias
        summary = nn.Linear(head.in_features, 1, device=head.weight.device, dtype=torch.float32)
        summary.weight.copy_(weight / std * upcast(head.weight))
        summary.bias.copy_(weight / std * (upcast(bias) - mean))
    value_head.summary = summary

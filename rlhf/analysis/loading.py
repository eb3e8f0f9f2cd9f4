"""Loads the models to evaluate."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.analysis.models import ModelRef
from rlhf.models.load import load_adapter, load_policy


def load_model_ref(
    model: ModelRef,
    tokenizer: PreTrainedTokenizerBase,
    load_in_4bit: bool,
    dtype: torch.dtype | None,
    device: torch.device,
) -> PreTrainedModel:
    """Loads a model for evaluation; an adapter with its base model, which is in 4 bits if `load_in_4bit`."""
    policy = load_policy(
        model.base or model.source,
        load_in_4bit=load_in_4bit,
        dtype=dtype,
        device=device,
        vocabulary=len(tokenizer) if model.base is None else 0,
    )
    return (load_adapter(policy, model.source) if model.base is not None else policy).eval()

"""The reference: plain transformers and torch, one text per forward pass, without padding and without this project."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def chat_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the ids of a chat up to the assistant's turn, as transformers renders it."""
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def plain_forward(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probs (T,) of a completion's tokens, and the hidden states (T, H) that predict them."""
    output = model(torch.tensor([[*prompt, *completion]]), output_hidden_states=True)
    first = len(prompt) - 1
    distribution = torch.log_softmax(output.logits[0, first:-1] / temperature, -1)
    logprobs = distribution.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
    return logprobs, output.hidden_states[-1][0, first:-1]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, with the Euclidean norm, in float64."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())

"""Token records: everything that the trainer saw of every token of some episodes, a row a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms import objectives
from rlhf.trainer.batch import Batch


def token_rows(
    update: int,
    numbers: Sequence[int],
    batch: Batch,
    scores: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    gamma: float,
) -> list[dict[str, Any]]:
    """A row for every token of a batch's first episodes; `numbers` are their prompts' in the training set.

    `state` is all that the model had read when it chose the token. `scores` (B,), before normalisation.
    """
    prompts, replies = batch.rollout.prompts, batch.rollout.replies.rows()
    values = {name: v[: len(numbers)].float().tolist() for name, v in _quantities(batch, gamma).items()}
    return [
        {
            "update": update,
            "episode": episode,
            "prompt_index": number,
            "prompt": prompts[episode].example.messages[-1]["content"],
            "topic": prompts[episode].example.topic,
            "score": float(scores[episode]),
            "step": step,
            "state": tokenizer.decode([*prompts[episode].ids, *replies[episode][:step]]),
            "token_id": token,
            "token": tokenizer.decode([token]),
            **{name: of_episode[episode][step] for name, of_episode in values.items()},
        }
        for episode, number in enumerate(numbers)
        for step, token in enumerate(replies[episode])
    ]


def _quantities(batch: Batch, gamma: float) -> dict[str, Tensor]:
    """Everything that there is a number of at each token, (B, T)."""
    rollout = batch.rollout
    found = {
        "logprob": rollout.logprobs,
        "ref_logprob": rollout.ref_logprobs,
        "kl": batch.kl,
        "advantage": batch.advantages,
        "weight": batch.weights,
    }
    if batch.returns is not None:
        found |= {
            "reward": batch.rewards,
            "value": rollout.values,
            "td_error": objectives.td_errors(batch.rewards, rollout.values, rollout.mask, gamma),
            "return": batch.returns,
        }
    return found

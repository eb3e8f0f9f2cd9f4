"""Record what the trainer saw of every token of some episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience
from rlhf.callbacks.base import Callback
from rlhf.checkpoints.token_record import write_tokens
from rlhf.data.prompts import Prompt
from rlhf.settings.training import Config


def token_rows(
    update: int,
    numbers: Sequence[int],
    batch: Experience,
    scores: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    gamma: float,
) -> list[dict[str, Any]]:
    """A row for every token of a batch's first episodes; `numbers` are their prompts' in the training set.

    `state` is all that the model had read when it chose the token. `scores` (B,), before normalisation.
    """
    prompts, completions = batch.prompts, batch.completions.rows()
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
            "state": tokenizer.decode([*prompts[episode].ids, *completions[episode][:step]]),
            "token_id": token,
            "token": tokenizer.decode([token]),
            **{name: of_episode[episode][step] for name, of_episode in values.items()},
        }
        for episode, number in enumerate(numbers)
        for step, token in enumerate(completions[episode])
    ]


def _quantities(batch: Experience, gamma: float) -> dict[str, Tensor]:
    """Everything that there is a number of at each token, (B, T)."""
    found = {
        "logprob": batch.logprobs,
        "ref_logprob": batch.ref_logprobs,
        "kl": batch.kl,
        "advantage": batch.raw_advantages,
        "weight": batch.advantages,
    }
    if batch.returns is not None:
        found |= {
            "reward": batch.rewards,
            "value": batch.values,
            "td_error": objectives.td_errors(batch.rewards, batch.values, batch.mask, gamma),
            "return": batch.returns,
        }
    return found


class TokenRecord(Callback):
    """What the trainer saw of every token of some episodes, as files."""

    def __init__(self, folder: Path, config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]):
        """`prompts` are the training prompts, in the order in which records number them."""
        self.folder, self.config, self.tokenizer = folder, config, tokenizer
        self.number_of = {id(prompt): i for i, prompt in enumerate(prompts)}

    def on_batch(self, update, batch, scores):
        record = self.config.record
        if update == 1 or update % record.record_every == 0:
            count = record.record_prompts * self.config.group_size  # a group's replies stand together
            numbers = [self.number_of[id(prompt)] for prompt in batch.prompts[:count]]
            gamma = self.config.critic.gamma
            rows = token_rows(update, numbers, batch, scores.raw, self.tokenizer, gamma)
            write_tokens(self.folder, update, rows, record.record_format)

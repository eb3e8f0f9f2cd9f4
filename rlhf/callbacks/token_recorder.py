"""Records log-probs, advantages and other quantities for every token of some episodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience
from rlhf.callbacks.base import Callback
from rlhf.checkpoints.token_record import write_tokens
from rlhf.data.prompts import Prompt
from rlhf.settings.training import Config, CriticSettings

UPDATES = 50  # between records; the first update is always recorded
PROMPTS = 2  # in each record, with all of their completions


def token_rows(
    update: int,
    numbers: Sequence[int],
    batch: Experience,
    scores: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    critic: CriticSettings,
) -> list[dict[str, Any]]:
    """Return one row per token of the policy in a batch's first episodes. In a row, `state` is the text before it.

    Args:
        update: number of the update.
        numbers: index in the training set of each recorded episode's prompt. Their count is the number of episodes.
        batch: the update's experience.
        scores: (B,), before normalisation. NaN, a completion without a score, is recorded as None.
        tokenizer: the policy's.
        critic: discount and unit of time, for the TD errors.
    """
    prompts = batch.prompts
    completions = batch.completions.rows()
    score_of = [None if math.isnan(score) else score for score in scores.tolist()]
    values = {name: v[: len(numbers)].float().tolist() for name, v in _quantities(batch, critic).items()}
    return [
        {
            "update": update,
            "episode": episode,
            "prompt_index": number,
            "prompt": prompts[episode].example.messages[-1]["content"],
            "topic": prompts[episode].example.topic,
            "score": score_of[episode],
            "step": step,
            # the environment's text since the last token of the policy
            "before": tokenizer.decode(completions[episode][last + 1 : step]),
            "state": tokenizer.decode([*prompts[episode].ids, *completions[episode][:step]]),
            "token_id": completions[episode][step],
            "token": tokenizer.decode([completions[episode][step]]),
            **{name: of_episode[episode][step] for name, of_episode in values.items()},
        }
        for episode, number in enumerate(numbers)
        for last, step in pairwise([-1, *batch.completions.actions(episode).tolist()])
    ]


def _quantities(batch: Experience, critic: CriticSettings) -> dict[str, Tensor]:
    """Return the recorded quantities, each (B, T)."""
    found = {
        "logprob": batch.logprobs,
        "ref_logprob": batch.ref_logprobs,
        "kl": batch.kl,
        "advantage": batch.raw_advantages,
        "weight": batch.advantages,
    }
    if batch.rewards is not None:
        found["reward"] = batch.rewards
    if batch.rewards is not None and batch.values is not None:
        found["value"] = batch.values
        ends = batch.completions.turn_ends if critic.gae_unit == "turn" else None
        found["td_error"] = objectives.td_errors(batch.rewards, batch.values, batch.mask, critic.gamma, ends)
    if batch.returns is not None:
        found["return"] = batch.returns
    return found


class TokenRecord(Callback):
    """Writes token records: the quantities of every token of some episodes."""

    def __init__(self, folder: Path, config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]):
        """`prompts` are the training prompts. Records contain their indices; other prompts of a loop by hand follow
        them."""
        self.folder = folder
        self.config = config
        self.tokenizer = tokenizer
        self.number_of = {prompt.ids: i for i, prompt in enumerate(prompts)}

    def on_batch(self, update, batch, scores):
        if update == 1 or update % UPDATES == 0:
            count = PROMPTS * self.config.group_size  # a group's completions are adjacent
            prompts = batch.prompts[:count]
            numbers = [self.number_of.setdefault(prompt.ids, len(self.number_of)) for prompt in prompts]
            rows = token_rows(update, numbers, batch, scores.raw, self.tokenizer, self.config.critic)
            write_tokens(self.folder, update, rows)

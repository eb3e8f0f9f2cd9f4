"""The rewards of a run in a training by verl: what reward.py of an export calls. Needs no TRL."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rlhf.data.chat_template import encode_text
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rewards.find import find_rule
from rlhf.rewards.rewards import Rewards
from rlhf.utils.errors import UserError


def reward_of_run(
    names: Sequence[str],
    weights: Sequence[float] | None,
    keywords: Sequence[str],
    limit_s: float,
    longest: int,
    is_plain: bool,
    tokenizer: str,
) -> Callable[[str, dict[str, Any]], float]:
    """Return a function of a completion's text and verl's `extra_info`, which gives the weighted sum of the reward
    functions, 0 if none applies. Raises UserError if a function does not exist, or names what verl does not give.

    Args:
        names: the functions, as in --reward-func.
        weights: of the functions, after that of a reward model; None: all 1.
        keywords: for keyword_bonus.
        limit_s: the time limit of a function, in seconds.
        longest: tokens of the longest completion. A shorter text counts as one that ended with EOS.
        is_plain: the run has no chat template.
        tokenizer: folder of the run's tokenizer. verl gives only texts, so completion_ids are those of the text.
    """
    encoder = load_tokenizer(tokenizer, is_plain)
    weights = weights and weights[-len(names) :]
    rewards = Rewards([find_rule(name, keywords) for name in names], weights, encoder, limit_s)
    if rewards.named:
        raise UserError(
            f"verl does not give {', '.join(sorted(rewards.named))}", str(rewards), "Use other reward functions"
        )

    def score(text: str, extra_info: dict[str, Any]) -> float:
        row = json.loads(extra_info["row"])
        example = Example(tuple(row["messages"]), columns=row["columns"], conversational=row["conversational"])
        ids = encode_text(encoder, text)
        ended = len(ids) < longest
        ids += [encoder.eos_token_id] if ended else []
        found = rewards.score([Prompt((), example)], [text], [ids], [ended])
        return found.total[0] or 0.0

    return score

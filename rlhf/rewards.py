"""Rewards as functions in TRL's reward-function signature, shared by training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from reward_model.scorer import RewardModel
from rlhf.errors import RunError
from rlhf.prompts import Prompt

RewardFunction = Callable[..., list[float]]


class LearnedReward:
    """A reward model's calibrated score of each reply."""

    __name__ = "reward_model"

    def __init__(self, model: RewardModel):
        self.model = model

    def __call__(self, completions: Sequence[str], *, messages, ended, **_) -> list[float]:
        return self.model.score(messages, completions, ended)


def score_replies(
    functions: Sequence[RewardFunction], prompts: Sequence[Prompt], texts: Sequence[str], ended: Sequence[bool]
) -> list[float]:
    """Each reply's score: the sum of all reward functions.

    A function is called as `f(prompts=, completions=, messages=, ended=)`, lists of one entry a reply, and returns
    one number a reply. Raises RunError, with the function's name and the reply, for a wrong count or a score that is
    not a finite number: the optimizer must never see it.
    """
    totals = [0.0] * len(texts)
    for function in functions:
        scores = function(
            prompts=[p.example.messages[-1]["content"] for p in prompts],
            completions=list(texts),
            messages=[list(p.example.messages) for p in prompts],
            ended=list(ended),
        )
        name = getattr(function, "__name__", type(function).__name__)
        if not isinstance(scores, Sequence) or len(scores) != len(texts):
            raise RunError(
                f"{len(texts)} replies, but the reward function gave {scores!r:.60}: {name}. One number each"
            )
        for score, text in zip(scores, texts, strict=True):
            if not isinstance(score, (int, float)) or not math.isfinite(score):
                raise RunError(
                    f"score {score!r} is not a finite number: {name}, reply {text!r:.80}. Mend the function"
                )
        totals = [total + score for total, score in zip(totals, scores, strict=True)]
    return totals

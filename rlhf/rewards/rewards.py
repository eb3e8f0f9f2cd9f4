"""Scores completions with the weighted sum of reward functions, in training and evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt
from rlhf.rewards.call import call_function, parameters_of
from rlhf.rewards.functions import LearnedReward, ModuleReward, RewardFunction
from rlhf.utils.errors import UserError, raise_if

ARGUMENTS = ("prompts", "completions", "completion_ids", "messages", "ended")  # passed to every function


@dataclass(frozen=True)
class RewardScores:
    """Scores of completions. Each list has one entry per completion."""

    total: list[float | None]  # the weighted sum over the functions that apply; None if none applies
    by_function: dict[str, list[float | None]]  # before the weights; None if the function does not apply


class Rewards:
    """Reward functions and their weights."""

    def __init__(
        self,
        functions: Sequence[RewardFunction | nn.Module],
        weights: Sequence[float] | None,
        tokenizer: PreTrainedTokenizerBase,
        limit_s: float | None = None,
    ):
        """Raise UserError if there is no function, or not one weight per function.

        Args:
            functions: reward functions and modules.
            weights: one per function; None: all 1.
            tokenizer: the policy's, for modules without a tokenizer.
            limit_s: time limit in seconds per function and batch, except for the reward model; None: no limit.
        """
        if not functions or (weights is not None and len(weights) != len(functions)):
            raise UserError(
                f"{len(weights or [])} weights for {len(functions)} reward functions: rewards. Give one per function"
            )
        self.functions = [ModuleReward(f, tokenizer) if isinstance(f, nn.Module) else f for f in functions]
        self.weights = list(weights) if weights is not None else [1.0] * len(self.functions)
        self.limits_s = [None if isinstance(f, LearnedReward) else limit_s for f in self.functions]
        self.printed: Path | None = None  # file for the functions' output; None: the console
        self.names = _distinct([getattr(f, "__name__", type(f).__name__) for f in self.functions])

    def __str__(self) -> str:
        return " + ".join(f"{w:g} x {name}" for w, name in zip(self.weights, self.names, strict=True))

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[Sequence[int]], ended: Sequence[bool]
    ) -> RewardScores:
        """Return the scores of completions.

        Raises RunError with the function's name and the completion if a function raises, exceeds its time limit or
        returns the wrong number of scores. Raises BadScore for a score that is not finite or too large, so that it
        never reaches the optimizer. (TRL's GRPO ignores NaN in its sum.)

        Args:
            prompts: one per completion.
            texts: the completions as text.
            ids: the completions as ids, with EOS.
            ended: False if the completion was cut off at the length limit.
        """
        given = self.scores_by_function(prompts, texts, ids, ended)
        rows = zip(*given.values(), strict=True)
        return RewardScores([sum(w * s for w, s in zip(self.weights, row, strict=True)) for row in rows], given)

    def scores_by_function(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        ended: Sequence[bool],
        finite: bool = True,
    ) -> dict[str, list[float]]:
        """Return each function's scores before the weights. Raises like `score`; without BadScore if not `finite`."""
        columns = self.columns_of(prompts)
        given = {
            "prompts": [p.example.messages[-1]["content"] for p in prompts],
            "completions": list(texts),
            "completion_ids": [list(row) for row in ids],
            "messages": [list(p.example.messages) for p in prompts],
            "ended": list(ended),
            **{name: [p.example.columns.get(name) for p in prompts] for name in columns},
        }
        calls = zip(self.functions, self.names, self.limits_s, strict=True)
        return {
            name: call_function(function, name, given, limit_s, finite, self.printed)
            for function, name, limit_s in calls
        }

    def columns_of(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return the names of the prompts' dataset columns and of the columns that a function requires."""
        found = dict.fromkeys(name for p in prompts for name in p.example.columns)
        required = dict.fromkeys(name for function in self.functions for name in required_columns(function))
        return [name for name in (found | required) if name not in ARGUMENTS]


def required_columns(function: RewardFunction) -> list[str]:
    """Return the parameters without a default that must come from a dataset column."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        p.name for p in parameters_of(function) if p.kind in kinds and p.default is p.empty and p.name not in ARGUMENTS
    ]


def check_columns(functions: Sequence[RewardFunction | nn.Module], examples: Sequence[Example], source: str) -> None:
    """Raise UserError if a reward function requires a column that no row of the data has."""
    present = dict.fromkeys(name for example in examples for name in example.columns)
    problems = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        if isinstance(function, nn.Module):
            continue  # it receives ids
        for column in required_columns(function):
            if column not in present:
                has = f"The data has {', '.join(map(repr, present))}" if present else "The data has no columns"
                problems.append(
                    f"reward function {name!r} requires the column {column!r}, which the data lacks: {source}. {has}. "
                    "Add the column, or give the parameter a default"
                )
    raise_if(problems)


def _distinct(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}_{i + 1}" for i, name in enumerate(names)]

"""Scores completions with the weighted sum of reward functions, in training and evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt
from rlhf.rewards.arguments import (
    END_OF_TRAINING,
    PER_CALL,
    PER_COMPLETION,
    RESERVED,
    Arguments,
    RewardLog,
    is_of_trl,
    per_call,
    per_completion,
)
from rlhf.rewards.call import call_function, parameters_of
from rlhf.rewards.functions import LearnedReward, ModuleReward, RewardFunction
from rlhf.rewards.reward_model import RewardModel
from rlhf.utils.errors import UserError, raise_if


@dataclass(frozen=True)
class RewardScores:
    """Scores of completions. Each list has one entry per completion."""

    total: list[float | None]  # the weighted sum over the functions that apply; None if none applies
    by_function: dict[str, list[float | None]]  # before the weights; None if the function does not apply
    extra: dict[str, list] = field(default_factory=dict)  # columns that functions logged with log_extra
    metrics: dict[str, float] = field(default_factory=dict)  # means of what they logged with log_metric


class Rewards:
    """Reward functions and their weights."""

    def __init__(
        self,
        functions: Sequence[RewardFunction | nn.Module],
        weights: Sequence[float] | None,
        tokenizer: PreTrainedTokenizerBase,
        limit_s: float | None = None,
        names: Sequence[str] | None = None,
        kind: str = "reward function",
    ):
        """Raise UserError if there is no function, or not one weight per function.

        Args:
            functions: reward functions and modules.
            weights: one per function; None: all 1.
            tokenizer: the policy's, for modules without a tokenizer.
            limit_s: time limit in seconds per function and batch, except for the reward model; None: no limit.
            names: one per function, for metrics and messages; None: the functions' own names.
            kind: what the functions are called in messages.
        """
        if not functions or (weights is not None and len(weights) != len(functions)):
            raise UserError(
                f"{len(weights or [])} weights for {len(functions)} reward functions: rewards. Give one per function"
            )
        self.functions = [ModuleReward(f, tokenizer) if isinstance(f, nn.Module) else f for f in functions]
        self.weights = list(weights) if weights is not None else [1.0] * len(self.functions)
        self.limits_s = [None if isinstance(f, LearnedReward) else limit_s for f in self.functions]
        self.printed: Path | None = None  # file for the functions' output; None: the console
        self.names = list(names) if names is not None else _distinct([name_of(f) for f in self.functions])
        self.kind = kind
        self.trainer_state = END_OF_TRAINING  # a training run replaces it by its own state

    def __str__(self) -> str:
        return " + ".join(f"{w:g} x {name}" for w, name in zip(self.weights, self.names, strict=True))

    @property
    def learned(self) -> tuple[RewardModel, float] | None:
        """The reward model and its weight; None without one."""
        pairs = zip(self.functions, self.weights, strict=True)
        return next(((f.model, w) for f, w in pairs if isinstance(f, LearnedReward)), None)

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
        log = RewardLog(len(texts))
        given = self.scores_by_function(prompts, texts, ids, ended, log=log)
        return RewardScores(self.weighted(given), given, log.extra, log.metrics)

    def weighted(self, scores: dict[str, list[float | None]]) -> list[float | None]:
        """Return the weighted sum of each completion's scores by function, over the functions that apply to it."""
        return [_weighted_sum(self.weights, row) for row in zip(*scores.values(), strict=True)]

    def scores_by_function(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        ended: Sequence[bool],
        finite: bool = True,
        log: RewardLog | None = None,
    ) -> dict[str, list[float | None]]:
        """Return each function's scores before the weights. Raises like `score`; without BadScore if not `finite`.

        `log` receives what the functions log; None: it is ignored.
        """
        log = RewardLog(len(texts)) if log is None else log
        columns, names = self.columns_of(prompts), zip(self.functions, self.names, self.limits_s, strict=True)
        rows = {
            always: per_completion(prompts, texts, ids, ended, columns, always)
            for always in {is_of_trl(function) for function in self.functions}
        }
        return {
            name: call_function(
                function,
                f"{self.kind} {name!r}",
                Arguments(rows[is_of_trl(function)], per_call(self.trainer_state, log), list(texts)),
                limit_s,
                finite,
                self.printed,
            )
            for function, name, limit_s in names
        }

    def columns_of(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return the names of the prompts' dataset columns and of the columns that a function requires."""
        found = dict.fromkeys(name for p in prompts for name in p.example.columns)
        required = dict.fromkeys(name for function in self.functions for name in required_columns(function))
        return [name for name in (found | required) if name not in (*PER_COMPLETION, *PER_CALL)]


def _weighted_sum(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    """Return the weighted sum of the scores that are not None; None if all are."""
    known = [w * s for w, s in zip(weights, scores, strict=True) if s is not None]
    return sum(known) if known else None


def required_columns(function: RewardFunction) -> list[str]:
    """Return the parameters without a default that must come from a dataset column."""
    return [p.name for p in _column_parameters(function) if p.default is p.empty]


def optional_columns(function: RewardFunction) -> list[str]:
    """Return the parameters with a default that a dataset column may give. Arguments of a `partial` are not."""
    fixed = function.keywords if isinstance(function, partial) else {}
    return [p.name for p in _column_parameters(function) if p.default is not p.empty and p.name not in fixed]


def _column_parameters(function: RewardFunction) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in parameters_of(function) if p.kind in kinds and p.name not in (*PER_COMPLETION, *PER_CALL)]


def check_columns(
    functions: Sequence[RewardFunction | nn.Module],
    examples: Sequence[Example],
    source: str,
    say: Callable[[str], None] = print,
    kind: str = "reward function",
) -> None:
    """Check the columns of the data against the parameters of the reward functions.

    Raises UserError if a function requires a column that no row of the data has, or if a column has the name of an
    argument. Prints a warning with `say` if a parameter has a default and the data has no such column. `kind` is what
    the functions are called in messages.
    """
    functions = [f for f in functions if not isinstance(f, nn.Module)]  # modules receive ids
    present = dict.fromkeys(name for example in examples for name in example.columns)
    has = f"The data has {', '.join(map(repr, present))}" if present else "The data has no columns"
    problems = [
        f"the column {column!r} has the name of an argument of reward functions: {source}. Rename it, for example "
        f"with --columns my_{column}={column}"
        for column in (present if functions else ())
        if column in RESERVED
    ]
    for function in functions:
        name = name_of(function)
        problems += [
            f"{kind} {name!r} requires the column {column!r}, which the data lacks: {source}. {has}. "
            "Add the column, or give the parameter a default"
            for column in required_columns(function)
            if column not in present
        ]
        for column in () if is_of_trl(function) else optional_columns(function):
            if column not in present:
                say(
                    f"warning: the data has no column {column!r}, so {kind} {name!r} uses the default of "
                    f"this parameter: {source}. {has}"
                )
    raise_if(problems)


def name_of(function: RewardFunction | nn.Module) -> str:
    """Return a reward function's name for metrics and messages."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _distinct(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}_{i + 1}" for i, name in enumerate(names)]

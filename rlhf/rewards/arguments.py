"""The arguments of reward functions: TRL's, five of ours (`messages`, `ended`, NAMED), and the dataset's columns."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import nn

from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.distributed.shares import merge_rows
from rlhf.utils.errors import Problem, raise_if
from rlhf.utils.results import json_ready

if TYPE_CHECKING:
    from transformers import TrainerState

    from rlhf.rollout.episodes import Episode

# per completion one score, or {"turn_scores": [...]} or {"token_scores": [...]}, or None
RewardFunction = Callable[..., Sequence[float | dict[str, Sequence[float]] | None]]

PER_COMPLETION = ("prompts", "completions", "completion_ids", "messages", "ended")  # lists, like the columns
# lists, too, which a function receives only if one names them
NAMED = ("prompt_ids", "completion_logprobs", "turns", "group", "environments", "environment_rewards")
PER_CALL = ("trainer_state", "log_extra", "log_metric")  # one object for all completions
# a data column with one of these names, or of NAMED if a function names it, would hide an argument; the column
# `messages` is the row's prompt
RESERVED = tuple(name for name in (*PER_COMPLETION, *PER_CALL) if name != "messages")
Completion = str | Sequence[dict[str, str]]  # text, or a list of messages: one, or those of several turns


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of a reward function."""

    per_completion: dict[str, list]  # each list has one entry per completion
    per_call: dict[str, Any]
    texts: list[str]  # the completions as text, for error messages
    spans: list[Sequence[range]]  # per completion: where the policy's turns are in its ids


@dataclass
class RewardLog:
    """Collects what reward functions log with TRL's `log_extra` and `log_metric`, for one batch of completions."""

    completions: int
    extra: dict[str, list] = field(default_factory=dict)  # column -> one value per completion
    values: dict[str, list[float]] = field(default_factory=dict)  # metric -> one value per call

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Store a column. Raises ValueError if it does not have one value per completion."""
        values = list(values)
        if len(values) != self.completions:
            raise ValueError(f"log_extra({column!r}) has {len(values)} values for {self.completions} completions")
        self.extra[str(column)] = [_as_json(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """Store a number. One that is not finite is ignored. Raises ValueError for an empty name."""
        if not str(name).strip():
            raise ValueError("log_metric() needs a name")
        if math.isfinite(value):
            self.values.setdefault(str(name), []).append(float(value))

    def join(self, parts: Sequence[tuple[Sequence[int], RewardLog]]) -> None:
        """Store what functions logged for parts of the completions, each with its rows: a column has None for parts
        that did not log it, and a metric is the mean of the parts' metrics, weighted by their completions."""
        for name in dict.fromkeys(name for _, part in parts for name in part.extra):
            found = [(rows, part.extra[name]) for rows, part in parts if name in part.extra]
            self.extra[name] = merge_rows(found, self.completions)
        for name in dict.fromkeys(name for _, part in parts for name in part.values):
            known = [part for _, part in parts if name in part.values]
            weights = [part.completions for part in known]
            self.values[name] = [fmean((part.metrics[name] for part in known), weights)]

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric over the calls."""
        return {name: fmean(values) for name, values in self.values.items()}


def _as_json(value: Any) -> Any:
    """Return a value as a JSON file stores it, because samples and checkpoints contain it; as text if JSON cannot
    store it."""
    try:
        text = json.dumps(value, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))
        return json_ready(json.loads(text))
    except (TypeError, ValueError, RecursionError):  # for example a dict whose keys are tuples
        return str(value)


def per_completion(
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    ended: Sequence[bool],
    episodes: Sequence[Episode | None],
    columns: Sequence[str],
    always_messages: bool,
) -> dict[str, list]:
    """Return the arguments that have one entry per completion.

    As in TRL, `prompts` and `completions` are lists of messages if the prompt's row is conversational (or if
    `always_messages`), otherwise texts. `episodes` are those of completions with several turns.
    """
    messages = [list(p.example.messages) for p in prompts]  # the caller copies the arguments of each function
    is_chat = [always_messages or p.example.conversational for p in prompts]
    return {
        "prompts": [m if chat else m[-1]["content"] for m, chat in zip(messages, is_chat, strict=True)],
        "completions": [
            as_messages(text, episode) if chat else text
            for text, episode, chat in zip(texts, episodes, is_chat, strict=True)
        ],
        "completion_ids": [list(row) for row in ids],
        "messages": messages,
        "ended": list(ended),
        **{name: [p.example.columns.get(name) for p in prompts] for name in columns},
    }


def as_messages(text: str, episode: Episode | None) -> Completion:
    """Return a completion as messages: one of the assistant, or, with tool calls or an environment's tokens, those of
    its episode."""
    if episode is None or not (episode.messages_of_turns or episode.actions < len(episode.ids)):
        return [{"role": "assistant", "content": text}]
    return episode.messages


def per_call(state: TrainerState, log: RewardLog) -> dict[str, Any]:
    """Return the arguments that are one object for all completions. The state is a copy."""
    copied = copy.copy(state)
    copied.log_history = list(state.log_history)
    return {"trainer_state": copied, "log_extra": log.log_extra, "log_metric": log.log_metric}


def is_of_trl(function: Any) -> bool:
    """True for a function of `trl.rewards`. These expect conversational completions."""
    while isinstance(function, partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return module == "trl.rewards" or module.startswith("trl.rewards.")


def text_of(completion: Completion) -> str:
    """Return a completion as text, of several messages the last one."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def name_of(function: RewardFunction | nn.Module) -> str:
    """Return a reward function's name for metrics and messages."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return the names with a number after each name that occurs several times."""
    return [name if names.count(name) == 1 else f"{name}_{i + 1}" for i, name in enumerate(names)]


def weighted_sum(names: Sequence[str], weights: Sequence[float]) -> str:
    """Return the sum that training uses as text, such as "1 x reward_model + 0.1 x length_penalty"; "none" without
    functions."""
    return " + ".join(f"{weight:g} x {name}" for weight, name in zip(weights, names, strict=True)) or "none"


# --- dataset columns -------------------------------------------------------------------------------------------------


def required_columns(function: RewardFunction) -> list[str]:
    """Return the parameters without a default that must come from a dataset column."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters_of(function) if p.kind in kinds and p.default is p.empty]
    return [name for name in names if name not in (*PER_COMPLETION, *NAMED, *PER_CALL)]


def named_by(functions: Sequence[RewardFunction]) -> set[str]:
    """Return which of NAMED the functions name."""
    return {parameter.name for function in functions for parameter in parameters_of(function)} & {*NAMED}


def check_columns(
    functions: Sequence[RewardFunction | nn.Module],
    examples: Sequence[Example],
    source: str,
    kind: str = "reward function",
) -> None:
    """Check the columns of the data against the parameters of the reward functions.

    Raises UserError if a function requires a column that no row of the data has, or if a column has the name of an
    argument. `kind` is what the functions are called in messages.
    """
    functions = [f for f in functions if not isinstance(f, nn.Module)]  # modules receive ids
    present = dict.fromkeys(name for example in examples for name in example.columns)
    has = f"The data has {', '.join(map(repr, present))}" if present else "The data has no columns"
    problems = [
        Problem(
            f"the column {column!r} has the name of an argument of reward functions",
            source,
            f"Rename it, for example with --columns my_{column}={column}",
        )
        for column in (present if functions else ())
        if column in {*RESERVED, *named_by(functions)}
    ]
    for function in functions:
        lacks = [column for column in required_columns(function) if column not in present]
        what = f"{kind} {name_of(function)!r} requires columns that the data lacks ({', '.join(map(repr, lacks))})"
        fix = f"{has}. Add each missing column, or give its parameter a default"
        if not {"completions", "completion_ids"}.intersection(p.name for p in parameters_of(function)):
            fix = (  # the form of verl or OpenRLHF
                "It has no parameter completions. A function here receives lists, completions and the columns: "
                f"docs/coming_from_trl.md#reward-functions-of-openrlhf-and-verl. {has}"
            )
        problems += [Problem(what, source, fix)] if lacks else []
    raise_if(problems)


def parameters_of(function: RewardFunction) -> list[inspect.Parameter]:
    """Return a function's parameters, or `**kwargs` if it has no signature (some built-in functions)."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]

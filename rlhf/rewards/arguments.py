"""The arguments of reward functions: TRL's, and two of ours (`messages` and `ended`)."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from transformers import TrainerState

from rlhf.data.prompts import Prompt
from rlhf.utils.files import json_ready

PER_COMPLETION = ("prompts", "completions", "completion_ids", "messages", "ended")  # lists, like the columns
PER_CALL = ("trainer_state", "log_extra", "log_metric")  # one object for all completions
# a data column with one of these names would hide an argument; the column `messages` is the row's prompt
RESERVED = tuple(name for name in (*PER_COMPLETION, *PER_CALL) if name != "messages")
Completion = str | Sequence[dict[str, str]]  # text, or a list of one message
END_OF_TRAINING = TrainerState(global_step=1, max_steps=1)


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of a reward function."""

    per_completion: dict[str, list]  # each list has one entry per completion
    per_call: dict[str, Any]
    texts: list[str]  # the completions as text, for error messages

    def only(self, i: int) -> Arguments:
        """Return the arguments for completion `i` alone. What the function logs is ignored."""
        rows = {name: [values[i]] for name, values in self.per_completion.items()}
        ignored = RewardLog(1)
        return Arguments(
            rows, {**self.per_call, "log_extra": ignored.log_extra, "log_metric": ignored.log_metric}, [self.texts[i]]
        )


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
    columns: Sequence[str],
    always_messages: bool,
) -> dict[str, list]:
    """Return the arguments that have one entry per completion.

    As in TRL, `prompts` and `completions` are lists of messages if the prompt's row is conversational (or if
    `always_messages`), otherwise texts.
    """
    messages = [list(p.example.messages) for p in prompts]  # the caller copies the arguments of each function
    is_chat = [always_messages or p.example.conversational for p in prompts]
    return {
        "prompts": [m if chat else m[-1]["content"] for m, chat in zip(messages, is_chat, strict=True)],
        "completions": [
            [{"role": "assistant", "content": text}] if chat else text
            for text, chat in zip(texts, is_chat, strict=True)
        ],
        "completion_ids": [list(row) for row in ids],
        "messages": messages,
        "ended": list(ended),
        **{name: [p.example.columns.get(name) for p in prompts] for name in columns},
    }


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
    """Return a completion as text: the argument `completions` contains texts, or lists of one message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]

"""Rewards as functions in TRL's reward-function signature, shared by PPO, GRPO and evaluation.

A reward function is called as `f(prompts=, completions=, completion_ids=, messages=, ended=, COLUMN=, ...)`: lists
with one entry per completion, a keyword for each column of the dataset. It returns one number per completion. It
receives copies, so nothing that it changes reaches the trainer or another function.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import inspect
import math
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from numbers import Rational, Real
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from reward_model.scorer import RewardModel, right_padded
from rlhf.data.chat_template import encode_prompt, encode_reply
from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt
from rlhf.utils.errors import RunError, UserError, did_you_mean, raise_if
from rlhf.utils.printing import printed_to

RewardFunction = Callable[..., Sequence[float]]
ARGUMENTS = ("prompts", "completions", "completion_ids", "messages", "ended")  # what every function receives
LARGEST = 1e9  # score, either way: squares of larger ones, summed over a batch, leave float32
# where code is that is not the user's own: the libraries', and this file, which calls it
LIBRARIES = (__file__, "<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


class BadScore(RunError):
    """A score that is not a finite number. Training drops the update; an evaluation ends the run."""


class LearnedReward:
    """A reward model's calibrated score of each reply."""

    __name__ = "reward_model"

    def __init__(self, model: RewardModel):
        self.model = model

    def __call__(self, completions: Sequence[str], *, messages, ended, **_) -> list[float]:
        return self.model.score(messages, completions, ended)


class ModuleReward:
    """An `nn.Module` as a reward function: it reads prompt and reply as ids and returns a score a row.

    Called as `module(input_ids=, attention_mask=)`, both (B, T), padded on the right; it gives (B,), (B, 1), or an
    object whose `logits` are. The ids are those of `module.tokenizer` where it has one, else the policy's.
    """

    def __init__(self, module: nn.Module, tokenizer: PreTrainedTokenizerBase):
        self.module = module.eval()
        self.tokenizer = getattr(module, "tokenizer", tokenizer)
        self.__name__ = type(module).__name__

    @torch.no_grad()
    def __call__(self, completions: Sequence[str], *, messages, ended, **_) -> list[float]:
        rows = [
            encode_prompt(self.tokenizer, m) + encode_reply(self.tokenizer, text, end)
            for m, text, end in zip(messages, completions, ended, strict=True)
        ]
        weights = next(self.module.parameters(), None)
        device = weights.device if weights is not None else torch.device("cpu")
        ids, attention = right_padded(rows, self.tokenizer.pad_token_id, device)
        output = self.module(input_ids=ids, attention_mask=attention)
        scores = getattr(output, "logits", output)
        return scores.float().reshape(len(rows), -1).squeeze(1).tolist()


# --- built-in rules --------------------------------------------------------------------------------------------------


def length_penalty(completion_ids: Sequence[Sequence[int]], **_) -> list[float]:
    """Minus the reply's tokens, EOS included: its weight is the price of a token."""
    return [-float(len(ids)) for ids in completion_ids]


def word_penalty(completions: Sequence[str], **_) -> list[float]:
    """Minus the reply's words: its weight is the price of a word."""
    return [-float(len(text.split())) for text in completions]


def keyword_bonus(keywords: Sequence[str]) -> RewardFunction:
    """1 for a reply that holds one of `keywords` (in any case), else 0."""
    wanted = [k.casefold() for k in keywords]

    def keyword_bonus(completions: Sequence[str], **_) -> list[float]:
        return [float(any(k in text.casefold() for k in wanted)) for text in completions]

    return keyword_bonus


def find_rule(name: str, keywords: Sequence[str]) -> RewardFunction | nn.Module:
    """A rule by its name: built in, or `FILE.py:NAME`, which runs that file. A class is called to make the rule.

    Raises UserError where there is none.
    """
    built_in = {
        "length_penalty": length_penalty,
        "word_penalty": word_penalty,
        "keyword_bonus": keyword_bonus(keywords),
    }
    if name in built_in:
        return built_in[name]
    path, colon, attribute = name.rpartition(":")
    if not colon:
        raise UserError(
            f"no such rule: --reward-func {name}. {did_you_mean(name, built_in)} "
            f"Write FILE.py:NAME, or one of {', '.join(built_in)}"
        )
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"no such file: --reward-func {name}. Write FILE.py:NAME")
    found = _load_file(file)
    if not hasattr(found, attribute):
        names = [n for n, value in vars(found).items() if callable(value)]
        raise UserError(f"no {attribute} in {path}: --reward-func {name}. {did_you_mean(attribute, names)}")
    rule = getattr(found, attribute)
    if inspect.isclass(rule):
        try:
            rule = rule()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's code may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{attribute}() failed ({reason}): --reward-func {name}. Give it a constructor without arguments"
            ) from None
    if not callable(rule):
        raise UserError(f"{attribute} in {path} cannot be called: --reward-func {name}. Name a function or a module")
    return rule


def _load_file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"reward_func_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    sys.path.insert(0, str(file.parent.resolve()))  # its own neighbours, as `python FILE.py` would find them
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() among them
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"the file cannot be run: --reward-func {file} ({reason}). Fix it") from None
    finally:
        sys.path.pop(0)
    return module


# --- scoring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """What replies are worth. Lists have an entry per reply."""

    total: list[float]  # the weighted sum
    by_function: dict[str, list[float]]  # before the weights


class Rewards:
    """Reward functions and their weights: one thing that training and evaluation ask for scores."""

    def __init__(
        self,
        functions: Sequence[RewardFunction | nn.Module],
        weights: Sequence[float] | None,
        tokenizer: PreTrainedTokenizerBase,
        limit_s: float | None = None,
    ):
        """`weights` has one per function; None: all 1. `tokenizer` is the policy's, for modules without their own.
        A function other than the reward model's may take `limit_s` seconds for a batch; None: as long as it likes.

        Raises UserError where there is no function, or not a weight for each.
        """
        if not functions or (weights is not None and len(weights) != len(functions)):
            raise UserError(
                f"{len(weights or [])} weights for {len(functions)} reward functions: rewards. One for each"
            )
        self.functions = [ModuleReward(f, tokenizer) if isinstance(f, nn.Module) else f for f in functions]
        self.weights = list(weights) if weights is not None else [1.0] * len(self.functions)
        self.limits_s = [None if isinstance(f, LearnedReward) else limit_s for f in self.functions]
        self.printed: Path | None = None  # where functions' output goes; None: the console
        self.names = _distinct([getattr(f, "__name__", type(f).__name__) for f in self.functions])

    def __str__(self) -> str:
        return " + ".join(f"{w:g} x {name}" for w, name in zip(self.weights, self.names, strict=True))

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[Sequence[int]], ended: Sequence[bool]
    ) -> Scores:
        """The scores of replies, given as texts and as ids with EOS.

        Raises RunError, with the function's name and the reply, where a function raises, hangs or gives a wrong count,
        and BadScore for a score that is no number to learn from: the optimizer must never see it. (TRL's GRPO sums NaN
        away.)
        """
        given = self.ask(prompts, texts, ids, ended)
        rows = zip(*given.values(), strict=True)
        return Scores([sum(w * s for w, s in zip(self.weights, row, strict=True)) for row in rows], given)

    def ask(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        ended: Sequence[bool],
        finite: bool = True,
    ) -> dict[str, list[float]]:
        """Each function's scores, before its weight. Raises as `score`; with `finite` False, not for numbers."""
        columns = self.columns_of(prompts)
        given = {
            "prompts": [p.example.messages[-1]["content"] for p in prompts],
            "completions": list(texts),
            "completion_ids": [list(row) for row in ids],
            "messages": [list(p.example.messages) for p in prompts],
            "ended": list(ended),
            **{name: [p.example.columns.get(name) for p in prompts] for name in columns},
        }
        asked = zip(self.functions, self.names, self.limits_s, strict=True)
        return {name: _ask(function, name, given, limit_s, finite, self.printed) for function, name, limit_s in asked}

    def columns_of(self, prompts: Sequence[Prompt]) -> list[str]:
        """The dataset's columns that these prompts have, and those that a function requires."""
        found = dict.fromkeys(name for p in prompts for name in p.example.columns)
        required = dict.fromkeys(name for function in self.functions for name in required_columns(function))
        return [name for name in (found | required) if name not in ARGUMENTS]


def required_columns(function: RewardFunction) -> list[str]:
    """The parameters without a default that only a dataset's column can fill."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        p.name for p in _parameters(function) if p.kind in kinds and p.default is p.empty and p.name not in ARGUMENTS
    ]


def check_columns(functions: Sequence[RewardFunction | nn.Module], examples: Sequence[Example], source: str) -> None:
    """Raise UserError if a reward function requires a column that no row of the data has."""
    there = dict.fromkeys(name for example in examples for name in example.columns)
    faults = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        if isinstance(function, nn.Module):
            continue  # it receives ids
        for column in required_columns(function):
            if column not in there:
                has = f"The data has {', '.join(map(repr, there))}" if there else "The data has no such columns"
                faults.append(
                    f"reward function {name} requires the column {column!r}, which the data lacks: {source}. {has}. "
                    "Add the column, or give the parameter a default"
                )
    raise_if(faults)


def _distinct(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}_{i + 1}" for i, name in enumerate(names)]


class _NoAnswer(Exception):
    """A function took longer than it may."""


def _ask(
    function: RewardFunction,
    name: str,
    batch: dict[str, list],
    limit_s: float | None,
    finite: bool,
    printed: Path | None = None,
) -> list[float]:
    """One function's scores; `printed` is the file for what it prints."""
    printed = None if limit_s is None else printed  # on the main thread it would hide the answer to Ctrl-C
    texts = batch["completions"]

    def fault(what: str, replies: str, way_out: str = "Fix it", kind: type[RunError] = RunError) -> RunError:
        return kind(f"{what}: reward function {name}, {replies}. {way_out}", inputs=batch)

    try:
        scores = _plain(_within(limit_s, partial(_call, function, batch, printed)))
    except (RunError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except _NoAnswer:
        replies = f"{len(texts)} replies, of which the first is {texts[0]!r:.60}"
        raise fault(f"no answer in {limit_s:g} s", replies, "Fix it, or raise --reward-timeout") from None
    except BaseException as error:  # the user's code may raise anything, SystemExit(0) too
        what = f"{_own_line(error)}{type(error).__name__}: {' '.join(str(error).split())}"
        raise fault(what, _offender(function, batch, limit_s, printed)) from error
    if not isinstance(scores, list) or len(scores) != len(texts):
        what = f"{len(texts)} replies, but it gave {scores!r:.60}"
        raise fault(what, f"first reply {texts[0]!r:.80}", "One number each")
    for score, text in zip(scores, texts, strict=True):
        if isinstance(score, Rational) and abs(score) > sys.float_info.max:
            raise fault("a number beyond the largest float is no score", f"reply {text!r:.80}")
        if not isinstance(score, Real) or (finite and not math.isfinite(score)):
            raise fault(f"score {score!r} is not a finite number", f"reply {text!r:.80}", kind=BadScore)
        if finite and abs(score) > LARGEST:
            what = f"score {score!r} is beyond {LARGEST:g}, too large to learn from"
            raise fault(what, f"reply {text!r:.80}", kind=BadScore)
    return [float(score) for score in scores]


def _plain(scores: Any) -> Any:
    """Numbers of numpy and torch as Python's."""
    scores = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(scores, Sequence):
        return [score.item() if hasattr(score, "item") else score for score in scores]
    return scores


def _copy(value: Any) -> Any:
    """A copy of one row's entry, which shares nothing with other rows; of what cannot be copied (an open file of a
    dataset's column), itself."""
    try:
        return copy.deepcopy(value)
    except Exception:  # a column may hold any object
        return value


def _call(function: RewardFunction, batch: dict[str, list], printed: Path | None = None) -> Any:
    with printed_to(printed, getattr(function, "__name__", type(function).__name__)):
        given = {name: [_copy(value) for value in values] for name, values in _accepted(function, batch).items()}
        scores = function(**given)
        return asyncio.run(scores) if inspect.isawaitable(scores) else scores


def _within(limit_s: float | None, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises. Raises _NoAnswer where that takes longer than `limit_s`.

    On a thread, since Windows has no alarm signal. A thread cannot be stopped: one that hangs is left behind, and ends
    with the process.
    """
    if limit_s is None:
        return call()
    answer: Future = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except KeyboardInterrupt as error:  # raised by the function: the user's Ctrl-C reaches the main thread alone
            answer.set_exception(RuntimeError(f"KeyboardInterrupt {error}".strip()))
        except BaseException as error:  # raised again below, on the thread that asked
            answer.set_exception(error)

    worker, deadline = threading.Thread(target=work, daemon=True), time.monotonic() + limit_s
    worker.start()
    while worker.is_alive() and (left := deadline - time.monotonic()) > 0:
        worker.join(min(left, 1.0))  # on Windows, Ctrl-C is not heard before a wait is over
    if not answer.done():
        raise _NoAnswer
    return answer.result()


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    """A function's parameters; of one that has no signature, as some built-in ones, `**kwargs`."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def _own_line(error: BaseException) -> str:
    """The user's own line on which it happened, the deepest there is: a library's says little."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} `{own[-1].line}` raised " if own else ""


def _accepted(function: RewardFunction, batch: dict[str, list]) -> dict[str, list]:
    """The arguments that a function names; all if it takes `**kwargs`, as TRL asks."""
    parameters = _parameters(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return batch
    return {name: values for name, values in batch.items() if name in {p.name for p in parameters}}


def _offender(function: RewardFunction, batch: dict[str, list], limit_s: float | None, printed: Path | None) -> str:
    """In words, the first reply on which a function raises by itself; or that it is none alone."""
    texts = batch["completions"]
    for i, text in enumerate(texts):
        try:
            one = {name: [values[i]] for name, values in batch.items()}
            _within(limit_s, partial(_call, function, one, printed))
        except KeyboardInterrupt:
            raise
        except BaseException:  # whatever a user's function raises: this is how the reply is found, and it is reported
            return f"reply {text!r:.80}"
    return f"on all {len(texts)} replies together, of which the first is {texts[0]!r:.60}"

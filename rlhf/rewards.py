"""Rewards as functions in TRL's reward-function signature, shared by PPO, GRPO and evaluation.

A reward function is called as `f(prompts=, completions=, completion_ids=, messages=, ended=)`, lists of one entry a
reply, and returns one number a reply.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from reward_model.scorer import RewardModel, right_padded
from rlhf.errors import RunError, UserError, did_you_mean
from rlhf.prompts import Prompt, encode_prompt, encode_reply

RewardFunction = Callable[..., Sequence[float]]


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
    built_in = {"length_penalty": length_penalty, "keyword_bonus": keyword_bonus(keywords)}
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
        except TypeError as error:
            raise UserError(f"{attribute} cannot be made without arguments: --reward-func {name} ({error})") from None
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
    except Exception as error:
        raise UserError(f"cannot be run: --reward-func {file} ({type(error).__name__}: {error}). Mend it") from None
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
    ):
        """`weights` has one per function; None: all 1. `tokenizer` is the policy's, for modules without their own.

        Raises UserError where there is no function, or not a weight for each.
        """
        if not functions or (weights is not None and len(weights) != len(functions)):
            raise UserError(
                f"{len(weights or [])} weights for {len(functions)} reward functions: rewards. One for each"
            )
        self.functions = [ModuleReward(f, tokenizer) if isinstance(f, nn.Module) else f for f in functions]
        self.weights = list(weights) if weights is not None else [1.0] * len(self.functions)
        self.names = _distinct([getattr(f, "__name__", type(f).__name__) for f in self.functions])

    def __str__(self) -> str:
        return " + ".join(f"{w:g} x {name}" for w, name in zip(self.weights, self.names, strict=True))

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[Sequence[int]], ended: Sequence[bool]
    ) -> Scores:
        """The scores of replies, given as texts and as ids with EOS.

        Raises RunError, with the function's name and the reply, where a function raises or gives a wrong count, and
        BadScore for a score that is not a finite number: the optimizer must never see it. (TRL's GRPO sums NaN away.)
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
        """What each function gives, before its weight. Raises as `score`; with `finite` False, not for numbers."""
        batch = {
            "prompts": [p.example.messages[-1]["content"] for p in prompts],
            "completions": list(texts),
            "completion_ids": [list(row) for row in ids],
            "messages": [list(p.example.messages) for p in prompts],
            "ended": list(ended),
        }
        return {name: _ask(f, name, batch, finite) for f, name in zip(self.functions, self.names, strict=True)}


def _distinct(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}_{i + 1}" for i, name in enumerate(names)]


def _ask(function: RewardFunction, name: str, batch: dict[str, list], finite: bool) -> list[float]:
    texts = batch["completions"]
    try:
        scores = function(**_accepted(function, batch))
        if inspect.isawaitable(scores):
            scores = asyncio.run(scores)
    except RunError:
        raise
    except Exception as error:  # a user's function: whatever it raises is told with the reply that did it
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno}): reward function {name}, "
            f"{_offender(function, batch)}. Mend it"
        ) from error
    scores = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(scores, Sequence):
        scores = [score.item() if hasattr(score, "item") else score for score in scores]
    if not isinstance(scores, list) or len(scores) != len(texts):
        raise RunError(
            f"{len(texts)} replies, but it gave {scores!r:.60}: reward function {name}, first reply "
            f"{texts[0]!r:.80}. One number each"
        )
    for score, text in zip(scores, texts, strict=True):
        if not isinstance(score, Real) or (finite and not math.isfinite(score)):
            raise BadScore(
                f"score {score!r} is not a finite number: reward function {name}, reply {text!r:.80}. Mend it"
            )
    return [float(score) for score in scores]


def _accepted(function: RewardFunction, batch: dict[str, list]) -> dict[str, list]:
    """The arguments that a function names; all where it takes `**kwargs`, as TRL asks."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return batch
    return {name: values for name, values in batch.items() if name in {p.name for p in parameters}}


def _offender(function: RewardFunction, batch: dict[str, list]) -> str:
    """In words, the first reply on which a function raises by itself; or that it is none alone."""
    texts = batch["completions"]
    for i, text in enumerate(texts):
        try:
            function(**_accepted(function, {name: [values[i]] for name, values in batch.items()}))
        except Exception:  # whatever a user's function raises: this is how the reply is found, and it is told
            return f"reply {text!r:.80}"
    return f"on all {len(texts)} replies together, of which the first is {texts[0]!r:.60}"

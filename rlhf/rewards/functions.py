"""Reward functions: the built-in ones, a reward model, an nn.Module, and functions in a user's file.

A reward function has TRL's signature. It is called as `f(prompts=, completions=, completion_ids=, messages=, ended=,
COLUMN=, ..., trainer_state=, log_extra=, log_metric=)`: lists with one entry per completion, with a keyword for each
column of the dataset, and three arguments per call. It returns one number per completion, or None for a completion to
which it does not apply. It receives copies, so nothing that it changes reaches the trainer or another function.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import encode_completion, encode_prompt
from rlhf.rewards.arguments import text_of
from rlhf.rewards.eval_functions import exact_match
from rlhf.rewards.reward_model import RewardModel, right_padded
from rlhf.utils.errors import UserError, did_you_mean

RewardFunction = Callable[..., Sequence[float | None]]


class LearnedReward:
    """A reward model as a reward function: one calibrated score per completion."""

    __name__ = "reward_model"

    def __init__(self, model: RewardModel):
        self.model = model

    def __call__(self, completions: Sequence[str], *, messages, ended, **_) -> list[float]:
        return self.model.score(messages, [text_of(c) for c in completions], ended)


class ModuleReward:
    """An `nn.Module` as a reward function: it receives prompt and completion as ids and returns one score per row.

    Called as `module(input_ids=, attention_mask=)`, both (B, T), padded on the right. It returns (B,) or (B, 1), or an
    object with `logits` of this shape. Encodes with `module.tokenizer` if it exists, otherwise with the policy's
    tokenizer.
    """

    def __init__(self, module: nn.Module, tokenizer: PreTrainedTokenizerBase):
        self.module = module.eval()
        self.tokenizer = getattr(module, "tokenizer", tokenizer)
        self.__name__ = type(module).__name__

    @torch.no_grad()
    def __call__(self, completions: Sequence[str], *, messages, ended, **_) -> list[float]:
        rows = [
            encode_prompt(self.tokenizer, m) + encode_completion(self.tokenizer, text_of(completion), end)
            for m, completion, end in zip(messages, completions, ended, strict=True)
        ]
        weights = next(self.module.parameters(), None)
        device = weights.device if weights is not None else torch.device("cpu")
        ids, attention = right_padded(rows, self.tokenizer.pad_token_id, device)
        output = self.module(input_ids=ids, attention_mask=attention)
        scores = getattr(output, "logits", output)
        return scores.float().reshape(len(rows), -1).squeeze(1).tolist()


def length_penalty(completion_ids: Sequence[Sequence[int]], **_) -> list[float]:
    """Return minus the number of tokens of each completion, EOS included. The weight is the price per token."""
    return [-float(len(ids)) for ids in completion_ids]


def word_penalty(completions: Sequence[str], **_) -> list[float]:
    """Return minus the number of words of each completion. The weight is the price per word."""
    return [-float(len(text_of(completion).split())) for completion in completions]


def keyword_bonus(keywords: Sequence[str]) -> RewardFunction:
    """Return a reward function: 1 for a completion that contains one of `keywords` (ignoring case), otherwise 0."""
    wanted = [k.casefold() for k in keywords]

    def keyword_bonus(completions: Sequence[str], **_) -> list[float]:
        return [float(any(k in text_of(completion).casefold() for k in wanted)) for completion in completions]

    return keyword_bonus


def find_rule(name: str, keywords: Sequence[str], flag: str = "--reward-func") -> RewardFunction | nn.Module:
    """Return a reward function by name: a built-in one, or `FILE.py:NAME`, which runs that file. `flag` is the setting
    in error messages.

    If NAME is a class, it is instantiated without arguments. Raises UserError if there is no such function.
    """
    built_in = {
        "length_penalty": length_penalty,
        "word_penalty": word_penalty,
        "keyword_bonus": keyword_bonus(keywords),
        "exact_match": exact_match,
    }
    if name in built_in:
        return built_in[name]
    path, colon, attribute = name.rpartition(":")
    if not colon:
        wanted = _of_file(Path(name).expanduser()) or (
            f"{did_you_mean(name, built_in)}Write FILE.py:NAME or one of {', '.join(built_in)}"
        )
        raise UserError(f"no such reward function: {flag} {name}. {wanted}")
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"no such file: {flag} {name}. Write FILE.py:NAME")
    found = _load_file(file, flag)
    if not hasattr(found, attribute):
        names = [n for n, value in vars(found).items() if callable(value)]
        nearest = did_you_mean(attribute, names, f"The file defines {', '.join(names) or 'no functions'}")
        raise UserError(f"no {attribute!r} in {path!r}: {flag} {name}. {nearest}")
    rule = getattr(found, attribute)
    if inspect.isclass(rule):
        try:
            rule = rule()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's code may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{attribute}() failed ({reason}): {flag} {name}. Give it a constructor without arguments"
            ) from None
    if not callable(rule):
        raise UserError(f"{attribute!r} in {path!r} is not callable: {flag} {name}. Name a function or a class")
    return rule


def _of_file(file: Path) -> str | None:
    """Return how to select one of the functions of a Python file, without executing it. None if it has none or cannot
    be read."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return None
    names = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return f"Add the name of a function: {', '.join(f'{file}:{name}' for name in names)}" if names else None


def _load_file(file: Path, flag: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"reward_func_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    sys.path.insert(0, str(file.parent.resolve()))  # so that it can import files next to it, as `python FILE.py` can
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes sys.exit()
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"the file fails on import: {flag} {file} ({reason}). Fix the file") from None
    finally:
        sys.path.pop(0)
    return module

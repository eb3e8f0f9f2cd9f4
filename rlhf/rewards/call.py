"""Calls reward functions: copied inputs, a time limit, and errors that name the function."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from decimal import Decimal
from functools import partial
from numbers import Rational, Real
from pathlib import Path
from typing import Any

import torch

from rlhf.rewards.arguments import Arguments, parameters_of
from rlhf.rewards.functions import RewardFunction
from rlhf.utils.errors import RunError
from rlhf.utils.time_limit import TimeLimitExceeded, event_loop, time_limit
from rlhf.utils.user_code import user_code

MAX_ABS_SCORE = 1e9  # the sum of squares of a batch of larger scores overflows float32
# paths of code that is not the user's
PACKAGE = str(Path(__file__).parents[1])
LIBRARIES = (PACKAGE, "<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


CHATS = "The rows have messages, so a completion is a list of messages: its text is completion[0]['content']"


class TakesText(RunError):
    """A reward function takes a completion of a chat, which is a list of messages, for a text."""


class BadScore(RunError):
    """A score that is not finite or too large. Training skips the update; an evaluation ends the run."""


def call_function(
    function: RewardFunction,
    who: str,
    arguments: Arguments,
    limit_s: float | None,
) -> list[float | list[float] | None]:
    """Return one score per completion; for turn and token scores the amount that is paid at each token. None: the
    function does not apply to the completion.

    Raises RunError if the function fails, BadScore for an unusable score. `who` describes the function in these
    errors. `limit_s` is the time limit in seconds (None: no limit).
    """
    texts = arguments.texts
    given = arguments.per_completion["completions"]
    these = f"{len(texts)} completions, the first is {given[0]!r:.60}"

    def failure(what: str, which: str, hint: str = "Fix the function", kind: type[RunError] = RunError) -> RunError:
        return kind(what, f"{who}, {which}", hint, inputs=arguments.per_completion)

    try:
        with time_limit(limit_s) as within:
            scores = within(partial(_call, function, who, arguments))
    except (RunError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except TimeLimitExceeded:
        hint = "Make it faster, or train with a larger --reward-timeout"
        raise failure(f"no result after {limit_s:g} s", these, hint) from None
    except BaseException as error:  # the user's code may raise anything, SystemExit(0) too
        what = described(error)
        of_list = isinstance(error, AttributeError | TypeError) and re.search(r"\b(list|dict)\b", str(error))
        if of_list and not isinstance(given[0], str):
            raise failure(what, these, CHATS, TakesText) from error
        raise failure(what, these) from error
    if not isinstance(scores, list) or len(scores) != len(texts):
        got = f"{len(scores)}: {scores!r:.60}" if isinstance(scores, list) else f"{scores!r:.60}, which is not a list"
        what = f"expected {len(texts)} scores, got {got}"
        raise failure(what, f"first completion {texts[0]!r:.80}", "Return one number (or None) per completion")
    ids = arguments.per_completion["completion_ids"]
    return [
        _checked(score, len(row), spans, partial(failure, which=f"completion {text!r:.80}"))
        for score, text, row, spans in zip(scores, texts, ids, arguments.spans, strict=True)
    ]


def _checked(score: Any, tokens: int, spans: Sequence[range], failure: Callable[..., RunError]) -> Any:
    """Return a completion's score as `call_function` does. Raises `failure` if it cannot be used."""
    if score is None:
        return None
    kind = next(iter(score)) if isinstance(score, dict) and len(score) == 1 else None
    places = {"turn_scores": [span.stop - 1 for span in spans], "token_scores": range(tokens)}.get(kind)
    values = [score] if places is None else score[kind]
    if places is not None and (not isinstance(values, list) or len(values) != len(places)):
        raise failure(f"{kind} {values!r:.60} is not a list of {len(places)} numbers")
    for value in values:
        problem, error = score_problem(value)
        if problem is not None:
            raise failure(problem, kind=error)
    if places is None:
        return float(score)
    paid = dict(zip(places, map(float, values), strict=True))
    if any(value and not any(place in span for span in spans) for place, value in paid.items()):
        raise failure("a score other than 0 at a token that the policy did not sample")
    return [paid.get(place, 0.0) for place in range(tokens)]


def score_problem(score: Any) -> tuple[str | None, type[RunError]]:
    """Return what is wrong with a score (None: nothing), and the type of the error."""
    if isinstance(score, Rational) and abs(score) > sys.float_info.max:
        return "a score is larger than the largest float", RunError
    # detail 15: NaN skips the update (this project). Replaced or ignored, it would hide an error in the function.
    if not isinstance(score, Real):
        return f"score {score!r:.60} is not a number", BadScore
    if not math.isfinite(score):
        none = " (None means that the function does not apply)" if score != score else ""
        return f"score {score!r} is not a finite number{none}", BadScore
    if abs(score) > MAX_ABS_SCORE:
        return f"score {score!r} is too large (the limit is {MAX_ABS_SCORE:g})", BadScore
    return None, RunError


def _plain_scores(scores: Any) -> Any:
    """Convert NumPy and torch numbers to Python numbers, and any iterable to a list. Text, mappings and sets, whose
    order means nothing, are returned as they are."""
    scores = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(scores, Iterable) and not isinstance(scores, (str, bytes, Mapping, Set)):
        return [_plain_score(score) for score in scores]
    return scores


def _plain_score(score: Any) -> Any:
    if isinstance(score, Mapping):
        return {kind: _plain_scores(values) for kind, values in score.items()}
    if isinstance(score, Decimal):
        return float(score)
    return score.item() if hasattr(score, "item") else score


def copied(value: Any) -> Any:
    """Return a deep copy of one row's entry, or the entry itself if it cannot be copied (for example an open file)."""
    try:
        return copy.deepcopy(value)
    except Exception:  # a column may hold any object
        return value


def _call(function: RewardFunction, who: str, arguments: Arguments) -> Any:
    update = arguments.per_call["trainer_state"].global_step
    # within an update, evaluation, dynamic sampling and other processes call the function with other completions
    with user_code(update, who, arguments.texts):
        rows = accepted(function, arguments.per_completion).items()
        given = {name: values if name == "environments" else list(map(copied, values)) for name, values in rows}
        scores = function(**given, **accepted(function, arguments.per_call))
        return _plain_scores(event_loop().run_until_complete(scores) if inspect.isawaitable(scores) else scores)


def described(error: BaseException) -> str:
    """Return an error of the user's code as text: the deepest line of that code in the traceback, if there is one, the
    type and the message."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]
    line = f"{Path(own[-1].filename).name}:{own[-1].lineno} `{own[-1].line}` raised " if own else ""
    message = " ".join(str(error).split())
    return f"{line}{type(error).__name__}" + (f": {message}" if message else "")


def accepted(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function accepts: those in its signature, or all if it takes `**kwargs`."""
    parameters = parameters_of(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {name: value for name, value in arguments.items() if name in {p.name for p in parameters}}

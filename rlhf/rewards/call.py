"""Call a user's reward function safely: copies, a time limit, and errors that name the completion."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from numbers import Rational, Real
from pathlib import Path
from typing import Any

import torch

from rlhf.rewards.functions import RewardFunction
from rlhf.rewards.printing import printed_to
from rlhf.utils.errors import RunError

LARGEST = 1e9  # score, either way: squares of larger ones, summed over a batch, leave float32
# paths of code that the user did not write: the files here that call a function, and the libraries
CALLERS = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("call", "functions", "rewards"))
LIBRARIES = (*CALLERS, "<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


class BadScore(RunError):
    """A score that is not a finite number. Training drops the update; an evaluation ends the run."""


class _NoAnswer(Exception):
    """A function took longer than it may."""


def call_function(
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

    def fault(what: str, completions: str, hint: str = "Fix it", kind: type[RunError] = RunError) -> RunError:
        return kind(f"{what}: reward function {name}, {completions}. {hint}", inputs=batch)

    try:
        scores = _plain(_within(limit_s, partial(_call, function, batch, printed)))
    except (RunError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except _NoAnswer:
        completions = f"{len(texts)} replies, of which the first is {texts[0]!r:.60}"
        raise fault(f"no answer in {limit_s:g} s", completions, "Fix it, or raise --reward-timeout") from None
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


def parameters_of(function: RewardFunction) -> list[inspect.Parameter]:
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
    parameters = parameters_of(function)
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

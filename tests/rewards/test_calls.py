"""Tests how reward functions are called: main thread, time limit, one event loop, one module per file."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from functools import partial

import pytest

from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.rewards.call import BadScore
from rlhf.rewards.find import find_rule
from rlhf.rewards.rewards import Rewards
from rlhf.utils import time_limit
from rlhf.utils.errors import RunError

ROWS = [Prompt((1,), Example(({"role": "user", "content": "2 + 2?"},)))] * 2
COMPLETIONS = (["4", "5"], [[5, 2], [5, 6, 7]], [True, False])
on_posix = pytest.mark.skipif(time_limit.LIMIT_SIGNAL is None, reason="this system has no pthread_kill")


def score(*functions, limit_s=20.0):
    return Rewards(functions, None, None, limit_s).score(ROWS, *COMPLETIONS).total


@on_posix
def test_functions_may_use_signals_and_objects_of_the_main_thread():
    database = sqlite3.connect(":memory:")

    def checker(completions, **_):
        before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)  # as math-verify and code checkers do
        try:
            return [database.execute("select ?", (float(text),)).fetchone()[0] for text in completions]
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    assert score(checker) == [4.0, 5.0]


def hang(completions, **_):
    while True:
        try:
            time.sleep(30)
        except Exception:  # must not catch the limit
            return [0.0] * len(completions)


def spin(completions, **_):
    while True:
        len(completions)


@pytest.mark.parametrize("function", [hang, spin])
def test_function_that_hangs_is_stopped(function, user_error):
    start = time.monotonic()
    with user_error(0.2, function.__name__, kind=RunError):
        score(function, limit_s=0.2)
    assert time.monotonic() - start < 10
    assert not any(thread.name.startswith("watch") for thread in threading.enumerate())
    assert score(lambda completions: [1.0, 2.0], limit_s=20.0) == [1.0, 2.0], "later calls are not affected"


def test_function_on_another_thread_has_a_limit_too():
    caught = []

    def call():
        try:
            score(lambda completions: time.sleep(5), limit_s=0.2)
        except RunError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert caught and caught[0].startswith("no result after 0.2 s")


def test_async_functions_share_one_event_loop():
    lock = asyncio.Lock()

    async def judge(completions, **_):
        async def one(text):
            async with lock:
                await asyncio.sleep(0)
                return float(text)

        return await asyncio.gather(*[one(text) for text in completions])

    assert score(judge) == score(judge) == [4.0, 5.0]


@pytest.mark.parametrize("make", [iter, tuple, lambda scores: (s for s in scores), partial(map, float),
                                  partial(map, Decimal), partial(map, Fraction)])  # fmt: skip
def test_any_iterable_of_numbers_is_accepted(make):
    assert score(lambda completions, **_: make([1, 2])) == [1.0, 2.0]


@pytest.mark.parametrize(
    "value", [[0.5], {"score": 0.5}, "0.5", 1j, Decimal("nan"), Decimal("1e400"), Decimal("sNaN")]
)
def test_a_score_that_is_no_number_has_another_reason_than_one_that_is_not_finite(value):
    with pytest.raises(RunError) as caught:
        score(lambda completions, **_: [value] * len(completions))
    (problem,) = caught.value.problems
    assert ("finite" in problem.what) == (str(value) in ("NaN", "1E+400"))
    assert isinstance(caught.value, BadScore) != (str(value) == "sNaN"), "converting it fails in the function's call"


def test_file_is_executed_once_and_may_import_its_neighbours_later(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_rules.py").write_text("VALUE = 3.0\n")
    (tmp_path / "rules.py").write_text(
        "calls = []\n"
        "def first(completions, **_):\n"
        "    calls.append(1)\n"
        "    return [float(len(calls))] * len(completions)\n"
        "def second(completions, **_):\n"
        "    from neighbour_of_rules import VALUE\n"
        "    return [VALUE + len(calls)] * len(completions)\n"
    )
    first, second = (find_rule(f"{tmp_path}/rules.py:{name}") for name in ("first", "second"))
    assert score(first, second) == [5.0, 5.0]
    (tmp_path / "rules.py").write_text("def first(completions, **_):\n    return [0.0] * len(completions)\n")
    assert score(find_rule(f"{tmp_path}/rules.py:first")) == [0.0, 0.0], "a changed file is executed again"

"""Tests how methods of environments are called: one after the other, each with its own limit, seed and settings."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from rlhf.environments.calls import Failure, call_all
from rlhf.utils import time_limit
from tests.rewards.test_user_code import change, drawn, unchanged

on_posix = pytest.mark.skipif(time_limit.LIMIT_SIGNAL is None, reason="this system has no pthread_kill")


def keyed(*calls):
    return [((number,), call) for number, call in enumerate(calls)]


def hang():
    time.sleep(30)


def spin():
    while True:
        pass


def stubborn():
    """Catches the limit once."""
    try:
        time.sleep(30)
    except BaseException:
        time.sleep(30)


@on_posix
def test_the_calls_of_a_turn_share_one_thread_and_one_saved_state(monkeypatch):
    """To start a thread and to save NumPy's state take most of the time of a short call."""
    started = []
    saved = []
    start = threading.Thread.start
    save = np.random.get_state
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
    monkeypatch.setattr(np.random, "get_state", lambda: (saved.append(1), save())[1])
    assert call_all(keyed(*[lambda: 1] * 20), 20.0) == [1] * 20
    assert len(started) == len(saved) == 1
    assert not started[0].is_alive()


def on_a_thread(work):
    """Call on a thread, as in a notebook, where each call is made on a new thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("where", [pytest.param(lambda work: work(), id="main", marks=on_posix), on_a_thread])
def test_each_call_has_its_own_limit(where):
    short = partial(time.sleep, 0.2)
    began = time.monotonic()
    found = where(lambda: call_all(keyed(short, short, hang, short, hang, short), 0.5))
    assert time.monotonic() - began < 10
    assert [isinstance(one, Failure) for one in found] == [False, False, True, False, True, False]
    assert "0.5 s" in found[2] and "TimeoutError" in found[2]


@on_posix
@pytest.mark.parametrize("call", [pytest.param(spin, marks=pytest.mark.ci), stubborn])
def test_a_call_is_interrupted_until_it_ends_and_the_next_one_is_not(call):
    began = time.monotonic()
    failed, *others = call_all(keyed(call, partial(time.sleep, 0.2), lambda: 3), 0.4)
    assert time.monotonic() - began < 10
    assert isinstance(failed, Failure) and others == [None, 3]
    time.sleep(1.2)  # no signal follows


def test_whatever_a_call_raises_is_its_failure_alone():
    def raises(error):
        raise error

    errors = [ValueError("by hand"), GeneratorExit(), StopIteration(), SystemExit(0), TimeoutError("own")]
    found = call_all(keyed(*(partial(raises, error) for error in errors), lambda: 1), 20.0)
    assert found[-1] == 1
    assert [type(error).__name__ in one for error, one in zip(errors, found[:-1], strict=True)] == [True] * 5
    assert "test_calls.py" in found[0] and found[0].message == "by hand"
    with pytest.raises(KeyboardInterrupt):
        call_all(keyed(partial(raises, KeyboardInterrupt())), 20.0)


@pytest.mark.parametrize("limit_s", [None, 20.0])
def test_a_call_leaves_settings_and_random_numbers_to_the_next_one_and_to_the_run(limit_s):
    def settings():
        return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()

    async def later():
        numbers = drawn()
        change()
        return numbers

    with unchanged():
        _, first, second, same, together = call_all(
            [*keyed(change, drawn), ((2,), lambda: (drawn(), settings())), ((1,), drawn), ((4,), later)], limit_s
        )
        assert second[1] == settings()
    assert len({*first, *second[0]}) == 6 and same == first
    assert len({*first, *together}) == 6
    random.random()
    assert call_all([((1,), drawn)], limit_s) == [first]

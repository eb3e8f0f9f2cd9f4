"""Calls methods of environments: with a time limit, with repeatable random numbers, and coroutines together."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import torch

from rlhf.rewards.call import described
from rlhf.utils.time_limit import TimeLimitExceeded, Within, event_loop, time_limit
from rlhf.utils.user_code import random_states_restored, seed_all, settings_restored

GRACE_S = 5.0  # after the time limit of coroutines, until code that blocks their event loop is interrupted


class Failure(str):
    """What a call raised, as text, in place of its result: the line of the user's code, the type and the message."""

    message: str = ""  # only the message


Call = tuple[tuple, Callable[[], Any]]  # what its random numbers depend on, and the call


@random_states_restored()
def call_all(calls: Sequence[Call], limit_s: float | None) -> list[Any]:
    """Return what each call returns, or the Failure. Calls are made one after the other; the coroutines that some
    return then run together. Each call has `limit_s` seconds (None: no limit)."""
    with time_limit(limit_s) as within:
        found = [_attempt(within, key, call, limit_s) for key, call in calls]
    rows = [row for row, result in enumerate(found) if inspect.iscoroutine(result)]
    if not rows:
        return found
    keys = tuple(calls[row][0] for row in rows)
    together = partial(_run, [found[row] for row in rows], limit_s)
    interrupted_s = None if limit_s is None else limit_s + GRACE_S
    with time_limit(interrupted_s) as within:
        results = _attempt(within, keys, together, limit_s)
    for number, row in enumerate(rows):
        found[row] = results if isinstance(results, Failure) else results[number]
    return found


def _run(coroutines: Sequence[Coroutine], limit_s: float | None) -> list[Any]:
    async def limited(coroutine: Coroutine) -> Any:
        task = asyncio.ensure_future(coroutine)
        done, _ = await asyncio.wait([task], timeout=limit_s)
        if not done:  # wait_for would raise TimeoutError, as the coroutine itself may
            task.cancel()
            raise TimeLimitExceeded
        return task.result()

    async def together() -> list[Any]:
        return await asyncio.gather(*map(limited, coroutines), return_exceptions=True)

    results = event_loop().run_until_complete(together())
    return [_failure(one, limit_s) if isinstance(one, BaseException) else one for one in results]


def _attempt(within: Within, key: tuple, call: Callable[[], Any], limit_s: float | None) -> Any:
    def seeded() -> Any:
        with settings_restored():
            seed_all(key)
            return call()

    try:
        return within(seeded)
    except (KeyboardInterrupt, torch.OutOfMemoryError):
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        return _failure(error, limit_s)


def _failure(error: BaseException, limit_s: float | None) -> Failure:
    if isinstance(error, TimeLimitExceeded):
        error = TimeoutError(f"no result after {limit_s:g} s")
    failure = Failure(described(error))
    failure.message = str(error)
    return failure

"""Time limits for calls of user code such as reward functions, and the event loop of those that are `async`."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import inf
from typing import Any

# sent to the main thread if the limit is exceeded; SIGALRM belongs to the functions
LIMIT_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGUSR2", None)
REPEAT_S = 1.0  # the signal is sent again, because a function may catch what it raises
Within = Callable[[Callable[[], Any]], Any]  # makes a call and returns its result
_loop: asyncio.AbstractEventLoop | None = None


class TimeLimitExceeded(BaseException):
    """A call exceeded its time limit. No Exception, so that functions do not catch it by mistake."""


def time_limit(limit_s: float | None) -> AbstractContextManager[Within]:
    """Return a context manager that gives a function, which makes calls one after the other: it returns or raises what
    a call does, and raises TimeLimitExceeded after `limit_s` seconds of the call (None: no limit).

    The calls are made on the main thread, as in TRL: functions may use signals (such as math-verify's own time limits)
    and objects that belong to a thread. Exceptions: on Windows, on other threads and in notebooks, whose main thread
    runs an event loop, each is made on a new thread.
    """
    if limit_s is None:
        return nullcontext(lambda call: call())
    on_main = threading.current_thread() is threading.main_thread()
    if LIMIT_SIGNAL is None or not on_main or _is_in_event_loop():
        return nullcontext(partial(_on_a_thread, limit_s))
    return _watched(limit_s)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _watched(limit_s: float) -> Iterator[Within]:
    """`time_limit` on the main thread. One thread watches all calls: to start one takes longer than many a call."""
    closed = threading.Event()
    deadline = inf  # of the present call

    def within(call: Callable[[], Any]) -> Any:
        nonlocal deadline
        try:
            try:
                deadline = time.monotonic() + limit_s
                return call()
            finally:
                deadline = inf
        finally:  # also if the signal arrives between the call and the line above
            deadline = inf

    def interrupt(*_: Any) -> None:
        if time.monotonic() >= deadline:  # otherwise the call of this signal has ended
            raise TimeLimitExceeded

    def watch() -> None:
        wait = limit_s
        while not closed.wait(wait):
            wait = min(limit_s, deadline - time.monotonic())  # a call that begins now has `limit_s`
            if wait <= 0:
                signal.pthread_kill(threading.main_thread().ident, LIMIT_SIGNAL)  # interrupts system calls, too
                wait = REPEAT_S

    watcher = threading.Thread(target=watch, daemon=True)
    before = signal.signal(LIMIT_SIGNAL, interrupt)
    watcher.start()
    try:
        yield within
    finally:
        closed.set()
        watcher.join()
        signal.signal(LIMIT_SIGNAL, before)


def _on_a_thread(limit_s: float, call: Callable[[], Any]) -> Any:
    """A thread cannot be stopped: one that hangs keeps running until the process ends."""
    result: Future = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except KeyboardInterrupt as error:  # raised by the function: Ctrl-C interrupts only the main thread
            result.set_exception(RuntimeError(f"KeyboardInterrupt {error}".strip()))
        except BaseException as error:  # raised again below, on the calling thread
            result.set_exception(error)

    worker = threading.Thread(target=work, daemon=True)
    deadline = time.monotonic() + limit_s
    worker.start()
    while worker.is_alive() and (left := deadline - time.monotonic()) > 0:
        worker.join(min(left, 1.0))  # on Windows, Ctrl-C is handled only after a wait ends
    if not result.done():
        raise TimeLimitExceeded
    return result.result()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all `async` functions: locks and connections belong to one loop. A new one if the loop
    is closed, or in use by a function that exceeded its limit."""
    global _loop
    if _loop is None or _loop.is_closed() or _loop.is_running():
        _loop = asyncio.new_event_loop()
    return _loop

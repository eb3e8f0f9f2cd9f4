"""Tests which signals stop a run, what a second signal does, and that forked processes keep their own behaviour."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from rlhf.utils import signals
from rlhf.utils.errors import run_command
from rlhf.utils.signals import GracefulStop
from rlhf.utils.system import WINDOWS, stop_signals

pytestmark = pytest.mark.skipif(WINDOWS, reason="Windows has neither SIGHUP nor SIGUSR1, and no fork")
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


@pytest.fixture
def clock(monkeypatch):
    """Return a list with the monotonic time, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def handled():
    """Return a function that sets the handler of a signal for one test."""
    before = {}

    def handle(number: int, handler) -> None:
        before.setdefault(number, signal.signal(number, handler))

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def default_hangup(handled):
    """The tests may run under nohup, which ignores SIGHUP."""
    handled(signal.SIGHUP, signal.SIG_DFL)


def quiet_stop() -> GracefulStop:
    return GracefulStop(say=lambda _: None)


def send(name: str) -> None:
    """Send a signal to this process, which would end it if nothing handled it."""
    which = signal.Signals[name]
    assert signal.getsignal(which) is not signal.SIG_DFL
    os.kill(os.getpid(), which)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_signal_is_stored_and_the_handler_is_restored(name):
    which = signal.Signals[name]
    before = signal.getsignal(which)
    with quiet_stop() as stop:
        send(name)
        assert stop.by == which
    assert signal.getsignal(which) == before


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1"])
def test_a_signal_that_is_ignored_or_has_a_handler_is_left_alone(handled, name):
    """`nohup` starts a program with an ignored SIGHUP; submitit handles SIGUSR1 in the program that trains."""
    which = signal.Signals[name]
    received = []
    for handler in (signal.SIG_IGN, lambda number, _: received.append(number)):
        handled(which, handler)
        assert which not in stop_signals()
        with quiet_stop() as stop:
            os.kill(os.getpid(), which)
            assert stop.by is None
        assert signal.getsignal(which) == handler
    assert received == [which]


def test_an_ignored_ctrl_c_stops_a_run_too(handled):
    """A shell script starts its background commands with an ignored SIGINT."""
    handled(signal.SIGINT, signal.SIG_IGN)
    with quiet_stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.by == signal.SIGINT


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", NAMES)
def test_the_exit_status_after_two_signals_is_that_of_the_second(first, second, clock, capsys):
    def main() -> None:
        with quiet_stop():
            send(first)
            clock[0] += 10
            send(second)
            pytest.fail("the second signal did not stop the run")

    with pytest.raises(SystemExit) as ended:
        run_command(main, "a line")
    assert ended.value.code == 128 + signal.Signals[second]
    assert capsys.readouterr().err == "a line\n"


def test_only_ctrl_c_counts_twice_within_a_second(clock):
    """`timeout` sends SIGTERM to its program, and then to the process group. A shell and the system send SIGHUP."""
    for name in NAMES[1:]:
        with quiet_stop() as stop:
            send(name)
            try:
                send(name)
            except KeyboardInterrupt:
                pytest.fail(f"the second {name} stopped the run")
            assert stop.by == signal.Signals[name]
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_forked_process_can_be_ended(name):
    """A reward function ends its own processes: Process.terminate sends SIGTERM."""
    which = signal.Signals[name]
    with quiet_stop() as stop:
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        process = context.Process(target=lambda: (ready.set(), time.sleep(60)))
        process.start()
        assert ready.wait(20)  # Python drops signals that arrive while it forks
        os.kill(process.pid, which)
        process.join(20)
        status = process.exitcode
        process.kill()
        assert (status, stop.by) == (-which, None)

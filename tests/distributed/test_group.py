"""Tests of what a process does without others: errors that can be sent, signals of launchers, acting alone."""

from __future__ import annotations

import errno
import pickle
import signal
import subprocess
import sys

import pytest

from rlhf.distributed import group
from rlhf.rewards.call import BadScore
from rlhf.utils import errors, processes, signals
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.signals import GracefulStop, TrainingInterrupted
from rlhf.utils.system import WINDOWS
from tests.documents import ROOT


@pytest.mark.parametrize(
    "error",
    [
        UserError(["one", "two", "three"]),
        RunError("one", inputs={"prompts": [1]}),
        BadScore("a score"),
        TrainingInterrupted(signal.SIGINT, "stopped"),
        OSError(errno.ENOSPC, "No space left on device", "a"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_sent(error):
    again = pickle.loads(pickle.dumps(group._portable(error)))
    assert type(again) is type(error) and str(again) == str(error)
    if isinstance(error, UserError):
        assert (again.problems, again.exit_status) == (error.problems, error.exit_status)
        assert getattr(again, "inputs", None) == getattr(error, "inputs", None)


def test_error_that_cannot_be_sent_becomes_one_line():
    class Local(Exception):
        pass

    sent = group._portable(Local("first\nsecond"))
    assert isinstance(sent, RunError) and "Local (first): process 0 of 1" in str(sent)


def test_one_process_exchanges_nothing():
    assert group.gather(3) == [3] and group.from_first(lambda: 4) == 4 and group.largest(2.0) == 2.0
    with pytest.raises(ValueError, match="a test"):
        group.agree(lambda: int("a test"))
    group.require_equal({"x": 1}, "fix")


def test_alone_hides_the_others(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    assert (processes.size(), processes.rank(), processes.is_first()) == (4, 2, False)
    assert processes.process_prefix() == "process 2 of 4: "
    with processes.alone():
        assert (processes.size(), processes.rank(), processes.is_first()) == (1, 0, True)
    assert processes.size() == 4


@pytest.mark.parametrize("several", [False, True])
def test_launchers_repeat_signals_and_only_a_later_ctrl_c_stops_at_once(monkeypatch, several):
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    stop = GracefulStop(say=lambda _: None)
    stop.several = several
    stop._on_signal(signal.SIGINT, None)
    assert stop.by == signal.SIGINT
    if several:
        stop._on_signal(signal.SIGINT, None)
        stop._on_signal(signal.SIGTERM, None)
        now[0] += signals.LAUNCHER_S + 1
        stop._on_signal(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        stop._on_signal(signal.SIGINT, None)


def test_another_process_than_the_first_prints_only_its_own_errors(monkeypatch, capsys):
    monkeypatch.setattr(errors, "FIRST_REPORTS_S", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for by_all in (False, True):
        errors.print_error("error: a test", by_all)
    assert capsys.readouterr().err == "process 1 of 2: error: a test\n"


# the launcher's second SIGTERM comes while the first one is being reported
TWICE = """
import os, signal
from rlhf.distributed import join
from rlhf.utils import processes

class Store:
    def set_timeout(self, timeout): pass
    def add(self, name, count):
        os.kill(os.getpid(), signal.SIGTERM)
        return 1

processes.store = Store()
join._report_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.skipif(WINDOWS, reason="Windows has no SIGTERM")
def test_second_sigterm_does_not_prevent_the_line_of_the_first():
    ended = subprocess.run([sys.executable, "-c", TWICE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGTERM and ended.stderr.count("ended by SIGTERM") == 1, ended.stderr

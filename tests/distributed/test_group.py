"""Tests of what a process does without others: errors that can be sent, signals of launchers, acting alone."""

from __future__ import annotations

import errno
import pickle
import signal
import subprocess
import sys

import pytest

from rlhf.commands.compare import compare_command
from rlhf.commands.evaluate import evaluate_command
from rlhf.commands.reward_model import reward_model_command
from rlhf.commands.train import train_command
from rlhf.distributed import group, join
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
        errors.print_error(errors.UserError("a test"), by_all)
    assert capsys.readouterr().err == "process 1 of 2: error: a test\n"


NOT_LAUNCHED = {
    "train": lambda: train_command("ppo", []),
    "dry-run": lambda: train_command("ppo", ["--dry-run"]),
    "reward-model": lambda: reward_model_command([]),
    "evaluate": lambda: evaluate_command(["--model-path", "no-model"]),
    "compare": lambda: compare_command(["no-model"]),
    "program": lambda: join.join(),
}
LEFT = {
    "size": {"WORLD_SIZE": "2"},
    "rank": {"WORLD_SIZE": "2", "RANK": "1"},
    "address": {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"},
}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("command", NOT_LAUNCHED.values(), ids=NOT_LAUNCHED)
def test_variables_that_no_launcher_has_set_are_refused(command, left, monkeypatch, tmp_path, capsys):
    """They may be left from another job. Nothing is printed, imported or waited for before the error."""
    monkeypatch.chdir(tmp_path)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in left]
    with pytest.raises(UserError, match=f"WORLD_SIZE=2 is set, without {', '.join(missing)}. .* torchrun") as refused:
        command()
    assert refused.value.exit_status == 2
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def test_variables_without_world_size_have_no_effect(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "no-host", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert processes.is_first() and not join.leave_others()
    join.use_own_gpu()
    join.join()


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

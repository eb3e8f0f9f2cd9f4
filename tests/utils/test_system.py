"""What depends on the operating system."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
import time
import tokenize
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.utils import system
from rlhf.utils.errors import RLHFWarning
from tests.scripts.test_scripts import ROOT

# page faults of filling 64 MiB for the second time
PROGRAM = """
import resource, sys
from rlhf.utils.system import keep_freed_memory
if sys.argv[1] == "keep":
    print(keep_freed_memory())
def fill():
    bytearray(b"x") * 2**26
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(how: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not the C library that has the setting")
def test_freed_memory_is_kept_and_not_cleared_anew():
    facts, faults = run("keep")
    assert facts == "True"
    assert int(faults) < 100 < 10_000 < int(run("leave")[0])


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr(system.sys, "platform", "win32")
    assert system.keep_freed_memory() is False


def test_a_trainer_on_a_processor_keeps_it(build, monkeypatch):
    from rlhf.trainer import loop

    called = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: called.append(1))
    build()
    assert called


# --- Windows' other ways, tested here --------------------------------------------------------------------------------

ONLY_IN_SYSTEM = ("fcntl", "msvcrt", "SIGTERM", "SIGBREAK", "os.fork", "fsync", "sys.platform")


def test_what_windows_lacks_is_used_in_one_file():
    users = {
        path.name
        for path in (*ROOT.glob("*.py"), *ROOT.glob("rlhf/**/*.py"), *ROOT.glob("reward_model/*.py"))
        if any(word in code_of(path) for word in ONLY_IN_SYSTEM)
    }
    assert users == {"system.py"}


def code_of(path: Path) -> str:
    """A file without its comments and texts."""
    tokens = tokenize.generate_tokens(path.open(encoding="utf-8").readline)
    return "".join(t.string for t in tokens if t.type in (tokenize.NAME, tokenize.OP))


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(system, "WINDOWS", True)


def test_on_windows_no_folder_is_opened(windows, monkeypatch, tmp_path):
    monkeypatch.setattr(system.os, "open", None)
    system.sync_folder(tmp_path)


def test_on_windows_a_byte_behind_the_text_is_locked(windows, monkeypatch, tmp_path):
    locked = set()

    def locking(handle, mode, count):
        assert mode == "try" and count == 1
        place = os.lseek(handle, 0, os.SEEK_CUR)
        assert place == system.LOCKED_AT
        if place in locked:
            raise PermissionError(errno.EACCES, "Permission denied")
        locked.add(place)

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK="try"))
    first = system.lock(tmp_path / "run.lock")
    assert first is not None
    assert system.lock(tmp_path / "run.lock") is None
    first.close()


def test_on_windows_a_console_sends_ctrl_break(windows, monkeypatch):
    monkeypatch.setattr(system.signal, "SIGBREAK", 21, raising=False)
    assert system.stop_signals() == [system.signal.SIGINT, 21]


def test_on_windows_the_card_is_capped_and_elsewhere_not(monkeypatch):
    """To what is free: what other programs hold would be pushed into the machine's memory."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 * 2**30, 12 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
    assert system.cap_gpu_memory() is False and asked == []
    monkeypatch.setattr(system, "WINDOWS", True)
    assert system.cap_gpu_memory() is True and asked == [0.75]


def test_on_windows_a_file_that_is_open_elsewhere_is_tried_again(windows, monkeypatch, tmp_path):
    really, calls = os.replace, []

    def replace(source, target):
        calls.append(source)
        if len(calls) < 4:
            raise PermissionError(errno.EACCES, "used by another process")
        really(source, target)

    monkeypatch.setattr(system.os, "replace", replace)
    (tmp_path / "a").write_text("new")
    system.replace(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "new" and len(calls) == 4
    monkeypatch.setattr(system, "RETRY_S", 0.0)
    calls[:] = []
    with pytest.raises(PermissionError):
        system.replace(tmp_path / "b", tmp_path / "c")


def test_elsewhere_a_refusal_is_one(monkeypatch, tmp_path):
    calls = []

    def replace(source, target):
        calls.append(source)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(system.os, "replace", replace)
    with pytest.raises(PermissionError):
        system.replace(tmp_path / "a", tmp_path / "b")
    assert len(calls) == 1


@pytest.mark.skipif(system.WINDOWS, reason="Windows has no flock")
def test_where_a_disk_knows_no_locks_a_run_goes_on_and_says_so(monkeypatch, tmp_path):
    import fcntl

    def flock(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(RLHFWarning, match="file locks are not supported here"):
        system.lock(tmp_path / "run.lock").close()


def test_a_lock_dies_with_its_process(tmp_path):
    file = tmp_path / "run.lock"
    program = (
        f"from pathlib import Path; from rlhf.utils import system; held = system.lock(Path({str(file)!r})); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", "print(1, flush=True);" + program + ";"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, cwd=ROOT, text=True)  # fmt: skip
    holder.stdout.readline()
    deadline = time.monotonic() + 30
    while (held := system.lock(file)) is not None and time.monotonic() < deadline:
        held.close()
        time.sleep(0.05)
    assert held is None
    holder.kill()
    holder.wait()
    system.lock(file).close()

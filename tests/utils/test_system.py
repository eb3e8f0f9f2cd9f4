"""Tests the code that depends on the operating system: memory, signals, file locks and replacing files."""

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

# prints the number of page faults when 64 MiB are filled for the second time
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


def page_faults(mode: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_freed_memory_is_kept_for_reuse():
    kept, faults = page_faults("keep")
    assert kept == "True"
    assert int(faults) < 100 < 10_000 < int(page_faults("leave")[0])


def test_freed_memory_is_not_kept_on_windows(monkeypatch):
    monkeypatch.setattr(system.sys, "platform", "win32")
    assert system.keep_freed_memory() is False


def test_trainer_on_a_cpu_keeps_freed_memory(build, monkeypatch):
    from rlhf.trainer import loop

    called = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: called.append(1))
    build()
    assert called


# --- behaviour on Windows, simulated on any system -------------------------------------------------------------------

ONLY_IN_SYSTEM = ("fcntl", "msvcrt", "SIGTERM", "SIGBREAK", "os.fork", "fsync", "sys.platform")


def test_platform_specific_functions_are_used_in_one_file():
    users = {
        path.name
        for path in (*ROOT.glob("*.py"), *ROOT.glob("rlhf/**/*.py"), *ROOT.glob("reward_model/*.py"))
        if any(word in code_of(path) for word in ONLY_IN_SYSTEM)
    }
    assert users == {"system.py"}


def code_of(path: Path) -> str:
    """Returns the code of a file without comments and strings."""
    tokens = tokenize.generate_tokens(path.open(encoding="utf-8").readline)
    return "".join(t.string for t in tokens if t.type in (tokenize.NAME, tokenize.OP))


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(system, "WINDOWS", True)


def test_on_windows_folders_are_not_synced(windows, monkeypatch, tmp_path):
    monkeypatch.setattr(system.os, "open", None)
    system.sync_folder(tmp_path)


def test_on_windows_a_byte_after_the_text_is_locked(windows, monkeypatch, tmp_path):
    locked = set()

    def locking(handle, mode, count):
        assert mode == "try" and count == 1
        position = os.lseek(handle, 0, os.SEEK_CUR)
        assert position == system.LOCKED_AT
        if position in locked:
            raise PermissionError(errno.EACCES, "Permission denied")
        locked.add(position)

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK="try"))
    first = system.lock(tmp_path / "run.lock")
    assert first is not None
    assert system.lock(tmp_path / "run.lock") is None
    first.close()


def test_on_windows_ctrl_break_is_a_stop_signal(windows, monkeypatch):
    monkeypatch.setattr(system.signal, "SIGBREAK", 21, raising=False)
    assert system.stop_signals() == [system.signal.SIGINT, 21]


def test_gpu_memory_is_capped_on_windows_only(monkeypatch):
    """The cap is the free memory: beyond it, Windows moves GPU memory into the machine's memory."""
    fractions = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 * 2**30, 12 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    assert system.cap_gpu_memory() is False and fractions == []
    monkeypatch.setattr(system, "WINDOWS", True)
    assert system.cap_gpu_memory() is True and fractions == [0.75]


def test_on_windows_replacing_a_file_in_use_is_retried(windows, monkeypatch, tmp_path):
    original, calls = os.replace, []

    def replace(source, target):
        calls.append(source)
        if len(calls) < 4:
            raise PermissionError(errno.EACCES, "used by another process")
        original(source, target)

    monkeypatch.setattr(system.os, "replace", replace)
    (tmp_path / "a").write_text("new")
    system.replace(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "new" and len(calls) == 4
    monkeypatch.setattr(system, "RETRY_S", 0.0)
    calls[:] = []
    with pytest.raises(PermissionError):
        system.replace(tmp_path / "b", tmp_path / "c")


def test_on_other_systems_replacing_is_not_retried(monkeypatch, tmp_path):
    calls = []

    def replace(source, target):
        calls.append(source)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(system.os, "replace", replace)
    with pytest.raises(PermissionError):
        system.replace(tmp_path / "a", tmp_path / "b")
    assert len(calls) == 1


@pytest.mark.skipif(system.WINDOWS, reason="Windows has no flock")
def test_file_system_without_locks_gives_a_warning(monkeypatch, tmp_path):
    import fcntl

    def flock(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(RLHFWarning, match="file locks are not supported here"):
        system.lock(tmp_path / "run.lock").close()


def test_lock_is_released_when_its_process_dies(tmp_path):
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

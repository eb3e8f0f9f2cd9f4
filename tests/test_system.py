"""What depends on the operating system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# page faults of filling 64 MiB for the second time
PROGRAM = """
import resource, sys
from rlhf.system import keep_freed_memory
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
    said, faults = run("keep")
    assert said == "True"
    assert int(faults) < 100 < 10_000 < int(run("leave")[0])


def test_elsewhere_nothing_is_done(monkeypatch):
    from rlhf import system

    monkeypatch.setattr(system.sys, "platform", "win32")
    assert system.keep_freed_memory() is False


def test_a_trainer_on_a_processor_keeps_it(build, monkeypatch):
    from rlhf import loop

    called = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: called.append(1))
    build()
    assert called

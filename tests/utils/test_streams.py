"""Tests that a command continues when standard output or standard error is lost, in programs without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.utils.streams import guarded_streams

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="streams as on Linux and macOS")

# prints in every way that a command does, more than a buffer holds, then writes its result
PROGRAM = """
import os, subprocess, sys, time, warnings
from pathlib import Path
from rlhf.utils.console import Screen, quiet_imports
from rlhf.utils.errors import RLHFWarning, print_in_handler, print_line, run_command

def main():
    opened = open("work.txt", "w")
    assert opened.fileno() > 2
    quiet_imports()
    screen = Screen()
    screen.say("first line")
    screen.progress("a progress line")
    time.sleep(0.3)
    for number in range(50):
        screen.say("a line " * 40)
        screen.progress(f"step {number}")
    screen.end_progress()
    print("a print of a library", "x" * 20000, end="", flush=True)
    print("the same on stderr", file=sys.stderr)
    warnings.warn("a warning", RLHFWarning)
    print_in_handler("a line of a signal handler")
    subprocess.run([sys.executable, "-c", "print('a child process', flush=True)"], check=True)
    print("without a flush")
    opened.write("finished")
    opened.close()

run_command(main)
"""
STDERR = ["the same on stderr", "warning: a warning", "a line of a signal handler"]


def start(folder: Path, *options: str, program: str = PROGRAM, **streams) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *options, "-c", program], cwd=folder, env=environment, **streams)


def ended(process: subprocess.Popen, folder: Path) -> list[str]:
    """Return the lines of stderr, if it is a pipe. The command must have finished its work."""
    _, errors = process.communicate(timeout=60)
    lines = (errors or b"").decode().splitlines()
    assert process.returncode == 0 and (folder / "work.txt").read_text() == "finished", lines
    return lines


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_a_closed_pipe(tmp_path, options):
    """As with `| head -1`."""
    process = start(tmp_path, *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"first line\n"
    process.stdout.close()
    process.stdout = None
    first, *others = ended(process, tmp_path)
    assert first.startswith("warning: cannot write to standard output: Broken pipe")
    assert others == STDERR


def test_a_closed_terminal(tmp_path):
    """The terminal of both streams, with a live progress line. No signal arrives, as after nohup."""
    reader, terminal = os.openpty()
    process = start(tmp_path, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    printed = b""
    while b"progress line" not in printed:
        printed += os.read(reader, 1000)
    os.close(reader)
    ended(process, tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk(tmp_path, both):
    program = PROGRAM.replace("check=True", "check=False")  # a child process reports its own full disk
    with open("/dev/full", "w") as full:
        process = start(tmp_path, program=program, stdout=full, stderr=full if both else subprocess.PIPE)
        lines = ended(process, tmp_path)
    if not both:
        assert lines[0].startswith("warning: cannot write to standard output: No space left on device")
        assert set(STDERR) < set(lines)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_was_closed_before_the_start(tmp_path, closed):
    """A file of the command never gets its descriptor: the program checks this."""
    words = ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, PROGRAM]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and (tmp_path / "work.txt").read_text() == "finished", done.stderr
    assert done.stderr.splitlines() == ([] if "2" in closed else STDERR)
    assert ("first line" in done.stdout) == (" >" not in f" {closed}".replace("2>", ""))


def test_the_error_and_its_exit_status_are_kept(tmp_path):
    program = (
        "from rlhf.utils.errors import UserError, print_line, run_command\n"
        "def main():\n    print_line('x' * 100_000)\n    raise UserError('wrong: here. Fix it')\n"
        "run_command(main)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    process = start(tmp_path, program=program, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    lines = process.communicate(timeout=60)[1].decode().splitlines()
    assert process.returncode == 2 and len(lines) == 2 and lines[1] == "error: wrong: here. Fix it"


def test_a_log_continues_when_its_disk_has_room_again(tmp_path):
    """A limit of the file size stands for the disk."""
    program = (
        "import resource\n"
        "from rlhf.utils.errors import print_line, run_command\n"
        "from rlhf.utils.streams import lost_streams\n"
        "def main():\n"
        "    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))\n"
        "    print_line('x' * 100_000)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "    print_line('y' * 100_000)\n"
        "    assert list(lost_streams) == ['stdout']\n"
        "run_command(main)"
    )
    with (tmp_path / "log.txt").open("w") as log:
        process = start(tmp_path, program=program, stdout=log, stderr=subprocess.PIPE)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert (tmp_path / "log.txt").read_text().endswith("y" * 100_000 + "\n")


def test_a_terminal_that_another_program_has_made_non_blocking_gets_everything(tmp_path):
    """For example after `node` or `ssh` in the same terminal. The reader is slower than the command."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = start(tmp_path, stdout=writer, stderr=subprocess.PIPE, program=PROGRAM.replace("20000", "200_000"))
    os.close(writer)
    time.sleep(1)
    printed = b""
    while some := os.read(reader, 5000):
        printed += some
    os.close(reader)
    ended(process, tmp_path)
    assert printed.count(b"a line " * 40) == 50 and printed.endswith(b"a child process\nwithout a flush\n")


def test_streams_of_a_program_stay_and_those_of_python_come_back(monkeypatch, tmp_path):
    """A guarded stream has the encoding and the descriptor of its original."""
    own = sys.stdout, sys.stderr
    with guarded_streams():
        assert (sys.stdout, sys.stderr) == own, "pytest's"
    with (tmp_path / "out.txt").open("w", encoding="cp1252", errors="replace") as file:
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, file)
        print("before")
        with guarded_streams():
            assert sys.stdout is not file and not sys.stdout.isatty()
            assert (sys.stdout.fileno(), sys.stdout.encoding) == (file.fileno(), "cp1252")
            sys.stdout.reconfigure(errors="replace")
            print("inside é 你")
            sys.stdout.buffer.flush()
        assert sys.stdout is file
        print("after")
    assert (tmp_path / "out.txt").read_text(encoding="cp1252") == "before\ninside é ?\nafter\n"

"""Tests tests/sentences.py: another sentence fails the session and no test, with and without pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sentences import FILE, HEADER, in_order, read, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sentences are compared on Linux only")
TESTS = """
import pytest
from rlhf.utils.errors import UserError

def test_error(user_error, tmp_path):
    with user_error("--gamma", 2):
        raise UserError(f"gamma is {SECOND}: --gamma, {tmp_path}/a.yaml:2. Give a number")

def test_place(user_error):
    with user_error("--lam"):
        raise UserError("gamma is 2: --gamma. Give a number")

@pytest.mark.parametrize("number", [10, 2])
def test_number(snapshot, number):
    snapshot(f"took 0.12345 s for {number}", varying="took")
"""


@pytest.fixture
def run_tests(tmp_path):
    """Return a function that runs the tests above in a separate project and returns the exit status and the output."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(second: str, *flags: str) -> tuple[int, str]:
        (tmp_path / "tests" / "test_a.py").write_text(f"SECOND = {second!r}\n{TESTS}")
        words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.sentences", "--rootdir", ".", *flags]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}  # the project need not be installed
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.ci
def test_another_sentence_fails_the_session_and_no_test(run_tests, tmp_path):
    good = ("-k", "not place")
    file = tmp_path / FILE
    write(file, {"tests/test_a.py::test_gone": ["a"], "tests/test_b.py::test_deleted": ["b"]})
    assert run_tests("two", *good, "-n", "2", "--rewrite-sentences")[0] == 0
    assert read(file) == {
        "tests/test_a.py::test_error": ["gamma is two: --gamma, <tmp>/a.yaml:2. Give a number"],
        "tests/test_a.py::test_number[2]": ["<...> <number> s for 2"],
        "tests/test_a.py::test_number[10]": ["<...> <number> s for 10"],
    }
    before = file.read_text("utf-8")
    assert run_tests("two", *good, "-n", "2")[0] == 0
    for processes in ("0", "2"):
        status, printed = run_tests("2", *good, "-n", processes)
        assert status == 1 and "3 passed" in printed and before == file.read_text("utf-8")
        assert "- gamma is two: --gamma" in printed and "+ gamma is 2: --gamma" in printed


@pytest.mark.ci
def test_a_missing_part_fails_the_test(run_tests, tmp_path):
    status, printed = run_tests("two", "-n", "0", "--rewrite-sentences")
    assert status == 1 and "1 failed, 3 passed" in printed and "test_place" in printed
    assert not any("test_place" in test for test in read(tmp_path / FILE))


def test_the_file_is_in_order():
    file = Path(__file__).parent / "sentences.txt"
    lines = file.read_text("utf-8").splitlines()
    assert lines[0] == HEADER and list(read(file)) == sorted(read(file), key=in_order)

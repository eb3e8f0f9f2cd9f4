"""Tests that the output of a reward function goes to a file and that the standard streams are restored."""

import io
import sys

import pytest

from rlhf.rewards.printing import printed_to
from rlhf.utils.errors import RLHFWarning


def test_streams_are_restored(tmp_path, capsys):
    before = sys.stdout, sys.stderr
    with pytest.warns(RLHFWarning, match="'mine' prints"), printed_to(tmp_path / "out.txt", "mine"):
        print("hello")
    assert (sys.stdout, sys.stderr) == before
    assert (tmp_path / "out.txt").read_text() == "hello\n" and capsys.readouterr().out == ""


def test_late_function_does_not_restore_a_closed_stream(tmp_path, monkeypatch):
    """A function that exceeds its time limit continues on its thread and may end after the streams were replaced."""
    old, new = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", old)
    late = printed_to(tmp_path / "out.txt", "late")
    late.__enter__()
    old.close()
    sys.stdout = new
    late.__exit__(None, None, None)
    assert sys.stdout is new


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_functions_can_end_in_any_order(tmp_path, order):
    before = sys.stdout
    both = [printed_to(tmp_path / "out.txt", name) for name in ("first", "second")]
    for one in both:
        one.__enter__()
    for i in order:
        both[i].__exit__(None, None, None)
    assert sys.stdout is before

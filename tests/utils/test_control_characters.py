"""Tests that control and direction characters of a file never reach the console: in errors, warnings, log records of
libraries, lines, tables and progress. tests/test_structure.py checks that every print passes here."""

from __future__ import annotations

import io
import json
import logging
import pickle
import shutil
import sys
import warnings

import pytest

import evaluate_generations
from rlhf.config import make_config
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import Problem, RLHFWarning, RunError, UserError, print_line, run_command, visible
from rlhf.utils.signals import GracefulStop
from tests.records import record_of

# erase the line; return to its start; hide; ring; C1's control sequence and command; both directions; a hidden "tag"
HOSTILE = "x\x1b[2K\r\x1b[8m\x07\x9b2J\x9d0;title\x9c\u202e\u2066\u061c\x7f\x00\x0b\U000e0041y"
RAW = [character for character in HOSTILE if not character.isprintable()]


def assert_clean(text: str) -> None:
    assert [repr(character) for character in RAW if character in text] == []
    assert "<U+001B>[2K<U+000D>" in text or r"\x1b[2K\r" in text, "what was there is visible"


@pytest.fixture
def theirs(start_model, tmp_path, monkeypatch):
    """Return a function that makes the run folder of another person, with settings in its run.json."""
    monkeypatch.chdir(tmp_path)

    def make(group: str, **settings: object) -> str:
        folder = tmp_path / "theirs"
        shutil.copytree(start_model, folder)
        config = make_config("demo", actor_model=str(start_model), rm_model="none", reward_func=["length_penalty"])
        record_of(config).write(folder)
        record = json.loads((folder / "run.json").read_text())
        record["settings"][group] |= settings
        (folder / "run.json").write_text(json.dumps(record))
        return "theirs"

    return make


@pytest.mark.parametrize(
    ("group", "settings", "part"),
    [
        ("reward", {"reward_func": [f"evil.py:f{HOSTILE}"]}, "is not executed without permission"),
        ("model", {"actor_model": f"/none/{HOSTILE}".replace("\0", "")}, "model not found"),
        ("model", {"rm_model": f"/none/{HOSTILE}"}, "not a valid path"),
        ("kl", {"kl_schedule": HOSTILE}, "kl_schedule"),
        ("data", {"prompts": f"/none/{HOSTILE}.jsonl"}, "not a valid path"),
        ("sampling", {"temperature": HOSTILE}, "temperature"),
    ],
)
def test_an_error_about_a_foreign_run_shows_control_characters(theirs, capfd, group, settings, part):
    folder = theirs(group, **settings)
    with pytest.raises(SystemExit) as status:
        run_command(lambda: evaluate_generations.main(["--model-path", folder, "--output", "out"]))
    printed = capfd.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 + (group == "data"), "for the data of a run, the first line names --prompts"
    assert status.value.code == 2 and part in lines[-1]
    for line in lines:
        assert_clean(line)
    assert not [c for c in RAW if c in printed.out + printed.err]


@pytest.mark.parametrize("kind", [UserError, RunError])
def test_an_error_has_one_line_for_each_problem_everywhere(kind):
    """Also where Python or a notebook prints it, and after another process has received it."""
    error = kind([Problem(f"{HOSTILE}\nok: verified"), Problem("second")])
    for one in (error, pickle.loads(pickle.dumps(error))):
        for lines in (one.report(), str(one), "\n".join(one._render_traceback_())):
            assert len(lines.splitlines()) == 2
            assert_clean(lines)


def test_an_unexpected_error_is_one_clean_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fail():
        raise KeyError(HOSTILE)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        run_command(fail)
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(SystemExit):
        run_command(stop, interrupted=HOSTILE)
    assert_clean(capsys.readouterr().err)


def test_a_file_name_in_an_error_of_the_system_is_clean(capsys):
    def fail():
        raise FileNotFoundError(2, "not found", f"{HOSTILE}\nok: verified")

    with pytest.raises(SystemExit):
        run_command(fail)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert_clean(line)


def test_warnings_are_clean_also_outside_the_commands(capsys):
    quiet_libraries()
    with warnings.catch_warnings():
        warnings.simplefilter("always", RLHFWarning)
        warnings.showwarning(RLHFWarning(f"{HOSTILE}\nok"), RLHFWarning, "file", 1)
    assert_clean(capsys.readouterr().err)
    assert str(RLHFWarning(f"{HOSTILE}\nok")).isprintable(), "as Python prints it without quiet_libraries"


@pytest.fixture
def standard_records():
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.usefixtures("standard_records")
def test_errors_that_libraries_log_are_clean():
    """transformers logs values of a config.json that cannot be set. Records of the user's program are not changed."""
    quiet_libraries()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    for name in ("transformers.configuration_utils", "peft", "my_program"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).error("Can't set %s", HOSTILE)
        logging.getLogger(name).removeHandler(handler)
    *libraries, users = stream.getvalue().split("Can't set ")[1:]
    for text in libraries:
        assert_clean(text)
    assert users == HOSTILE + "\n"


@pytest.mark.usefixtures("standard_records")
def test_a_message_whose_values_do_not_fit_does_not_stop_a_library(monkeypatch):
    """A handler of logging reports it, as without this project."""
    monkeypatch.setattr(logging, "raiseExceptions", False)
    quiet_libraries()
    logging.getLogger("transformers").error("%d", "text")


def test_lines_tables_facts_and_progress_are_clean(capsys):
    screen = Screen()
    screen.say(HOSTILE)
    screen.write(HOSTILE + "\n")
    screen.table(HOSTILE, [HOSTILE], [[HOSTILE]])
    screen.progress(HOSTILE, last=True)
    print_line(HOSTILE)
    GracefulStop().say(HOSTILE)
    screen.facts([(HOSTILE, f"{HOSTILE}\nok: verified")])
    printed = capsys.readouterr().out
    assert_clean(printed)
    assert printed.splitlines()[-1].endswith("<U+000A>ok: verified"), "a value cannot add a line"


def test_a_progress_line_that_is_redrawn_has_only_its_own_control_characters(monkeypatch):
    """A terminal redraws the line in place: with a carriage return of `rich`, not with those of the text."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def written(text: str) -> str:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        screen = Screen()
        screen.progress(text)
        screen.progress(text, last=True)
        return terminal.getvalue()

    hostile = written(HOSTILE)
    harmless = written("x" * len(visible(HOSTILE)))
    assert "\r" in harmless and "\x1b[" in harmless, "it is redrawn"
    assert_clean(hostile.replace("\r", "").replace("\x1b", "") + visible(HOSTILE))
    assert [hostile.count(c) for c in RAW] == [harmless.count(c) for c in RAW]

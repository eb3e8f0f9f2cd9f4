"""Compares the sentences that users read with one file, tests/sentences.txt, which a reviewer reads as prose.

A test passes a sentence to the fixture `snapshot`, or expects an error with `user_error`, and asserts only names,
places and numbers itself. At the end of the session all sentences are compared with the file: another sentence fails
the session with a list of differences, and fails no test. `python -m pytest --rewrite-sentences` writes the file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf.utils.errors import UserError

FILE = "tests/sentences.txt"
HEADER = "Sentences that users read, by test. `python -m pytest --rewrite-sentences` writes this file."
PLACEHOLDERS = {
    r"\bPID \d+": "PID <pid>",
    r", on \S+\)": ", on <machine>)",
    r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(\.\d+)?([+-]\d\d:\d\d)?": "<time>",
    r"\b(?=[a-z]*\d)(?=\d*[a-f])[0-9a-f]{8,64}\b": "<hash>",
    r"\b0x[0-9a-f]{6,}": "<address>",
    r"(\w)\1{20,}": r"\1...",
    r"[+-]?\d+\.\d{3,}": "<number>",  # measured
    r"\d[\d,.]* (?=GiB|GB|MB|KB|bytes)": "<size> ",
    r"(?<=bytes instead of )\d[\d,]*": "<size>",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-sentences", action="store_true", help=f"write {FILE} from the tests that run")


def read(file: Path) -> dict[str, list[str]]:
    """Return the sentences of the file, by the id of the test."""
    found: dict[str, list[str]] = {}
    path = ""
    lines = []
    for line in file.read_text("utf-8").splitlines()[1:] if file.is_file() else []:
        if line.startswith("# "):
            path = line[2:]
        elif line.startswith("## "):
            lines = found.setdefault(f"{path}::{line[3:]}", [])
        elif line:
            lines.append(line.strip())
    return found


def in_order(test: str) -> list[tuple[str, int]]:
    """Return a key that sorts row 2 before row 10."""
    parts = re.findall(r"(\D+)(\d*)", test)
    return [(text, int(number or 0)) for text, number in parts]


def write(file: Path, sentences: dict[str, list[str]]) -> None:
    """Write the file, sorted by the ids of the tests, so that every order of the tests gives the same file."""
    text = f"{HEADER}\n"
    path = ""
    for test in sorted(sentences, key=in_order):
        folder, _, name = test.partition("::")
        text += f"\n# {folder}\n" if folder != path else ""
        text += "\n".join([f"\n## {name}", *(f"  {line}" for line in sentences[test])]) + "\n"
        path = folder
    file.write_text(text, "utf-8", newline="\n")


class Sentences:
    """The sentences of this process's tests. With pytest-xdist, workers send theirs to the first process."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.file = config.rootpath / FILE
        self.of_file = read(self.file)
        self.of_tests: dict[str, list[str]] = {}
        self.users: set[str] = set()  # the collected tests with the fixture `snapshot`
        self.paths: set[str] = set()  # the test files that were collected as a whole
        self.differences: list[str] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        path = item.nodeid.partition("::")[0]
        if not any("::" in word for word in self.config.args):
            self.paths.add(path)
        if "snapshot" in getattr(item, "fixturenames", ()):
            self.users.add(item.nodeid)

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        if call.excinfo is not None:  # a failed test has not seen all its sentences
            self.of_tests.pop(item.nodeid, None)

    @pytest.hookimpl(optionalhook=True)  # pytest-xdist's
    def pytest_testnodedown(self, node, error) -> None:
        tests, users, paths = getattr(node, "workeroutput", {}).get("sentences", ({}, [], []))
        self.of_tests |= tests
        self.users.update(users)
        self.paths.update(paths)

    def gone(self) -> set[str]:
        """Return the tests of the file that do not exist any more, or have no sentence any more."""
        tests = {test: test.partition("::")[0] for test in self.of_file}
        deleted = {test for test, path in tests.items() if not (self.config.rootpath / path).is_file()}
        return deleted | {test for test, path in tests.items() if path in self.paths and test not in self.users}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["sentences"] = (self.of_tests, sorted(self.users), sorted(self.paths))
            return
        new = {test: lines for test, lines in self.of_file.items() if test not in self.gone()} | self.of_tests
        changed = [test for test in sorted(new | self.of_file) if new.get(test) != self.of_file.get(test)]
        for test in changed:
            before = self.of_file.get(test, [])
            after = new.get(test, [])
            lines = [f"- {line}" for line in before if line not in after]
            lines += [f"+ {line}" for line in after if line not in before]
            self.differences += [test, *(lines or ["  the order, or how often a sentence occurs"])]
        if changed and self.config.getoption("--rewrite-sentences"):
            write(self.file, new)
        elif changed and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.differences:
            done = "was rewritten" if self.config.getoption("--rewrite-sentences") else "differs; read, then run again"
            terminalreporter.section(f"{FILE} {done} with --rewrite-sentences", red=True)
            terminalreporter.write_line("\n".join(self.differences))


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform == "linux":  # the texts of the operating system are others elsewhere
        config.pluginmanager.register(Sentences(config), "sentences")


@pytest.fixture
def snapshot(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory) -> Callable[..., None]:
    """Return a function that stores texts of this test for the comparison with the file.

    Folders, times, hashes and measured numbers become placeholders; so do matches of the regular expression `varying`.
    """
    store = request.config.pluginmanager.get_plugin("sentences")
    base = tmp_path_factory.getbasetemp()
    folders = {tmp_path: "<tmp>", base: "<session>", request.config.rootpath: "<project>"}
    if "PYTEST_XDIST_WORKER" in os.environ:
        folders[base.parent] = "<session>"

    def compare(*texts: object, varying: str = "") -> None:
        # a ResourceWarning is about an object of an earlier test, which Python happens to collect now
        for text in (str(text) for text in texts if not isinstance(text, ResourceWarning)):
            for folder, name in folders.items():
                text = text.replace(str(folder), name)
            for pattern, name in {varying or r"(?!)": "<...>", **PLACEHOLDERS}.items():
                text = re.sub(pattern, name, text)
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if store is not None:
                store.of_tests.setdefault(request.node.nodeid, []).extend(lines)

    return compare


@pytest.fixture
def user_error(snapshot) -> Callable:
    """Return a context manager, as `pytest.raises`, that compares the error's sentences with the file.

    The error must contain every one of `parts`: flags, files with lines, names, numbers.
    """

    @contextmanager
    def expect(*parts: object, kind: type[Exception] = UserError, varying: str = "") -> Iterator[pytest.ExceptionInfo]:
        with pytest.raises(kind) as error:
            yield error
        missing = [part for part in map(str, parts) if part not in str(error.value)]
        assert not missing, str(error.value)
        snapshot(error.value, varying=varying)

    return expect

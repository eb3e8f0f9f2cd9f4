"""Mutation testing: changes one token of the library at a time, and runs the tests that must notice it.

    python -m tests.mutations FOLDER            one JSON file per mutation; the same command resumes
    python -m tests.mutations FOLDER --table    the results so far as a Markdown table

The mutations depend only on SEED, on OPERATORS and on the code, whose unchanged tests must pass. After a change of the
code, use an empty folder.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SEED = 20
COUNT = 15
# the mutated folders of rlhf/, and the tests that must notice a change in them
TESTS = {
    "algorithms": ["tests/algorithms"],
    "trainer": ["tests/trainer", "tests/algorithms"],
    "rollout": ["tests/rollout", "tests/algorithms"],
    "checkpoints": ["tests/checkpoints"],
}
PAIRS = ("< <=", "> >=", "== !=", "+ -", "+= -=", "* /", "& |", "and or", "min max", "any all", "True False", "0 1",
         "mean sum", "minimum maximum", "continue break")  # fmt: skip
BOTH_WAYS = {word: other for pair in map(str.split, PAIRS) for word, other in (pair, reversed(pair))}
OPERATORS = {**BOTH_WAYS, "//": "/", "**": "*", "not": "", "2": "3"}


class Mutation(NamedTuple):
    """One token of a file, and what replaces it."""

    file: str  # below the checkout
    line: int  # from 1
    column: int  # from 0
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Return the text of the file with the token changed."""
        lines = text.splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        return text[:start] + self.after + text[start + len(self.before) :]


def changed_nowhere(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a file that no mutation changes: annotations, texts, and the arguments of an error."""
    for node in ast.walk(tree):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            yield from [part] if isinstance(part, ast.expr) else []
        if isinstance(node, ast.JoinedStr | ast.Raise):
            yield node


def mutations_of(file: str, text: str) -> Iterator[Mutation]:
    """Yield every mutation of a file after which it still compiles."""
    tree = ast.parse(text)
    spans = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in changed_nowhere(tree)]
    operand = False  # the token before is an operand; otherwise * unpacks or separates arguments
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        word = token.string
        if word in OPERATORS and (operand or word not in ("*", "**", "/")):
            mutation = Mutation(file, *token.start, word, OPERATORS[word])
            if not any(start <= token.start < end for start, end in spans):
                with suppress(SyntaxError):
                    compile(mutation.apply(text), file, "exec", dont_inherit=True)
                    yield mutation
        operand = token.type in (tokenize.NAME, tokenize.NUMBER) or word in (")", "]")


def drawn() -> list[Mutation]:
    """Return COUNT mutations, drawn by SEED from all files of the folders in TESTS."""
    files = [path for folder in TESTS for path in sorted((ROOT / "rlhf" / folder).glob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}
    candidates = [mutation for file, text in texts.items() for mutation in mutations_of(file, text)]
    return random.Random(SEED).sample(candidates, COUNT)


def run_tests(folder: str, mutation: Mutation | None, limit: float) -> dict[str, object]:
    """Run a folder's tests in a copy of the checkout, for at most `limit` seconds. Return the first failed test, "time
    limit" or None (all passed), and the seconds."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile("w+") as output:
        copy = Path(place, "checkout")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        if mutation:
            path = copy / mutation.file
            path.write_text(mutation.apply(path.read_text("utf-8")), "utf-8")
        command = [sys.executable, "-m", "pytest", "-n", "1", "-q", "-x", f"--basetemp={place}/tests", *TESTS[folder]]
        streams = {"stdout": output, "stderr": subprocess.STDOUT, "env": {**os.environ, "PYTHONPATH": str(copy)}}
        started = time.monotonic()
        tests = subprocess.Popen(command, cwd=copy, start_new_session=True, **streams)
        try:
            code = tests.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
        output.seek(0)
        text = output.read()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    killed_by = failed[0] if failed else {0: None, None: "time limit"}.get(code, text[-300:])
    return {"killed_by": killed_by, "seconds": round(time.monotonic() - started)}


def run(folder: Path, limit: float) -> None:
    """Run the mutations that have no file yet. The time limit kills only if the unchanged tests are faster."""
    for mutation in drawn():
        tests = Path(mutation.file).parent.name
        result = folder / f"{mutation.file.replace('/', '.')}-{mutation.line}-{mutation.column}.json"
        if not result.exists():
            found = run_tests(tests, mutation, limit)
            if found["killed_by"] == "time limit" and run_tests(tests, None, limit)["killed_by"]:
                found["killed_by"] = "undecided: the unchanged tests take longer than the limit, too"
            result.write_text(json.dumps({**mutation._asdict(), **found}))


def table(folder: Path) -> str:
    """Return the results in the folder as a Markdown table."""
    rows = ["| place | change | killed by | seconds |", "|---|---|---|---|"]
    for found in (json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))):
        place = f"{found['file']}:{found['line']}"
        change = f"`{found['before']}` -> `{found['after']}`"
        rows.append(f"| {place} | {change} | {found['killed_by'] or 'SURVIVED'} | {found['seconds']} |")
    return "\n".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the results are")
    parser.add_argument("--table", action="store_true", help="print the results")
    parser.add_argument("--limit", type=float, default=240, help="seconds per mutation")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    print(table(arguments.folder)) if arguments.table else run(arguments.folder, arguments.limit)

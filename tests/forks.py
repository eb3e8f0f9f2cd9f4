"""Runs python commands in forks of one process that has imported the slow libraries, which saves seconds per command.

The commands are the files and modules that a user starts, with their own arguments, folder and output. Use a new
process (tests/scripts/test_scripts.py) to test imports, environment variables or launchers. Windows has no fork: there
each command has a new process.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Forks:
    """The process that imports the libraries, with more environment `variables`. Close it with `close`."""

    def __init__(self, **variables: str):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            "ACCELERATE_USE_CPU": "true",
            **variables,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"], cwd=ROOT, env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, command: Sequence[str], cwd: Path) -> subprocess.CompletedProcess:
        """Run `FILE.py FLAG...` or `-m MODULE FLAG...` in the folder `cwd`, without standard input."""
        with tempfile.TemporaryDirectory() as printed:
            outputs = [str(Path(printed, name)) for name in ("out", "err")]
            self.process.stdin.write(json.dumps([list(command), str(cwd), outputs]) + "\n")
            self.process.stdin.flush()
            status = int(self.process.stdout.readline())
            texts = [Path(file).read_text(encoding="utf-8", errors="replace") for file in outputs]
        return subprocess.CompletedProcess(command, status, *texts)

    def close(self) -> None:
        self.process.communicate()


def run_here(command: list[str], cwd: str) -> int:
    """Run a command as python does. Return its exit status."""
    os.chdir(cwd)
    module = command[0] == "-m"
    sys.argv = command[module:]
    sys.path[0] = cwd if module else str(Path(command[0]).resolve().parent)
    try:
        if module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def main() -> None:
    import torch

    torch.set_num_threads(1)
    os.fsync = lambda _: None  # as in conftest.py
    import rlhf.analysis.evaluator
    import rlhf.reports.comparison_report
    import rlhf.rewards.training
    import rlhf.run.train  # noqa: F401

    for line in sys.stdin:
        command, cwd, outputs = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for stream, file in zip((1, 2), outputs, strict=True):
                    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
                sys.stdin = io.StringIO()
                status = run_here(command, cwd)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

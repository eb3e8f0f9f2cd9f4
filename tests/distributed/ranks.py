"""Runs a function in several connected processes. Linux and macOS only (fork)."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def launcher_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment variables that a launcher sets."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def start(count: int, work: Callable[[int], Any], folder: Path, quiet: bool = False) -> list[int]:
    """Fork `count` processes that call `work(rank)`. Each writes its result to the file `folder/RANK`. Return their
    process ids. With one process, there is no launcher."""
    port = free_port()
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if count > 1:
                    os.environ.update(launcher_variables(rank, count, port))
                if quiet:
                    for stream in (1, 2):
                        os.dup2(os.open(folder / f"{rank}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
                result = work(rank)
                (folder / str(rank)).write_bytes(pickle.dumps(result))
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    return pids


def wait(pids: list[int], seconds: float) -> list[int | None]:
    """Return the exit status of each process, negative for a signal. A process that runs longer is killed: None."""
    left = dict(enumerate(pids))
    statuses = [None] * len(pids)
    until = time.monotonic() + seconds
    while left and time.monotonic() < until:
        for number, pid in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[number] = os.waitstatus_to_exitcode(status)
                del left[number]
        time.sleep(0.01)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return statuses


def results(count: int, work: Callable[[int], Any], seconds: float = 300) -> list[Any]:
    """Return `work(rank)` of `count` connected processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        statuses = wait(start(count, work, folder), seconds)
        assert statuses == [0] * count, statuses
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(count)]


CHOICE = """
import sys, torch
from rlhf.config import make_config
from rlhf.models.device import start_device
from rlhf.setup import precision
from rlhf.utils.console import Screen
from tests.distributed.ranks import results

def work(rank):
    device = start_device(Screen())
    config, start_model = make_config(), sys.argv[1]
{work}

print("chosen:", results(2, work))
"""


def chosen_by_two(work: str, start_model: Path) -> str:
    """Return as text what two connected processes choose on a CPU. They run in a new program, because torch's threads
    do not survive a fork. `work`: code that returns the choice of process `rank`."""
    code = CHOICE.format(work=textwrap.indent(textwrap.dedent(work), "    "))
    ended = subprocess.run(
        [sys.executable, "-c", code, str(start_model)], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.split("chosen: ")[-1].strip()

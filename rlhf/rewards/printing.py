"""Redirects the output of reward functions to a file, so that it does not break the progress line."""

from __future__ import annotations

import io
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rlhf.utils.errors import RLHFWarning
from rlhf.utils.processes import is_first, rank

PRINTED_FILE = "reward_output.txt"


def printed_file(folder: Path) -> Path:
    """Return the file in a run folder for what the reward functions of this process print."""
    return folder / (PRINTED_FILE if is_first() else f"reward_output_process{rank()}.txt")


class _ThreadRedirect:
    """A standard stream that writes the output of one thread to a buffer."""

    def __init__(self, stream: TextIO, thread: int, buffer: io.StringIO):
        self.stream, self.thread, self.buffer, self.is_over = stream, thread, buffer, False

    def write(self, text: str) -> int:
        return (self.buffer if threading.get_ident() == self.thread else self.stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _in_use(stream: TextIO) -> TextIO:
    """Return the stream below finished redirects. A function that exceeded its time limit may end after a later
    redirect started, or after other code replaced the stream. Those streams are kept."""
    while isinstance(stream, _ThreadRedirect) and stream.is_over:
        stream = stream.stream
    return stream


@contextmanager
def printed_to(file: Path | None, who: str) -> Iterator[None]:
    """Append what this thread prints inside the context to `file` (None: no redirect).

    A warning shows the path when the file is created. Other threads, such as the one that handles Ctrl-C, print as
    usual.

    Args:
        file: the file for the output.
        who: the reward function's name, for the warning.
    """
    if file is None:
        yield
        return
    buffer, thread = io.StringIO(), threading.get_ident()
    redirects = {name: _ThreadRedirect(getattr(sys, name), thread, buffer) for name in ("stdout", "stderr")}
    for name, stream in redirects.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in redirects.items():
            stream.is_over = True
            setattr(sys, name, _in_use(getattr(sys, name)))
        if buffer.getvalue():
            if not file.exists():
                warnings.warn(f"function {who!r} prints text: it is written to {file}", RLHFWarning, stacklevel=2)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(buffer.getvalue())

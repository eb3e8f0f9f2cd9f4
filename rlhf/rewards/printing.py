"""What a reward function prints goes to a file, so that it does not break the live line."""

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

PRINTED_FILE = "reward_output.txt"


class _OneThreadApart:
    """A standard stream, except that the text of one thread goes to a buffer."""

    def __init__(self, stream: TextIO, thread: int, buffer: io.StringIO):
        self.stream, self.thread, self.buffer, self.is_over = stream, thread, buffer, False

    def write(self, text: str) -> int:
        return (self.buffer if threading.get_ident() == self.thread else self.stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _in_use(stream: TextIO) -> TextIO:
    """The stream under those that are over. A function that ran too long may end after later ones began, or after
    somebody else replaced the stream: that one stays."""
    while isinstance(stream, _OneThreadApart) and stream.is_over:
        stream = stream.stream
    return stream


@contextmanager
def printed_to(file: Path | None, who: str) -> Iterator[None]:
    """Append what this thread prints in the context to `file`; None leaves it alone. The first time, a
    warning names the file. Other threads, such as the one that answers Ctrl-C, print as usual."""
    if file is None:
        yield
        return
    buffer, thread = io.StringIO(), threading.get_ident()
    apart = {name: _OneThreadApart(getattr(sys, name), thread, buffer) for name in ("stdout", "stderr")}
    for name, stream in apart.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in apart.items():
            stream.is_over = True
            setattr(sys, name, _in_use(getattr(sys, name)))
        if buffer.getvalue():
            if not file.exists():
                warnings.warn(f"reward function {who} prints: its output goes to {file}", RLHFWarning, stacklevel=2)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(buffer.getvalue())

"""Standard output and standard error whose loss ends no command, because its results are files.

They are lost if a pipe is closed (`| head`), if a terminal is gone, or while the disk of a log is full.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

GONE = (errno.EPIPE, errno.EIO)  # a closed pipe or terminal. A full disk may have room again later
lost_streams: dict[str, str] = {}  # "stdout" or "stderr" -> why its first text could not be written


class ConsoleFile(io.FileIO):
    """The file of a standard stream. It drops what it cannot write, for whatever reason, and stores the first reason.

    print(), libraries and the last flush of Python are above it and see no error.
    """

    def write(self, data: bytes) -> int:
        length = len(data)
        try:
            while data:
                written = super().write(data)
                if written is None:  # a program at the same terminal has made it non-blocking: wait for room
                    select.select((), (self,), ())
                data = data[written:]
        except OSError as error:
            self.note_loss(error)
        return length

    def note_loss(self, error: OSError) -> None:
        """Store the reason of the first loss. For stdout, print it on stderr."""
        if error.errno in GONE:
            with suppress(OSError):  # child processes and libraries in C write to the descriptor itself
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if self.name in lost_streams:
            return
        lost_streams[self.name] = error.strerror
        if self.name == "stdout":
            print(
                f"warning: cannot write to standard output: {error.strerror}. The command continues without it",
                file=sys.stderr,
            )


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Context manager in which standard output and standard error raise no OSError.

    Streams that a program or a notebook has put in their place stay as they are.
    """
    for name in ("stdin", "stdout", "stderr"):  # in the order of their descriptors
        if getattr(sys, name) is None:  # `>&-`: a file of the run would get its descriptor, and prints
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115
    changed = [(name, getattr(sys, name), _guard(name)) for name in ("stdout", "stderr")]
    for name, _, guard in changed:
        setattr(sys, name, guard)
    try:
        yield
    finally:
        for name, before, guard in changed:
            if getattr(sys, name) is guard:  # loops by hand end in any order, and one that nobody has any more later
                guard.flush()
                setattr(sys, name, before)


def _guard(name: str) -> TextIO:
    """Return a stream like the present one, for the same descriptor, that raises no OSError."""
    stream = getattr(sys, name)
    replaced = stream is not getattr(sys, f"__{name}__")
    if replaced or type(getattr(stream.buffer, "raw", stream.buffer)) is not io.FileIO:  # a Windows console
        return stream
    with suppress(OSError):
        stream.flush()
    file = ConsoleFile(stream.fileno(), "w", closefd=False)
    file.name = name
    return io.TextIOWrapper(
        file,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,  # python -u
    )

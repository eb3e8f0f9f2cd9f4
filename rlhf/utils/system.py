"""What depends on the operating system, with its other way beside it."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shlex
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import IO

from rlhf.utils.errors import RLHFWarning

WINDOWS = sys.platform == "win32"

# --- memory ----------------------------------------------------------------------------------------------------------

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
NEVER, OLDER = 2**31 - 1, 2**25  # bytes: the largest that mallopt takes, and that it took in older releases of glibc


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed for what is asked for next; returns whether it does.

    glibc hands blocks of some MiB back to the system at once, and a training step asks for the same ones again and
    again: each time the system clears them page by page, a sixth of a step on a processor. It holds for the whole
    process, from now on. Other C libraries, and Windows, have no such setting: there this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    kept = any(mallopt(M_MMAP_THRESHOLD, size) for size in (NEVER, OLDER))
    return bool(mallopt(M_TRIM_THRESHOLD, NEVER)) and kept


def cap_card_memory() -> bool:
    """On Windows, forbid torch more of the card's memory than is free now; returns whether it did.

    The driver there moves what does not fit into the machine's own memory, and a run becomes many times slower
    without a word. With a cap torch says "out of memory", which a run can answer. Elsewhere the driver says it itself.
    """
    import torch

    if not WINDOWS or not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(free / total)
    return True


# --- commands --------------------------------------------------------------------------------------------------------


def command(*words: str) -> str:
    """Words as one line to paste into this platform's shell: quoted for a POSIX shell, or for Windows."""
    if not WINDOWS:
        return shlex.join(words)
    return " ".join(_quoted_for_windows(word) for word in words)


def _quoted_for_windows(word: str) -> str:
    """One word for cmd and for PowerShell; in PowerShell single quotes keep $ and ` from being expanded."""
    if word and not re.search(r"[^\w\-./\\:=+~]", word):
        return word
    if "$" in word or "`" in word or '"' in word:
        return "'" + word.replace("'", "''") + "'"
    return f'"{word}"'


# --- files -----------------------------------------------------------------------------------------------------------


def sync_file(file: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    with file.open("rb+") as stream:  # Windows syncs only what may be written
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until a folder's names are on the disk. Windows opens no folders: there its journal keeps their order."""
    if WINDOWS:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


PATIENCE = 5.0  # seconds


def replace(source: Path, target: Path) -> None:
    """Put a file or folder in another's place, at one stroke; a folder only where there is none.

    On Windows that is refused while somebody has one of the two open: a virus scanner, a reader. It is tried again for
    some seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return os.replace(source, target)
        except PermissionError:
            if not WINDOWS or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # what the systems say where another one has the lock
LOCKED_AT = 2**20  # byte of a lock's file that is locked on Windows: behind the text, which others may read


def lock(file: Path) -> IO[bytes] | None:
    """Lock a file for as long as what is returned is open, or the process lives; None where another one has it.

    The system lets go of it whatever the process dies of, so a lock is never stale. Where the disk knows no locks
    (some network mounts), what is returned locks nothing, and a warning says so.
    """
    stream = file.open("ab+")
    try:
        if WINDOWS:
            import msvcrt

            stream.seek(LOCKED_AT)
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            stream.close()
            return None
        message = f"no locks here: {file}. Two runs into one folder would not see each other"
        warnings.warn(message, RLHFWarning, stacklevel=2)
    return stream


# --- signals ---------------------------------------------------------------------------------------------------------


def stop_signals() -> list[signal.Signals]:
    """What asks a process to end: Ctrl-C; and SIGTERM, in whose place a Windows console sends Ctrl-Break."""
    return [signal.SIGINT, signal.SIGBREAK] if WINDOWS else [signal.SIGINT, signal.SIGTERM]

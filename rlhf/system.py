"""What depends on the operating system, with its other way beside it."""

from __future__ import annotations

import ctypes
import sys

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

"""What depends on the operating system, with its other way beside it."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
NEVER = 2**31 - 1  # the largest that mallopt takes


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed for what is asked for next; returns whether it does.

    glibc hands blocks of some MiB back to the system at once, and a training step asks for the same ones again and
    again: each time the system clears them page by page, a sixth of a step on a processor. Other C libraries, and
    Windows, have no such setting: there this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, NEVER) and mallopt(M_TRIM_THRESHOLD, NEVER))

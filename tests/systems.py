"""What tests need from the operating system. Without it, they are skipped with the reason."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rlhf.utils.system import WINDOWS

FULL_DEVICE = Path("/dev/full")


def make_link(path: Path, target: str | Path) -> None:
    """Make a symbolic link. On Windows this is a right that users can lack."""
    try:
        path.symlink_to(target)
    except OSError as error:
        pytest.skip(f"this user may not make links: {error.strerror}")


def link_to_full_device(path: Path) -> None:
    """Make a file that cannot be written because its device has no free space."""
    if not FULL_DEVICE.exists():
        pytest.skip(f"no {FULL_DEVICE} on this system")
    path.symlink_to(FULL_DEVICE)


def words_of(line: str) -> list[str]:
    """Return the words of a printed command, as the shell of this system splits them."""
    if not WINDOWS:
        return shlex.split(line)
    quotes = "\"'"
    return [word[1:-1].replace("''", "'") if word[0] in quotes else word for word in shlex.split(line, posix=False)]

"""The number of this process among those that a launcher started. Imports no torch.

`torchrun` and `accelerate launch` give each process its number in environment variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any


def launched(name: str, default: int) -> int:
    """Return one of the launcher's environment variables as a number, such as RANK or WORLD_SIZE."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


_acts_alone = False


@contextmanager
def alone() -> Iterator[None]:
    """Context manager in which this process acts as the only one: it exchanges nothing."""
    global _acts_alone
    before = _acts_alone
    _acts_alone = True
    try:
        yield
    finally:
        _acts_alone = before


def connected() -> ModuleType | None:
    """Return torch.distributed if this process is connected to others (rlhf.distributed.join), otherwise None."""
    if _acts_alone:
        return None
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def size() -> int:
    """Return the number of processes of the run."""
    if _acts_alone:
        return 1
    group = connected()
    return launched("WORLD_SIZE", 1) if group is None else group.get_world_size()


def rank() -> int:
    """Return the number of this process, from 0."""
    group = connected()
    if group is not None:
        return group.get_rank()
    return launched("RANK", 0) if size() > 1 else 0


def is_first() -> bool:
    """True in the process that prints and writes files."""
    return rank() == 0


store: Any = None  # torch.distributed.Store that the connected processes share; set by rlhf.distributed.join
STORE_S = 5.0  # seconds that its answer may take
_has_reported = False


def is_first_to_report() -> bool:
    """True in the first of the connected processes that calls this, once, so that one of them prints why the run ends.
    Always True in a process without others."""
    global _has_reported
    if store is None:
        return True
    if _has_reported:
        return False
    _has_reported = True
    try:
        store.set_timeout(timedelta(seconds=STORE_S))
        return store.add("reported", 1) == 1
    except RuntimeError:  # the process that kept the store has ended
        return True


def has_reported() -> bool:
    """True in a connected process that prints why the run ends, or that leaves this to another one. It ends itself."""
    return _has_reported


def process_prefix() -> str:
    """Return the start of a line that another process than the first one prints; "" in the first one."""
    return "" if is_first() else f"process {rank()} of {size()}: "

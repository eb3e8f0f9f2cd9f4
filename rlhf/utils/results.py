"""`--json`: a command prints one JSON object on standard output, and everything else on standard error."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf.utils.processes import is_first

FLAG = "--json"
results: dict[str, Any] = {}  # of this command


def result(**values: Any) -> None:
    """Add values to the object that --json prints."""
    results.update(values)


@contextmanager
def results_on_stdout() -> Iterator[None]:
    """Context manager of a command. With --json, libraries and child processes write to standard error, too, and the
    first process prints the object at the end."""
    results.clear()
    if FLAG not in sys.argv:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        if is_first():
            print(json.dumps(json_ready(results), default=str))


def json_ready(data: Any) -> Any:
    """Return the data with None for each number that is not finite, and with lists for arrays and sets."""
    if isinstance(data, dict):
        return {key: json_ready(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, set)):
        return [json_ready(value) for value in data]
    if hasattr(data, "tolist"):
        return json_ready(data.tolist())
    return None if isinstance(data, float) and not math.isfinite(data) else data

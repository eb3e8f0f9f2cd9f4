"""Checks the installed libraries, before any of them is imported."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from rlhf.utils.errors import raise_if

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
FOR_TESTS = ("pytest", "pytest-xdist", "ruff", "hypothesis", "nbclient", "nbformat", "ipykernel")
FOR_FOUR_BIT = "bitsandbytes"  # optional; checked by `rlhf.models.load.four_bit`


def check_libraries() -> None:
    """Raise UserError, with the pip command, if a library is missing, or if trl is not the required version, the last
    one with PPO. Versions of other libraries are not checked."""
    problems = []
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        name = re.match(r"[\w.-]*", line)[0]
        if not name or name in (*FOR_TESTS, FOR_FOUR_BIT):
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f'{name} is not installed: {REQUIREMENTS.name}. Install it with: pip install "{line}"')
            continue
        if name == "trl" and line != f"trl=={version}":
            problems.append(
                f'wrong version of trl ({version}): {REQUIREMENTS.name}. Fix it with: pip install "{line}"'
            )
    raise_if(problems)

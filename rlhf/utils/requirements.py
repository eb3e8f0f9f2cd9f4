"""Whether the installed libraries are those that this project is written for; said before any of them is imported."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from rlhf.utils.errors import raise_if

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
FOR_TESTS = ("pytest", "pytest-xdist", "filelock", "ruff", "hypothesis")
FOR_FOUR_BIT = "bitsandbytes"  # `rlhf.models.load.four_bit` asks for it


def check_libraries() -> None:
    """Raises UserError, with the line for pip, where a library is missing, or where trl is another than the last that
    has PPO. Other libraries' versions are their users' to choose."""
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
                f'another trl ({version}): {REQUIREMENTS.name}. This project needs this one: pip install "{line}"'
            )
    raise_if(problems)

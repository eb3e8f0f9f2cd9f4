"""`python -m tests.settings.write_keywords`: writes rlhf/settings/keywords.py from the declared settings."""

from __future__ import annotations

import typing
from pathlib import Path

from rlhf.settings.fields import Setting, settings_of
from rlhf.settings.training import Config

FILE = Path(__file__).resolve().parents[2] / "rlhf" / "settings" / "keywords.py"
HEAD = '''"""The keyword arguments of `make_config`, for editors and type checkers.

Written by `python -m tests.settings.write_keywords` from the declared settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class TrainingSettings(TypedDict, total=False):
    """All settings of a training run, by their first names. Other names of the settings work, too. `--help-all` of a
    training script prints their meanings."""

'''
PLAIN = {bool: "bool", int: "int", float: "float"}


def annotation(setting: Setting) -> str:
    """Returns the type annotation of a setting in `make_config`. Types of this project are given as text."""
    if setting.choices and not setting.is_list:
        return "Literal[" + ", ".join(f'"{choice}"' for choice in setting.choices) + "]"
    if setting.is_list:
        item = PLAIN.get(typing.get_args(setting.base_type)[0], "str")
        kind = "Sequence[str] | str" if item == "str" else f"Sequence[{item}]"
    else:
        kind = PLAIN.get(setting.base_type, "str")
    return f"{kind} | None" if setting.optional else kind


def source() -> str:
    """Returns the source of the file."""
    return HEAD + "".join(f"    {s.name}: {annotation(s)}\n" for s in settings_of(Config).values())


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")

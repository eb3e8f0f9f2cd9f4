"""The commands that are printed for the user to type next. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlhf.system import command

if TYPE_CHECKING:
    from config import Config


def names_code(rules: Iterable[str]) -> list[str]:
    """Return those reward functions that are code in a file of the user, FILE.py:NAME."""
    return [rule for rule in rules if ":" in rule]


def code_words(rules: Iterable[str]) -> list[str]:
    """Return the words that name reward functions on a command line, if any of them is the user's code: code comes
    from the command line alone, never from a run's folder."""
    rules = list(rules)
    return ["--reward-func", *rules] if names_code(rules) else []


def resume_command(config: Config, *more: str) -> str:
    """Return the command that resumes a run, or several seeds. The other settings are in run.json. `more` are further
    words."""
    seeds = [] if config.run.seeds is None else ["--seeds", *map(str, config.run.seeds)]
    words = ["--resume", *seeds, *more, *code_words(config.reward.reward_func), "--output", config.run.output]
    return command("python", f"train_{config.algorithm}.py", *words)


def replay_command(algorithm: str, folder: str, rules: Iterable[str]) -> str:
    """Return the command that repeats a skipped update from its incident's folder."""
    return command("python", f"train_{algorithm}.py", "--replay", folder, *code_words(rules))

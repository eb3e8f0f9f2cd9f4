"""The command lines that are printed, in the form that the user used: scripts, or the installed command."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from rlhf.utils.system import WINDOWS

CHECKOUT = Path(__file__).resolve().parents[2]  # of an installed package: the folder of all packages
CONSOLE_COMMAND = "rlhf"
# commands of `rlhf` -> how a checkout calls them. The other commands are algorithms: `python train_NAME.py`.
SCRIPTS = {
    "train": ("python", "train.py"),
    "reward-model": ("python", "-m", "reward_model.train"),
    "evaluate": ("python", "evaluate_generations.py"),
    "compare": ("python", "compare_runs.py"),
    "plot": ("python", "plot_training_progress.py"),
    "export": ("python", "export_model.py"),
}
OF_USERS: dict[str, str] = {}  # an algorithm in a user's file -> FILE.py:CLASS


def is_checkout() -> bool:
    """Return True if this package is in a checkout of the project, also an editable installation of it."""
    return all((CHECKOUT / file).is_file() for file in ("pyproject.toml", SCRIPTS["compare"][1]))


def console_words() -> tuple[str, ...] | None:
    """Return the words that started this process, `rlhf` or `python -m rlhf`; None if it was another program."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py" and program.resolve().parent == CHECKOUT / CONSOLE_COMMAND:
        return ("python", "-m", CONSOLE_COMMAND)
    return (CONSOLE_COMMAND,) if program.stem == CONSOLE_COMMAND else None


def script_words(name: str) -> tuple[str, ...]:
    """Return the words that start a command from the current folder, in the form that the user used:
    `python train_NAME.py` with the scripts of a checkout, in another folder with their path; `rlhf NAME` with the
    installed command. `name` is the command's name after `rlhf`, or an algorithm in a user's file.

    A program or notebook gets the scripts if the package is in a checkout.
    """
    if name in OF_USERS:
        return (*script_words("train"), "--algorithm", OF_USERS[name])
    words = console_words() or (None if is_checkout() else (CONSOLE_COMMAND,))
    if words is not None:
        return (*words, name)
    words = SCRIPTS.get(name, ("python", f"train_{name}.py"))
    if Path.cwd() == CHECKOUT:
        return words
    script = words[1] if words[1] != "-m" else f"{words[2].replace('.', '/')}.py"
    return ("python", str(CHECKOUT / script))


def short_name(name: str) -> str:
    """Return a command's name in texts: `train_NAME.py`, or `rlhf NAME` with the installed command."""
    words = script_words(name)
    return " ".join([Path(words[1]).name, *words[2:]] if words[1].endswith(".py") else words)


def typed_words() -> list[str]:
    """Return the command line of this process, without the folder of the program and without `python`."""
    words = console_words()
    program = [Path(sys.argv[0]).name] if words is None else [word for word in words if word != "python"]
    return [*program, *sys.argv[1:]]


def command(*words: str) -> str:
    """Return words as a command line for the shell of this platform, quoted for POSIX or for Windows."""
    if not WINDOWS:
        return shlex.join(words)
    return " ".join(_quoted_for_windows(word) for word in words)


def script_command(name: str, *words: str) -> str:
    """Return the command line of a script, as `script_words`, with arguments."""
    return command(*script_words(name), *words)


def _quoted_for_windows(word: str) -> str:
    """Return a word for cmd and PowerShell. Single quotes prevent PowerShell from expanding $ and `."""
    if word and not re.search(r"[^\w\-./\\:=+~]", word):
        return word
    if "$" in word or "`" in word or '"' in word:
        return "'" + word.replace("'", "''") + "'"
    return f'"{word}"'

"""The command `rlhf`: one command of the installed package for all scripts of a checkout. Imports no torch.

`rlhf NAME` reads no config.py: its settings are the recipe's, those of `--config FILE.yaml`, and the flags.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from rlhf.algorithms.table import ALGORITHMS, DEFAULT_ALGORITHM
from rlhf.utils.command_lines import CONSOLE_COMMAND, console_words
from rlhf.utils.errors import UserError, did_you_mean, print_line, run_command
from rlhf.utils.libraries import project


@dataclass(frozen=True)
class Subcommand:
    """A command after `rlhf`."""

    text: str  # for --help
    run: Callable[[list[str]], None]  # with a command line; any error ends the process with its exit status


def _run(module: str, *given: Any) -> None:
    """Run a command of rlhf/commands, which is imported now: the others' imports delay nothing. `given`: the arguments
    of its function, the last one a command line."""
    found = import_module(f"rlhf.commands.{module}")
    run_command(partial(getattr(found, f"{module}_command"), *given), found.INTERRUPTED)


COMMANDS = {
    **{
        row.name: Subcommand(f"train a language model with {row.title}", partial(_run, "train", row.name))
        for row in ALGORITHMS.values()
    },
    "train": Subcommand("train with --algorithm, also one in your own file", partial(_run, "train", None)),
    "reward-model": Subcommand("train a reward model from preference pairs", partial(_run, "reward_model")),
    "evaluate": Subcommand("rank completions next to the start model's, or chat", partial(_run, "evaluate")),
    "compare": Subcommand("compare runs over seeds, with a verdict", partial(_run, "compare")),
    "plot": Subcommand("draw training curves", partial(_run, "plot")),
    "export": Subcommand("write a run for llama.cpp and Ollama, or for verl", partial(_run, "export")),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run `rlhf` with the words of a command line."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        COMMANDS[name].run(rest)
    else:
        run_command(partial(answer, name))


def answer(name: str) -> None:
    """Print the help or the version. Raises UserError for another word that is not a command."""
    if name in ("-h", "--help"):
        return print_line(help_text())
    if name == "--version":
        return print_line(f"{CONSOLE_COMMAND} {project()['version']}")
    known = f"Commands: {', '.join(COMMANDS)}"
    if name.startswith("-"):
        raise UserError(f"no command before {name}", program(), f"Write a command first. {known}")
    raise UserError(f"unknown command {name!r}", program(), f"{did_you_mean(name, COMMANDS)}{known}")


def help_text() -> str:
    """Return the text of `rlhf --help`."""
    width = max(map(len, COMMANDS))
    lines = [
        f"usage: {program()} COMMAND [--FLAG VALUE ...]",
        "",
        "Trains small language models with reinforcement learning from human feedback, and evaluates them.",
        "",
        "commands:",
        *(f"  {name:<{width}}  {command.text}" for name, command in COMMANDS.items()),
        "",
        f"{program()} COMMAND --help prints the settings of a command, {program()} --version the version.",
        f"Demo without downloads, minutes on a CPU: {program()} {DEFAULT_ALGORITHM} --recipe demo",
    ]
    return "\n".join(lines)


def program() -> str:
    """Return how this process was started: `rlhf` or `python -m rlhf`."""
    return " ".join(console_words() or (CONSOLE_COMMAND,))

"""The command `rlhf`: one command of the installed package for all scripts of a checkout. Imports no torch.

`rlhf NAME` reads no config.py: its settings are the recipe's, those of `--config FILE.yaml`, and the flags.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rlhf.algorithms.table import ALGORITHMS, DEFAULT_ALGORITHM
from rlhf.utils.command_lines import CONSOLE_COMMAND, console_words
from rlhf.utils.errors import UserError, did_you_mean, print_line, run_command
from rlhf.utils.libraries import project


@dataclass(frozen=True)
class Subcommand:
    """A command after `rlhf`."""

    text: str  # for --help
    run: Callable[[list[str]], None]  # with a command line; any error ends the process with its exit status


# Each imports its command when it runs, so that the others' imports delay nothing.


def _train(algorithm: str, argv: list[str]) -> None:
    from rlhf.commands.train import INTERRUPTED, train_command

    run_command(partial(train_command, algorithm, argv), INTERRUPTED)


def _reward_model(argv: list[str]) -> None:
    from rlhf.commands.reward_model import INTERRUPTED, reward_model_command

    run_command(partial(reward_model_command, argv), INTERRUPTED)


def _evaluate(argv: list[str]) -> None:
    from rlhf.commands.evaluate import INTERRUPTED, evaluate_command

    run_command(partial(evaluate_command, argv), INTERRUPTED)


def _compare(argv: list[str]) -> None:
    from rlhf.commands.compare import INTERRUPTED, compare_command

    run_command(partial(compare_command, argv), INTERRUPTED)


def _plot(argv: list[str]) -> None:
    from rlhf.commands.plot import INTERRUPTED, plot_command

    run_command(partial(plot_command, argv), INTERRUPTED)


COMMANDS = {
    **{
        row.name: Subcommand(f"train a language model with {row.title}", partial(_train, row.name))
        for row in ALGORITHMS.values()
    },
    "reward-model": Subcommand("train a reward model from preference pairs", _reward_model),
    "evaluate": Subcommand("rank completions next to the start model's, or chat", _evaluate),
    "compare": Subcommand("compare runs over seeds, with a verdict", _compare),
    "plot": Subcommand("draw training curves", _plot),
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

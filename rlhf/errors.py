"""Faults in the user's words: what, where, and the way out, one line each, never a traceback."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

MOST_SHOWN = 10


class UserError(Exception):
    """Faults found before a run begins (exit status 2). Takes one fault or several, all of one command or file.

    A fault reads `<what>: <where>. <way out>`.
    """

    exit_status = 2

    def __init__(self, faults: str | Iterable[str]):
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__(*self.faults)

    def __str__(self) -> str:
        return "\n".join(self.faults)

    def report(self) -> str:
        lines = [f"error: {fault}" for fault in self.faults[:MOST_SHOWN]]
        if len(self.faults) > MOST_SHOWN:
            lines.append(f"and {len(self.faults) - MOST_SHOWN} more")
        return "\n".join(lines)


class RunError(UserError):
    """A run that had begun and cannot go on (exit status 1). `inputs`: what the part that failed was given, as JSON
    can hold it; a run's log keeps it in a file."""

    exit_status = 1

    def __init__(self, faults: str | Iterable[str], inputs: Any = None):
        super().__init__(faults)
        self.inputs = inputs


class Notice(UserWarning):
    """A warning of ours: shown where libraries' are not."""


def raise_if(faults: list[str]) -> None:
    """Raise one UserError that holds all `faults`, if there are any."""
    if faults:
        raise UserError(faults)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest known word as a way out, or where to find the list."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {near[0]}?" if near else "--help lists them all."


NOT_DETERMINISTIC = " does not have a deterministic implementation"  # torch's words, behind the operator's name


def torch_error(error: RuntimeError) -> str | None:
    """Return the line for an error of torch that the user can fix, else None. Imports no torch."""
    first = str(error).split("\n", 1)[0]
    if type(error).__name__ == "OutOfMemoryError":
        return (
            f"out of memory: {first}. Try --use-lora, --load-in-4bit, a smaller model, or close what else uses the GPU"
        )
    if NOT_DETERMINISTIC in first or ("Deterministic behavior" in first and "CuBLAS" in first):
        operator = first.split(NOT_DETERMINISTIC)[0] if NOT_DETERMINISTIC in first else "cuBLAS"
        return (
            f"{operator} has no deterministic implementation on this device: --deterministic. "
            "Leave the flag out, and report the operator's name"
        )
    return None


def run_command(main: Callable[[], None]) -> None:
    """Run a script's main(): a UserError becomes its lines on stderr and an exit status."""
    try:
        main()
    except UserError as error:
        print(error.report(), file=sys.stderr)
        sys.exit(error.exit_status)
    except OSError as error:
        if error.errno is None:  # a library's own, with no file of ours behind it
            raise
        where = os.fsdecode(error.filename or "a file of this command")  # TensorBoard's names are bytes
        print(f"error: {error.strerror}: {where}. Mend that and go on (a training run with --resume)", file=sys.stderr)
        sys.exit(RunError.exit_status)
    except RuntimeError as error:
        line = torch_error(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        sys.exit(RunError.exit_status)
    except KeyboardInterrupt:
        print("stopped; a training run goes on from its last checkpoint with --resume", file=sys.stderr)
        sys.exit(130)

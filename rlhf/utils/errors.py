"""Faults in the user's words: what, where, and the way out, one line each, never a traceback."""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MOST_SHOWN = 5


class UserError(Exception):
    """Faults found before a run begins (exit status 2). Takes one fault or several, all of one command or file.

    A fault reads `<what>: <where>. <way out>`.
    """

    exit_status = 2

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(*self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)

    def report(self) -> str:
        lines = [f"error: {fault}" for fault in self.problems[:MOST_SHOWN]]
        if len(self.problems) > MOST_SHOWN:
            lines.append(f"and {len(self.problems) - MOST_SHOWN} more")
        return "\n".join(lines)


class RunError(UserError):
    """A run that had begun and cannot go on (exit status 1). `inputs`: what the part that failed was given, as JSON
    can hold it; a run's log keeps it in a file."""

    exit_status = 1

    def __init__(self, problems: str | Iterable[str], inputs: Any = None):
        super().__init__(problems)
        self.inputs = inputs


class RLHFWarning(UserWarning):
    """A warning of ours: shown where libraries' are not."""


def raise_if(problems: list[str]) -> None:
    """Raise one UserError that holds all `problems`, if there are any."""
    if problems:
        raise UserError(problems)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a question with the nearest known word and a space behind it; `otherwise` if no word is close."""

    def letters(name: str) -> str:
        return name.strip("-").replace("_", "-").lower()

    by_letters = {letters(k): k for k in sorted(known, key=lambda k: "_" not in k)}  # of two spellings, with dashes
    near = difflib.get_close_matches(letters(word), list(by_letters), n=1, cutoff=CLOSE)
    return f"Did you mean {by_letters[near[0]]}? " if near else otherwise


SMALLER = "Try a smaller model, --micro-batch-size 1, --use-lora with a small --lora-r, or close other programs"
CLOSE = 0.75  # of difflib's ratio: one slip in a short word, two in a long one
NOT_DETERMINISTIC = " does not have a deterministic implementation"  # torch's words, behind the operator's name


def torch_error(error: RuntimeError) -> str | None:
    """Return the line for an error of torch that the user can fix, else None. Imports no torch."""
    first = str(error).split("\n", 1)[0]
    if "DefaultCPUAllocator" in first or "not enough memory: you tried to allocate" in first:
        return f"out of memory on the CPU: {first[max(0, first.find('DefaultCPUAllocator')) :]:.120}. {SMALLER}"
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


def run_command(main: Callable[[], None], interrupted: str = "stopped") -> None:
    """Run a script's main(). Every error becomes one line on stderr and an exit status; an unexpected one names a file
    with its traceback. `interrupted` is what Ctrl-C prints."""
    try:
        return main()
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(130)
    except UserError as error:
        lines, status = error.report(), error.exit_status
    except Exception as error:  # whatever it is, the user gets a line and a file, and the shell a status
        lines, status = f"error: {one_line_of(error)}", RunError.exit_status
    print(lines, file=sys.stderr)
    sys.exit(status)


def one_line_of(error: Exception) -> str:
    """Return one line for an error that nobody expected; unless it is the system's or torch's, its traceback goes into
    a file, which the line names."""
    if isinstance(error, OSError) and error.errno is not None:
        where = os.fsdecode(error.filename or "a file of this command")  # TensorBoard's names are bytes
        return f"{error.strerror}: {where}. Fix that, then run the command again (a training run with --resume)"
    if isinstance(error, MemoryError):
        return f"out of memory on the CPU: {str(error) or 'no details'}. {SMALLER}"
    line = torch_error(error) if isinstance(error, RuntimeError) else None
    if line is not None:
        return line
    reason = (str(error).strip().splitlines() or ["no message"])[0]
    return (
        f"unexpected {type(error).__name__} ({reason:.200}): this is a bug. Please report it; the traceback is in "
        f"{write_traceback(error)}"
    )


def write_traceback(error: BaseException) -> Path:
    """Write the traceback into a new file in this folder, else in the system's folder for such files; returns it."""
    text = "".join(traceback.format_exception(error))
    text = f"{sys.argv!a}\nPython {sys.version}\n{text}".encode(errors="backslashreplace")
    name = f"rlhf_error_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}.log"
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        try:
            (folder / name).write_bytes(text)
            return folder / name
        except OSError:  # read-only or full: the next one
            continue
    return Path("no file, because none could be written")

"""Errors for the user: one line each, with the problem, its place and how to fix it. No tracebacks."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from rlhf.utils.processes import connected, is_first, is_first_to_report, process_prefix
from rlhf.utils.results import result, results_on_stdout
from rlhf.utils.streams import guarded_streams

MAX_PRINTED = 5
# seconds that the other processes wait for the first one to report the same error, and to end its run
FIRST_REPORTS_S = 10.0
FIRST_ENDS_S = 2.0


# C0 and C1 control characters (escape sequences start with one), direction marks and invisible characters
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)


def visible(text: str, newline: str = "\n") -> str:
    """Return text with control, direction and invisible characters replaced by their code points, such as <U+001B>.
    Tabs are kept. Newlines are replaced by `newline`."""
    shown = _INVISIBLE.sub(lambda found: f"<U+{ord(found[0]):04X}>", text.replace("\r\n", "\n"))
    return shown.replace("\n", newline)


def visible_line(text: str) -> str:
    """Return text as `visible`, on one line: a text of a file cannot look like a second message."""
    return visible(text, newline="<U+000A>")


Say = Callable[[str], None]  # prints one line, such as `print_line` or `Screen.say`


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print text to `file` (None: stdout) as `visible`. Every text of this project is printed here or by
    rlhf.utils.console.Screen, so that no control character of a file or a model reaches the console."""
    print(visible(text), file=file)


def print_in_handler(text: str) -> None:
    """Print one line on stderr from a signal handler: print() could be interrupted by itself."""
    with contextlib.suppress(OSError):  # stderr may be lost
        os.write(2, f"{visible_line(text)}\n".encode())


@dataclass(frozen=True)
class Problem:
    """What is wrong, where, how to fix it, and the settings that are the reason. As text it is one line,
    `<what>: <place>. <fix>`, without its empty parts."""

    what: str
    place: str | os.PathLike[str] = ""
    fix: str = ""
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.what}: {self.place}" if self.place else self.what
        return visible_line(f"{where}. {self.fix}" if self.fix else where)


class UserError(Exception):
    """One or more problems found before a run starts (exit status 2): a list, or the fields of one."""

    exit_status = 2
    at_once = False  # True if another process than the first one prints it without waiting for the first one

    def __init__(self, problem: str | Problem | Iterable[Problem], place: str | os.PathLike[str] = "", fix: str = ""):
        one = Problem(problem, place, fix) if isinstance(problem, str) else problem
        self.problems = [one] if isinstance(one, Problem) else list(one)
        super().__init__(*self.problems)

    def __reduce__(self):  # Exception's own passes each problem as an argument
        return type(self), (self.problems,), vars(self)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))

    def append(self, text: str) -> None:
        """Add text to the end of the last problem."""
        last = self.problems[-1]
        field = "fix" if last.fix else "place" if last.place else "what"
        self.problems[-1] = replace(last, **{field: f"{getattr(last, field)}{text}"})

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and notebooks print instead of a traceback."""
        return self.report().split("\n")

    def report(self) -> str:
        lines = [f"error: {problem}" for problem in self.problems[:MAX_PRINTED]]
        if len(self.problems) > MAX_PRINTED:
            lines.append(f"and {len(self.problems) - MAX_PRINTED} more")
        return "\n".join(lines)


class RunError(UserError):
    """An error after the start of a run, which stops it (exit status 1). `inputs`: the JSON-ready inputs of the part
    that failed; the run log saves them in a file."""

    exit_status = 1

    def __init__(
        self, problem: str | Iterable[Problem], place: str | os.PathLike[str] = "", fix: str = "", inputs: Any = None
    ):
        super().__init__(problem, place, fix)
        self.inputs = inputs


class WriteError(OSError):
    """An error of the operating system while a command writes (`naming`). It has a file name."""


class RaisedByAll(Exception):
    """The cause of an error that all processes of a run raise, so that only the first one prints it."""


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal stopped the run. The exit status is 128 + this signal."""

    def __init__(self, number: int):
        self.exit_status = 128 + number


class RLHFWarning(UserWarning):
    """A warning of this project. It is printed; warnings of libraries are not."""

    def __init__(self, message: str):
        super().__init__(visible_line(message))


def raise_if(problems: Collection[Problem]) -> None:
    """Raise one UserError with all `problems`, if there are any."""
    if problems:
        raise UserError(problems)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "Did you mean X? " with the closest known word (and a space at the end), or `otherwise` if none is
    close."""

    def letters(name: str) -> str:
        return name.strip("-").replace("_", "-").lower()

    by_letters = {letters(k): k for k in sorted(known, key=lambda k: "_" not in k)}  # prefers the spelling with dashes
    near = difflib.get_close_matches(letters(word), list(by_letters), n=1, cutoff=CLOSE)
    return f"Did you mean {by_letters[near[0]]}? " if near else otherwise


def is_raised_by_all(error: BaseException | None) -> bool:
    """True if RaisedByAll is among the causes of an error."""
    seen = []  # an error can be its own cause
    while error is not None and error not in seen and not isinstance(error, RaisedByAll):
        seen.append(error)
        error = error.__cause__
    return isinstance(error, RaisedByAll)


def first_line(error: BaseException, otherwise: str = "no message") -> str:
    """Return the first line of an error's message; `otherwise` if there is none."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # the class of a user's error may fail at this
        lines = []
    return lines[0] if lines else otherwise


# --- errors of the operating system ----------------------------------------------------------------------------------

PERMISSION = "Ask its owner for the permission, or use a folder of your own"
UNMOUNTED = "Check that its folder still exists, and that the disk is mounted"
ADVICE = {  # how to fix an error of the operating system, by the name of its number
    "EACCES": PERMISSION,
    "EPERM": PERMISSION,
    "EROFS": "The disk is read-only: make it writable, or use another one",
    "ENOSPC": "Free disk space",
    "EDQUOT": "Free disk space: your quota on this disk is used up",
    "EFBIG": "Raise the limit of a file's size (ulimit -f unlimited), or use another disk: FAT32 stores at most 4 GiB",
    "EMFILE": "Raise the limit of open files, for example with: ulimit -n 4096",
    "ENFILE": "Close other programs: all of them together have too many files open",
    "ENOENT": UNMOUNTED,
    "ENOTDIR": UNMOUNTED,
    "ESTALE": UNMOUNTED,
    "EIO": "Check the disk and its connection",
    "ENOLCK": "Use a disk that supports file locks",
}


def os_advice(error: OSError) -> str:
    """Return how to fix an error of the operating system."""
    return ADVICE.get(errno.errorcode.get(error.errno or 0, ""), "Fix this")


def advice_for(error: BaseException, otherwise: str) -> str:
    """Return `os_advice` if the operating system refused to read a file that exists; `otherwise` for other errors of
    reading."""
    found = as_os_error(error)
    return otherwise if found is None or isinstance(found, FileNotFoundError) else os_advice(found)


def as_os_error(error: BaseException) -> OSError | None:
    """Return the error of the operating system that an error is, or that it reports as text such as "os error 28",
    like the Rust code of safetensors and tokenizers. None for another error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    line = first_line(error)
    found = re.search(r"\(os error (\d+)\)", line)
    # the last argument is the number on Windows
    return OSError(int(found[1]), line, None, int(found[1])) if found else None


@contextmanager
def naming(output: str | Path) -> Iterator[None]:
    """Context manager for writing a file or a folder. Raises an OSError in it as WriteError, so that the exit status
    of the command is 1. One without a file name, such as that of a full disk, gets this one."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        kind = type(error)
        # a program can catch it as before
        kind = type("WriteError", (WriteError, kind), {}) if kind.__module__ == "builtins" else WriteError
        raise kind(error.errno, error.strerror, error.filename or str(output)) from error


REDUCE_MEMORY = "Try a smaller model, close other programs, or train with --micro-batch-size 1 --use-lora --lora-r 8"
REDUCE_GPU_MEMORY = "Try a smaller model, or train with --use-lora --load-in-4bit"
CLOSE = 0.75  # difflib ratio: allows one typo in a short word, two in a long one
NOT_DETERMINISTIC = " does not have a deterministic implementation"  # torch's message, after the name of the operator


def torch_error(error: BaseException) -> Problem | None:
    """Return the problem of a torch error that the user can fix, otherwise None. Imports no torch."""
    if not isinstance(error, RuntimeError):
        return None
    first = str(error).split("\n", 1)[0]
    if "DefaultCPUAllocator" in first or "not enough memory: you tried to allocate" in first:
        details = first[max(0, first.find("DefaultCPUAllocator")) :]
        return Problem("out of memory on the CPU", f"{details:.120}", REDUCE_MEMORY)
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return Problem("out of memory", first, REDUCE_GPU_MEMORY)
    if NOT_DETERMINISTIC in first or ("Deterministic behavior" in first and "CuBLAS" in first):
        operator = first.split(NOT_DETERMINISTIC)[0] if NOT_DETERMINISTIC in first else "cuBLAS"
        return Problem(
            f"{operator} has no deterministic implementation on this device",
            "--deterministic",
            "Remove the flag, and please report the name of the operator",
            ("deterministic",),
        )
    return None


@guarded_streams()
@results_on_stdout()
def run_command(main: Callable[[], None], interrupted: str = "stopped") -> None:
    """Run the main() of a script. Any error is printed as one line on stderr and sets the exit status; for an
    unexpected error, the line contains the path of a file with the traceback. `interrupted` is the message after
    Ctrl-C. If stdout or stderr is lost, the command continues without it."""
    try:
        require_current_folder()
        return main()
    except KeyboardInterrupt as error:
        result(error=asdict(Problem(interrupted)))
        if is_first_to_report():
            print_line(interrupted, file=sys.stderr)
        sys.exit(error.exit_status if isinstance(error, StoppedAtOnce) else 130)
    except UserError as error:
        print_error(error, is_raised_by_all(error))
        sys.exit(error.exit_status)
    except Exception as error:  # an unexpected error: the traceback goes to a file
        print_error(UserError(problem_of(error)), is_raised_by_all(error))
        sys.exit(UserError.exit_status if is_before_start(error) else RunError.exit_status)


def require_current_folder() -> None:
    """Raise UserError if the current folder was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder no longer exists", fix="Change into another one: cd FOLDER") from None


def is_before_start(error: Exception) -> bool:
    """Return True for an error of the operating system before the command began to write (`naming`)."""
    return as_os_error(error) is not None and not isinstance(error, WriteError)


def print_error(error: UserError, by_all: bool) -> None:
    """Print an error. Of several processes with the same error, `by_all`, only the first one prints it.

    If they have not compared their errors, the first one is likely to find the same error. The others print theirs
    only if the launcher has not ended them some seconds later, or `at_once`. Of connected processes, one prints.
    """
    first, *more = map(asdict, error.problems)
    result(error=first, more_errors=more)
    if not is_first() and not error.at_once:
        time.sleep(FIRST_REPORTS_S if connected() is None else FIRST_ENDS_S)
        if by_all:
            return
    if is_first_to_report():
        print_line(f"{process_prefix()}{error.report()}", file=sys.stderr)


def problem_of(error: Exception) -> Problem:
    """Return the problem of an unexpected error. The traceback is written to a file, whose path it contains, unless
    the error comes from the operating system or is a known torch error."""
    found = as_os_error(error)
    if found is not None:
        resume = "" if is_before_start(error) else " (a training run with --resume)"
        return Problem(found.strerror, found.filename or "", f"{os_advice(found)}, then run the command again{resume}")
    if isinstance(error, MemoryError):
        return Problem("out of memory on the CPU", str(error) or "no details", REDUCE_MEMORY)
    return torch_error(error) or Problem(
        f"unexpected {type(error).__name__} ({first_line(error):.200})",
        "this is a bug",
        f"Please report it; the traceback is in {write_traceback(error)}",
    )


def write_traceback(error: BaseException) -> Path:
    """Write the traceback to a new file in the working directory, or in the system's temporary folder, and return its
    path."""
    text = "".join(traceback.format_exception(error))
    text = f"{sys.argv!a}\nPython {sys.version}\n{text}".encode(errors="backslashreplace")
    name = f"rlhf_error_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}.log"
    for folder in (Path.cwd, tempfile.gettempdir):
        try:
            file = Path(folder(), name)
            file.write_bytes(text)
            return file
        except OSError:  # removed, read-only or full: try the next folder
            continue
    return Path("no file, because none could be written")

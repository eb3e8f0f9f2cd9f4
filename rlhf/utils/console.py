"""Console output: lines, tables and one live progress line, in any console encoding and in notebooks. Silences library
messages."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhf.utils.errors import RLHFWarning, print_line, visible, visible_line
from rlhf.utils.paths import text_on_page
from rlhf.utils.processes import is_first, process_prefix, size
from rlhf.utils.results import result
from rlhf.utils.system import keep_ctrl_c

LIBRARIES = ("transformers", "trl", "accelerate", "huggingface_hub", "datasets", "peft", "bitsandbytes")
ISSUERS = (*LIBRARIES, "torch", "tensorboard", "tqdm", "rlhf")  # modules that issue warnings of libraries
SHOW_MESSAGES = "RLHF_LIBRARY_MESSAGES"  # 1: programs that import rlhf.api see the messages of libraries
LINE_EVERY_S = 4  # seconds between progress lines in a file or a pipe: with the step in between, at most 5


def quiet_libraries() -> None:
    """Turn off the libraries' deprecation warnings, loading progress bars and hub retry messages.

    Call it before the libraries are imported, because bitsandbytes warns at import (on CPUs with bfloat16).
    """
    quiet_imports()
    _disable_progress_bars()


def quiet_imports() -> None:
    """Turn off the messages that the libraries print while they are imported. Imports none of them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _set_variables()
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", RLHFWarning)
    warnings.showwarning = _show_warning
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    if logging.getLogRecordFactory() is logging.LogRecord:  # not that of the user's program
        logging.setLogRecordFactory(VisibleRecord)


def quiet_in_program() -> None:
    """Turn off the same messages in a program that imports rlhf.api. The variable SHOW_MESSAGES keeps them.

    The program's own configuration is kept: its warnings, its filters, its functions for them, the levels that it has
    set, and everything that concerns other modules.
    """
    if os.environ.get(SHOW_MESSAGES, "") not in ("", "0"):
        return
    _set_variables()
    _disable_progress_bars()
    if not sys.warnoptions:  # of python -W or PYTHONWARNINGS
        warnings.filterwarnings("always", category=RLHFWarning, append=True)
        warnings.filterwarnings("ignore", module=rf"({'|'.join(ISSUERS)})(\.|$)", append=True)
    for name in LIBRARIES:
        if logging.getLogger(name).level in (logging.NOTSET, logging.WARNING):  # as the libraries set them
            logging.getLogger(name).setLevel(logging.ERROR)


def _set_variables() -> None:
    """Set the environment variables of libraries that are not imported yet, if the user has not set them."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")  # Windows has links only in developer mode
    keep_ctrl_c()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if size() > 1:  # if a process ends, torch prints a C++ stack trace; the error line has the reason
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def _disable_progress_bars() -> None:
    """Turn off the progress bars of libraries that are imported already: the variables come too late for them."""
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    if "datasets" in sys.modules:
        import datasets

        datasets.disable_progress_bars()


class VisibleRecord(logging.LogRecord):
    """A log record. The text of a library's record is as `visible`: it may contain values of a config.json."""

    def getMessage(self) -> str:
        text = super().getMessage()
        return visible(text) if self.name.partition(".")[0] in LIBRARIES else text


def _show_warning(message, category, *_, **__) -> None:
    print_line(f"{process_prefix()}warning: {message}", file=sys.stderr)


def rich_text(text: str) -> Text:
    """Return text for `rich`: as `visible`, and without markup."""
    return Text(visible(text))


class Screen:
    """Prints text without interpreting markup. Characters that the console's encoding lacks are printed as "?".

    Of several processes, only the first one prints. In a notebook, lines are printed as plain text, which a cell shows
    in one output; rich would add one HTML output per line.
    """

    def __init__(self, quiet: bool = False):
        """With `quiet`, nothing is printed."""
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # for example on a cp1252 console
        self.in_notebook = Console().is_jupyter
        self.console = Console(
            highlight=False,
            soft_wrap=sys.stdout is None or not sys.stdout.isatty(),
            quiet=quiet or not is_first(),
            force_jupyter=False,
            force_terminal=False if self.in_notebook else None,  # the kernel sets FORCE_COLOR
        )
        self.warnings: list[str] = []  # printed lines of the kind, for the page
        self.notes: list[str] = []
        self._live: Live | None = None
        self._output: Any = None  # handle of the notebook output with the progress line
        self._last_line = 0.0

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_) -> None:
        """End the progress line, so that the cursor is visible again and an error message starts on a new line."""
        self.end_progress()

    def say(self, text: str = "") -> None:
        """Print one line. Warnings and notes are also kept: a page has them, too."""
        kind, _, line = text.partition(": ")
        kept = {"warning": self.warnings, "note": self.notes}.get(kind)
        if kept is not None:
            kept.append(text_on_page(line))
            result(**{f"{kind}s": kept})
        self.console.print(rich_text(text))

    def write(self, text: str) -> None:
        """Print a part of a line."""
        self.console.print(rich_text(text), end="", soft_wrap=True)

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print aligned rows of a name and a value."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(visible_line(f"  {name.ljust(width)}  {value}"))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], lines: bool = True) -> None:
        """Print a table, with `lines` between the rows."""
        grid = Table(title=rich_text(title), title_justify="left", show_lines=lines)
        for column in columns:
            grid.add_column(rich_text(column), overflow="fold")
        for row in rows:
            grid.add_row(*(rich_text(str(cell)) for cell in row))
        self.console.print(grid)

    def columns(self, rows: Sequence[Sequence[str]]) -> None:
        """Print aligned rows of cells, the first column to the left. Unlike in a table, cells are never wrapped."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *cells in rows:
            right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            self.say("  ".join([f"  {name.ljust(widths[0])}", *right]).rstrip())

    def progress(self, text: str, last: bool = False) -> None:
        """Show a progress line. A terminal redraws it in place, and a notebook replaces one output. Otherwise it is
        printed every few seconds, and the last one always."""
        if self.in_notebook:
            self._show_in_notebook(visible(text))
            if last:
                self.end_progress()
        elif self.console.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False, redirect_stderr=False)
                self._live.start()
            self._live.update(rich_text(text), refresh=True)
            if last:
                self.end_progress()
        elif last or time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(text)

    def end_progress(self) -> None:
        """End the live progress line. Later output starts below it, and the next progress line is printed at once."""
        self._last_line = 0.0
        self._output = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show_in_notebook(self, text: str) -> None:
        """Replace the text of the cell's progress output, or add that output."""
        if self.console.quiet:
            return
        from IPython.display import display  # installed where a notebook runs

        content = {"text/plain": text}
        if self._output is None:
            self._output = display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 run, 2 runs."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Return names joined as in a sentence: "PPO", "PPO and GRPO", "PPO, GRPO and RLOO"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def one_line(text: str) -> str:
    """Return text on one line of at most about 110 characters. Of a long text, the beginning and the end are kept: an
    answer is often at the end."""
    line = " ".join(text.split())
    return line if len(line) <= 110 else f"{line[:73]} ... {line[-36:]}"


def clock(seconds: float) -> str:
    """Return seconds as text: 45 s, 3:20, 1:02:05."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def number(value: float, decimals: int = 2, sign: str = "", small: bool = True) -> str:
    """Return a number with so many decimals, or with 4 significant digits if it is 100,000 or more. With `small`, for
    scores, whose unit can have any size, also if it would be 0 and is not the rounding error of a 0."""
    would_be_0 = small and 1e-12 < abs(value) < 0.5 * 10**-decimals
    return f"{value:{sign}.3e}" if would_be_0 or abs(value) >= 1e5 else f"{value:{sign}z.{decimals}f}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"

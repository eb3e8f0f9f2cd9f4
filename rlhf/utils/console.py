"""What a user sees: a plan, one live line, tables. Quiet libraries, and any console encoding."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhf.utils.errors import RLHFWarning

LINE_EVERY_S = 5  # where the output is a file or a pipe, a line at most this often


def quiet_libraries() -> None:
    """Keep deprecation warnings, progress bars of loading and retries of the hub out of the user's sight.

    Call it before the libraries are imported: bitsandbytes warns while it is (on CPUs with bfloat16).
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", RLHFWarning)
    warnings.showwarning = _show_warning
    threading.excepthook = _of_a_thread
    for name in ("transformers", "trl", "accelerate", "huggingface_hub", "datasets", "peft", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import datasets  # slow to import: not at the top, where `--help` would wait for it
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    datasets.disable_progress_bars()


def _show_warning(message, category, *_, **__) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _of_a_thread(error: threading.ExceptHookArgs) -> None:
    """TensorBoard's writer raises a disk's errors in its own thread, and again in ours, where they are told."""
    if not issubclass(error.exc_type, OSError):
        threading.__excepthook__(error)


# C0 and C1 controls (escape sequences begin with one), and what turns the direction of text around or hides it
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Text from a model, for people's eyes: control and direction characters by their numbers; lines and tabs stay."""
    return _UNSEEN.sub(lambda found: f"<U+{ord(found[0]):04X}>", text.replace("\r\n", "\n"))


class Screen:
    """Prints text as text: a reply that looks like markup, or does not fit the console's encoding, does no harm."""

    def __init__(self):
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a cp1252 console shows ? and goes on
        self.console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self._live: Live | None = None
        self._last_line = 0.0

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_) -> None:
        """Whatever ends the run, the cursor comes back and an error starts on a line of its own."""
        self.end_progress()

    def say(self, text: str = "") -> None:
        """One line."""
        self.console.print(Text(visible(text)))

    def write(self, text: str) -> None:
        """A piece of a line, as it comes."""
        self.console.print(Text(visible(text)), end="", soft_wrap=True)

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Aligned pairs of a name and what it is."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"  {name.ljust(width)}  {value}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], lines: bool = True) -> None:
        """`lines` between the rows: for cells of many lines."""
        grid = Table(title=Text(visible(title)), title_justify="left", show_lines=lines)
        for column in columns:
            grid.add_column(Text(visible(column)), overflow="fold")
        for row in rows:
            grid.add_row(*(Text(visible(str(cell))) for cell in row))
        self.console.print(grid)

    def progress(self, text: str, last: bool = False) -> None:
        """The live line: redrawn in place on a terminal; elsewhere printed now and then, and at the end."""
        if self.console.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False, redirect_stderr=False)
                self._live.start()
            self._live.update(Text(visible(text)), refresh=True)
            if last:
                self.end_progress()
        elif last or time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(text)

    def end_progress(self) -> None:
        """Leave the live line as it stands and go on below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: "PPO", "PPO and GRPO", "PPO, GRPO and RLOO"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def clock(seconds: float) -> str:
    """Seconds as a person reads them: 45 s, 3:20, 1:02:05."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def number(value: float) -> str:
    """Two decimals, and three digits with an exponent for a large number."""
    return f"{value:.2f}" if abs(value) < 1e5 else f"{value:.2e}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"

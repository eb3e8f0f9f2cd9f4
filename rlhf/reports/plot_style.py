"""The style of all pictures: colours for colour-blind readers, and text that is legible at a width of 370 pixels."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from rlhf.algorithms.table import ALGORITHMS
from rlhf.utils.files import atomic_write

# Okabe & Ito 2008, "Color Universal Design": safe for colour-blind readers
COLOURS = {"start": "#666666", "target": "#009E73", "above": "#0072B2", "below": "#D55E00"}
# of the algorithms, in the order of the table: the same palette without the colour of the KL target
ALGORITHM_COLOURS = ("#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "v", "P", "X", "*", "<", "p")
LINES = ("-", "--", ":", "-.")  # the next one when all colours are used
WIDTH = 6.4  # inches. At 370 pixels, 12 points are 9.6 pixels high
DOTS = 200  # per inch: 1,280 pixels, of which a page shows at most 640
STYLE = {
    "font.size": 12,
    "axes.titlesize": 12,
    "figure.titlesize": 13,
    "legend.fontsize": 11.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "text.parse_math": False,  # names of folders may contain a dollar sign
}
# characters in a row of a figure's title, and of its legend
TITLE_WIDTH = 64
LEGEND_WIDTH = 62
# height of a row in inches, and width of an entry's line in characters
ROW = 0.21
HANDLE = 6


class LineStyle(NamedTuple):
    """Colour, marker and line of an algorithm or of a group of runs."""

    colour: str
    marker: str  # in matplotlib's notation
    line: str = "-"  # in matplotlib's notation


def line_styles_of(algorithms: Iterable[str]) -> dict[str, LineStyle]:
    """Return the line style of each algorithm, by its position in the table, and of "start". Algorithms outside the
    table get the next styles. After six, the lines are dashed."""
    names = dict.fromkeys([*ALGORITHMS, *(algorithms := list(algorithms))])
    names.pop("start", None)
    lines = (line for line in cycle(LINES) for _ in ALGORITHM_COLOURS)
    styles = dict(zip(names, map(LineStyle, cycle(ALGORITHM_COLOURS), cycle(MARKERS), lines), strict=False))
    styles["start"] = LineStyle(COLOURS["start"], "D")
    return {name: styles[name] for name in algorithms}


def group_styles(algorithms: Sequence[str]) -> list[LineStyle]:
    """Return one line style per group, from the algorithm of each group. Colours and lines are distinct for up to 24.

    The first group of an algorithm has the algorithm's colour and marker. Further groups get colours that no other
    group has, and when these are used up, all colours again with dashed lines.
    """
    first = line_styles_of(algorithms)
    taken = {(style.colour, style.line) for style in first.values()}
    pairs = list(zip(ALGORITHM_COLOURS, MARKERS, strict=False))
    pairs = pairs[len(ALGORITHMS) :] + pairs[: len(ALGORITHMS)]
    every = [LineStyle(*pair, line) for line in LINES for pair in pairs]
    further = cycle([style for style in every if (style.colour, style.line) not in taken] or every)
    return [first.pop(algorithm) if algorithm in first else next(further) for algorithm in algorithms]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure without a window; sizes in inches. Draw on it inside `style()`."""
    return Figure(figsize=(width, height), dpi=DOTS, layout="constrained")


def style() -> rc_context:
    """Return the context manager for creating and drawing axes."""
    return rc_context(STYLE)


def finish(figure: Figure, title: str, neutral: Mapping[str, Artist] = {}) -> None:
    """Writes the title above the axes and one legend below them, with wrapped lines, and makes the figure higher by
    their rows. `neutral` are handles of labels that stand for several artists."""
    entries: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, neutral.get(label, handle))
    title = "\n".join(textwrap.fill(line, TITLE_WIDTH) for line in title.split("\n"))
    texts = [textwrap.fill(label, LEGEND_WIDTH) for label in entries]
    columns = max(1, (LEGEND_WIDTH + HANDLE) // (max(map(len, entries), default=1) + HANDLE))
    rows = sum(text.count("\n") + 1 for text in texts) / min(columns, max(1, len(texts)))
    figure.set_figheight(figure.get_figheight() + ROW * (rows + title.count("\n") + 2))
    figure.legend(list(entries.values()), texts, loc="outside lower center", ncols=columns)
    figure.suptitle(title)


def save_picture(figure: Figure, file: Path) -> None:
    """Writes the figure as PNG, atomically."""
    atomic_write(file, lambda staging: figure.savefig(staging, format="png"))


def as_data_url(figure: Figure) -> str:
    """Return the figure as a data URL, to embed it in a page."""
    held = io.BytesIO()
    figure.savefig(held, format="png")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()

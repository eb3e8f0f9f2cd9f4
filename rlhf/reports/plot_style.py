"""The style of all plots: colours for colour-blind readers, fonts that are legible at half size."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from rlhf.algorithms.table import ALGORITHMS
from rlhf.utils.files import atomic_write

# Okabe & Ito 2008, "Color Universal Design": safe for colour-blind readers
COLOURS = {"start": "#666666", "target": "#009E73", "above": "#0072B2", "below": "#D55E00"}
# of the algorithms, in the order of the table: the same palette without the colour of the KL target
ALGORITHM_COLOURS = ("#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "v", "P", "X", "*", "<", "p")
LINES = ("-", "--", ":", "-.")  # of groups, when all colours are used
DOTS = 150  # per inch: a plot of 8 inches is 1,200 pixels wide and is shown at half that size
STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "legend.fontsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "text.parse_math": False,  # names of folders may contain a dollar sign
}


class LineStyle(NamedTuple):
    """Colour, marker and line of an algorithm or of a group of runs."""

    colour: str
    marker: str  # in matplotlib's notation
    line: str = "-"  # in matplotlib's notation


def line_styles_of(algorithms: Iterable[str]) -> dict[str, LineStyle]:
    """Returns the line style of each algorithm, by its position in the table. Algorithms outside the table get the
    next colours and markers."""
    positions = enumerate(dict.fromkeys([*ALGORITHMS, *(algorithms := list(algorithms))]))
    styles = {name: LineStyle(_at(ALGORITHM_COLOURS, i), _at(MARKERS, i)) for i, name in positions}
    return {name: styles[name] for name in algorithms}


def _at(values: Sequence[str], position: int) -> str:
    return values[position % len(values)]


def group_styles(algorithms: Sequence[str]) -> list[LineStyle]:
    """Returns one line style per group, from the algorithm of each group. They are distinct for up to 24 groups.

    The first group of an algorithm has the algorithm's colour and marker. Further groups get colours that no other
    group has, and when these are used up, all colours again with dashed lines.
    """
    first = line_styles_of(algorithms)
    known = [line_style.colour for line_style in first.values()]
    colours = [*known, *spare_colours(), *ALGORITHM_COLOURS]
    pairs = [(colour, line) for line, colour in product(LINES, dict.fromkeys(colours))][len(known) :]
    known = [line_style.marker for line_style in first.values()]
    markers = [m for m in MARKERS if m not in known] or known
    further, styles = zip(cycle(pairs), cycle(markers), strict=False), []
    for number, algorithm in enumerate(algorithms):
        if algorithm not in algorithms[:number]:
            styles.append(first[algorithm])
        else:
            (colour, line), marker = next(further)
            styles.append(LineStyle(colour, marker, line))
    return styles


def spare_colours() -> Sequence[str]:
    """Returns the colours that no algorithm in the table uses."""
    return ALGORITHM_COLOURS[len(ALGORITHMS) :]


def colour_of(kind: str) -> str:
    """Returns the colour of an algorithm or of a role in COLOURS."""
    return COLOURS.get(kind) or line_styles_of([kind])[kind].colour


def marker_of(algorithm: str) -> str:
    """Returns the marker of an algorithm."""
    return line_styles_of([algorithm])[algorithm].marker


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure without a window; sizes in inches. Draw on it inside `style()`."""
    return Figure(figsize=(width, height), dpi=DOTS, layout="constrained")


def style() -> rc_context:
    """Returns the context manager for creating and drawing axes."""
    return rc_context(STYLE)


def save_picture(figure: Figure, file: Path) -> None:
    """Writes the figure as PNG, atomically."""
    atomic_write(file, lambda staging: figure.savefig(staging, format="png"))


def as_data_url(figure: Figure) -> str:
    """Returns the figure as a data URL, to embed it in a page."""
    held = io.BytesIO()
    figure.savefig(held, format="png")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()

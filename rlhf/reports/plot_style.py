"""What every picture has: colours that survive colour blindness, one style, sizes that can be read at 600 pixels."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from rlhf.algorithms.table import ALGORITHMS
from rlhf.utils.files import atomic_write

# Okabe & Ito 2008, "Color Universal Design": told apart with any kind of colour vision, and in grey
COLOURS = {"start": "#666666", "target": "#009E73", "above": "#0072B2", "below": "#D55E00"}
OTHER_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of the same set
OTHER_MARKERS = ("v", "P", "X", "*")
DOTS = 150  # per inch: 8 inches wide are 1,200 pixels, and half of that on a page
STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "text.parse_math": False,  # a folder's name may hold a dollar sign
}


class LineStyle(NamedTuple):
    """How a picture shows an algorithm."""

    colour: str
    marker: str  # of matplotlib


def line_styles_of(algorithms: Iterable[str]) -> dict[str, LineStyle]:
    """The look of each algorithm of a picture. Algorithms that the table lacks get colours and markers of no row."""
    used = {row.marker for row in ALGORITHMS.values()}
    colours = cycle(spare_colours() or OTHER_COLOURS)
    markers = cycle([marker for marker in OTHER_MARKERS if marker not in used] or OTHER_MARKERS)
    line_styles = {}
    for name in dict.fromkeys(algorithms):
        row = ALGORITHMS.get(name)
        line_styles[name] = LineStyle(row.colour, row.marker) if row else LineStyle(next(colours), next(markers))
    return line_styles


def spare_colours() -> list[str]:
    """The colours that no algorithm of the table has."""
    used = {row.colour for row in ALGORITHMS.values()}
    return [colour for colour in OTHER_COLOURS if colour not in used]


def colour_of(kind: str) -> str:
    """The colour of an algorithm, or of a role in COLOURS."""
    return COLOURS.get(kind) or line_styles_of([kind])[kind].colour


def marker_of(algorithm: str) -> str:
    """The marker of an algorithm."""
    return line_styles_of([algorithm])[algorithm].marker


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches, that no window system knows of. Draw on it inside `style()`."""
    return Figure(figsize=(width, height), dpi=DOTS, layout="constrained")


def style() -> rc_context:
    """The context in which axes are made and drawn."""
    return rc_context(STYLE)


def save_picture(figure: Figure, file: Path) -> None:
    """As PNG, complete or not at all."""
    atomic_write(file, lambda staging: figure.savefig(staging, format="png"))


def as_data_url(figure: Figure) -> str:
    """The picture as text, for a page that is one file."""
    held = io.BytesIO()
    figure.savefig(held, format="png")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()

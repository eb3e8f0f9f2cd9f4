"""What every picture has: colours that survive colour blindness, one style, sizes that can be read at 600 pixels."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from rlhf.algorithms.table import ALGORITHMS
from rlhf.utils.files import put_in_place

# Okabe & Ito 2008, "Color Universal Design": told apart with any kind of colour vision, and in grey
COLOURS = {"start": "#666666", "target": "#009E73", "above": "#0072B2", "below": "#D55E00"}
OTHER_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of the same set
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


def colour_of(kind: str) -> str:
    """The colour of an algorithm, or of a role in COLOURS; one that is in neither has a colour of the others."""
    return COLOURS.get(kind) or (ALGORITHMS[kind].colour if kind in ALGORITHMS else OTHER_COLOURS[0])


def marker_of(algorithm: str) -> str:
    return ALGORITHMS[algorithm].marker if algorithm in ALGORITHMS else "^"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches, that no window system knows of. Draw on it inside `style()`."""
    return Figure(figsize=(width, height), dpi=DOTS, layout="constrained")


def style() -> rc_context:
    """The context in which axes are made and drawn."""
    return rc_context(STYLE)


def save_picture(figure: Figure, file: Path) -> None:
    """As PNG, complete or not at all."""
    put_in_place(file, lambda beside: figure.savefig(beside, format="png"))


def as_data_url(figure: Figure) -> str:
    """The picture as text, for a page that is one file."""
    held = io.BytesIO()
    figure.savefig(held, format="png")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()

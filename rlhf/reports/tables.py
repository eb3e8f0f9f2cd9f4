"""Tables of figures as rows of text, which console, page and model card show. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rlhf.utils.console import clock, number
from rlhf.utils.statistics import interval

# figure -> label with unit, decimals or another format
LABELS = {
    "score": ("score", 3),
    "score_sd": ("score (standard deviation)", 3),
    "score_of_best": ("best score per prompt", 3),
    "score_of_worst": ("worst score per prompt", 3),
    "judge": ("judge", 3),
    "gold": ("gold quality (not used in RL training)", 3),
    "kl": ("KL (nats/sequence)", 2),
    "kl_per_token": ("KL (nats/token)", 3),
    "teacher_kl": ("KL to the teacher (nats/sequence)", 2),
    "perplexity": ("perplexity", 2),
    "bits_per_byte": ("bits per byte of the same text, after the model's own prompts", "{:z.4g}"),
    "length": ("completion length (tokens)", 1),
    "characters": ("completion length (characters)", 1),
    "eos_rate": ("ended with EOS", "{:z.0%}"),
    "distinct_2": ("distinct-2", 3),
    "repetition": ("repeated 4-grams", "{:z.1%}"),
    "score_length_correlation": ("score-length correlation", 2),
    # of a run
    "score_rise_in_start_sd": ("score change (standard deviations of the start model's scores)", 3),
    "kl_last_10_updates": ("KL (mean of the last 10 updates)", 3),
    "episodes": ("episodes", "{:,.0f}"),
    "resampled_episodes": ("of these, drawn by dynamic sampling", "{:,.0f}"),
    "updates": ("updates", "{:,.0f}"),
    "optimizer_steps": ("optimizer steps", "{:,.0f}"),
    "completion_tokens": ("completion tokens", "{:,.0f}"),
    "seconds": ("training time (wall clock)", "clock"),
    "cpu_seconds": ("CPU time, all cores", "clock"),
    "peak_memory_gib": ("peak memory (GiB)", 2),
}
SCORES = ("score", "score_sd", "score_of_best", "score_of_worst", "judge", "gold")
SIGNED = ("score", "score_of_best", "score_of_worst", "score_length_correlation", "score_rise_in_start_sd")
ENDS = ("_before", "_after")


class TextTable(NamedTuple):
    """A table. The first column has the names of the rows."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


def without_empty(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> TextTable:
    """Return a table without the columns in which no row has a value."""
    kept = [i for i in range(len(columns)) if any(row[i] != "-" for row in rows)]
    return TextTable(caption, [columns[i] for i in kept], [[row[i] for i in kept] for row in rows])


def figure_label(figure: str, judges: Sequence[str] = ()) -> str:
    """Return a figure's label with its unit. `judges` are the names of the judges, the deciding one first."""
    if figure.endswith(ENDS):
        name, _, end = figure.rpartition("_")
        return f"{figure_label(name)} {end}"
    kind, _, name = figure.partition("/")
    if kind.startswith("pass@"):
        return f"{kind}, {name}"
    if kind in ("variant", "eval"):
        return name
    label = LABELS[kind][0]
    return label.replace("judge", f"judge {name or judges[0]}") if len(judges) > 1 else label


def figure_text(figure: str, value: float | None, sign: str = "") -> str:
    """Formats a figure for tables; "-" if it was not computed. `sign` "+" is for a change."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "not finite"
    for end in ENDS:
        figure = figure.removesuffix(end)
    kind = figure.partition("/")[0]
    form = LABELS.get(kind, LABELS["judge"])[1]
    if isinstance(form, int):
        return number(value, form, "+" if figure in SIGNED else sign, small=kind in SCORES or kind not in LABELS)
    return clock(value) if form == "clock" else form.replace("{:", f"{{:{sign}").format(value)


def figure_names(models: Sequence[dict[str, float | None]]) -> list[str]:
    """Return the names of the figures that at least one model has, in the order of tables."""
    longest = max(models, key=len)  # a model without pass@k may have fewer
    names = dict.fromkeys([*longest, *(name for model in models for name in model)])
    return [name for name in names if any(model.get(name) is not None for model in models)]


# --- before and after ------------------------------------------------------------------------------------------------


class FigureRow(NamedTuple):
    """One figure of several models, the first of which is the start model."""

    figure: str
    values: list[float | None]  # one for each model; None: not computed
    interval: Sequence[float] | None = None  # the 95% interval of the change from the first to the last model


def before_and_after(
    caption: str, columns: Sequence[str], rows: Sequence[FigureRow], judges: Sequence[str] = ()
) -> TextTable:
    """Return the figures of models, and the change from the first one to the last one with its interval."""
    cells = []
    for figure, values, ends in rows:
        change = "-"
        if None not in (values[0], values[-1]):
            change = figure_text(figure, values[-1] - values[0], "+") + (f" ({interval(*ends)})" if ends else "")
        cells.append([figure_label(figure, judges), *(figure_text(figure, value) for value in values), change])
    return without_empty(caption, ["", *columns, "change (95% interval)"], cells)


def rows_of_run(figures: dict, between: dict | None = None) -> list[FigureRow]:
    """Return what a run's figures have before and after training. Null in run.json stands for a number that is not
    finite.

    Args:
        figures: NAME_before, NAME_after and, if there is an interval, NAME_rise_interval, as `compare` returns them.
        between: figures of the model after another update, by NAME. None: only the first and the last are shown.
    """
    names = [key.removesuffix("_before") for key in figures if key.endswith("_before")]
    kinds = ["score", "eval", *LABELS]
    rows = []
    for name in sorted(names, key=lambda name: kinds.index(name.partition("/")[0])):
        values = [figures[f"{name}_before"], figures[f"{name}_after"]]
        known = [math.nan if value is None else value for value in values]
        if between is not None:
            known.insert(1, math.nan if between.get(name, 0) is None else between.get(name))
        rows.append(FigureRow(name, known, figures.get(f"{name}_rise_interval")))
    return rows

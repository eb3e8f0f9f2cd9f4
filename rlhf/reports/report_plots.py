"""Plots of evaluated models: distributions of scores and lengths, and each run's score over its KL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from rlhf.algorithms.table import ALGORITHMS
from rlhf.analysis.curves import RunCurves
from rlhf.analysis.evaluator import GenerationResults
from rlhf.analysis.statistics import scored
from rlhf.reports.curve_chart import Group, groups_of
from rlhf.reports.plot_style import COLOURS, colour_of, new_figure, spare_colours, style

BINS = 24
LEGEND_WIDTH, LINE_WIDTH = 100, 9  # characters in a row of the legend, and the width of an entry's line in characters
BESIDE, SHORT_NAME = 4, 16  # groups, and characters of a name, up to which the legend is inside the axes
NARROW_LEGEND, LEGEND_ROW = 78, 0.2  # characters in a row of a legend below the axes, and its height in inches
SIDES = ((1, 0.6), (1, -0.6), (-1, 0.6), (-1, -0.6), (0, 1), (0, -1))
LABEL_AT = [(x * away, y * away) for away in (14, 22, 30, 40, 52) for x, y in SIDES]  # points from what it labels
LETTER = (6.5, 11.0)  # width and height of a digit in a label, points
MEAN_WIDTH = 2.5  # of the lines of means, points
FAR = 3  # the x axis ends at this many times the KL that 90% of the evaluations stay below


def colours_of(kinds: Sequence[str]) -> list[str]:
    """Returns one colour per model: that of "start" or of the algorithm, or a spare one if it is taken or unknown."""
    spare, taken = iter(spare_colours()), []
    for kind in kinds:
        own = colour_of(kind) if kind in COLOURS or kind in ALGORITHMS else None
        taken.append(own if own is not None and own not in taken else next(spare, COLOURS["start"]))
    return taken


def distributions(
    models: Sequence[GenerationResults], kinds: Sequence[str], colours: Sequence[str] | None = None
) -> Figure:
    """Plots histograms of the scores and lengths of all completions, with a dashed line at each mean.

    Args:
        models: the results of each model.
        kinds: "start" or the algorithm of each model.
        colours: the colour of each model. None: those of `kinds`.
    """
    with style():
        figure = new_figure(10, 4.2)
        panels = figure.subplots(1, 2)
        for axes, name, unit in zip(
            panels, ("scores", "lengths"), ("score", "completion length (tokens)"), strict=True
        ):
            values = [scored(getattr(m, name)) for m in models]
            edges = _edges(np.concatenate(values))
            for model, colour, of_model in zip(models, colours or colours_of(kinds), values, strict=True):
                shares, _ = np.histogram(of_model, edges)
                axes.stairs(shares / max(len(of_model), 1), edges, color=colour, linewidth=2, label=model.label)
                if len(of_model):
                    axes.axvline(of_model.mean(), color=colour, linestyle="--", linewidth=1.2)
            axes.set_xlabel(unit)
            axes.set_ylabel("share of completions")
            axes.set_ylim(bottom=0)
        panels[0].set_title("Scores (dashed: mean)")
        panels[1].set_title("Lengths (dashed: mean)")
        handles, labels = panels[0].get_legend_handles_labels()
        columns = max(1, min(4, LEGEND_WIDTH // (max(map(len, labels)) + LINE_WIDTH)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def _edges(values: np.ndarray) -> np.ndarray:
    """Returns the edges of about 24 bins. For integers each bin has the same number of them."""
    if len(values) == 0:  # no completion has a score
        return np.array([-0.5, 0.5])
    low, high = values.min(), values.max()
    if np.issubdtype(values.dtype, np.integer):
        step = -(-(high - low + 1) // BINS)
        return np.arange(low, high + step + 1, step) - 0.5
    return np.linspace(low, high, BINS + 1) if high > low else np.array([low - 0.5, low + 0.5])


def score_against_kl(runs: Sequence[RunCurves], labels: Sequence[str] = ()) -> Figure:
    """Plots the evaluation score over the KL to the start model, one line per run, with the mean of each group.

    The end of each run is labelled with its seed. Evaluations beyond the x axis are marked with an arrow and their KL.
    `labels` are names for the groups.
    """
    groups = groups_of(runs, labels)
    with style():
        figure = new_figure(8, 6 + LEGEND_ROW * max(0, len(groups) - BESIDE))
        axes = figure.subplots()
        drawn, missing = _drawn_and_missing(groups)
        for group in groups:
            _draw_group(axes, group, [(kl, y) for of, _, kl, y in drawn if of is group])
        if drawn:
            starts = {(kl[0], score[0]) for _, _, kl, score in drawn}
            axes.plot(*zip(*starts, strict=True), "D", color=COLOURS["start"], ms=8, ls="none", label="start model")
            axes.margins(y=0.1)  # room for the labels
            _limit_x(axes, [(kl, score) for _, _, kl, score in drawn])
            _draw_legend(figure, axes, groups)
        if missing:
            text = "no evaluation was logged by\n" + "\n".join(missing)
            axes.text(0.01, 0.99, text, transform=axes.transAxes, va="top", fontsize=10)
        axes.set(xlabel="KL to the start model (nats/sequence)", ylabel="evaluation score")
        figure.suptitle("Evaluation score and KL during training", fontsize=14)
        several = "thin line: one run; thick line: mean over runs; " if len(drawn) > len(groups) else ""
        axes.set_title(f"{several}large marker: end of a run, with its seed", fontsize=11)
        figure.draw_without_rendering()  # the labels need the final layout
        _label_ends(axes, [(kl[-1], y[-1], str(run.run.seed), of.colour) for of, run, kl, y in drawn])
    return figure


def _drawn_and_missing(
    groups: Sequence[Group],
) -> tuple[list[tuple[Group, RunCurves, np.ndarray, np.ndarray]], list[str]]:
    """Returns each run with KL and score of its evaluations, and the names of the runs that logged none."""
    drawn, missing = [], []
    for group in groups:
        for run in group.runs:
            if {"eval/kl_divergence", "eval/score"} <= run.scalars.keys():
                drawn.append((group, run, *_evaluations(run)))
            else:
                missing.append(f"{group.name}, seed {run.run.seed}")
    return drawn, missing


def _draw_legend(figure: Figure, axes: Axes, groups: Sequence[Group]) -> None:
    """Inside the axes if there are few groups with short names, otherwise below them, with each group's line."""
    if len(groups) <= BESIDE and max(len(group.name) for group in groups) <= SHORT_NAME:
        axes.legend(loc="lower right")
        return
    handles, texts = axes.get_legend_handles_labels()
    for group in groups:
        if group.name in texts:
            colour, marker, line = group.line_style
            shown = {"marker": marker, "ls": line, "lw": MEAN_WIDTH, "ms": 8, "mec": "black", "mew": 0.5}
            handles[texts.index(group.name)] = Line2D([], [], color=colour, **shown)
    columns = max(1, min(3, NARROW_LEGEND // (max(map(len, texts)) + LINE_WIDTH)))
    figure.legend(handles, texts, loc="outside lower center", ncols=columns)


def _evaluations(run: RunCurves) -> tuple[np.ndarray, np.ndarray]:
    """Returns the KL and the score of a run's evaluations that have both."""
    kl, score = (run.scalars[tag] for tag in ("eval/kl_divergence", "eval/score"))
    _, of_kl, of_score = np.intersect1d(kl.updates, score.updates, return_indices=True)
    return kl.values[of_kl], score.values[of_score]


def _draw_group(axes: Axes, group: Group, lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Draws the runs of one group, and their mean if there are several with the same number of evaluations."""
    colour, marker, line = group.line_style
    several = len(lines) > 1 and len({len(kl) for kl, _ in lines}) == 1
    for kl, score in lines:
        width, alpha = (0.8, 0.35) if several else (1.5, 0.7)
        axes.plot(kl, score, marker=".", ls=line, color=colour, lw=width, ms=5, alpha=alpha)
    if several:
        mean = [np.mean([pair[i] for pair in lines], axis=0) for i in (0, 1)]
        axes.plot(*mean, ls=line, color=colour, lw=MEAN_WIDTH, alpha=0.8)
    if lines:
        ends = [(kl[-1], score[-1]) for kl, score in lines]
        end_style = {"mec": "black", "mew": 0.5, "ms": 8, "ls": "none", "zorder": 4}
        axes.plot(*zip(*ends, strict=True), marker, color=colour, label=group.name, **end_style)


def _limit_x(axes: Axes, lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Ends the x axis before evaluations with a far larger KL, and marks each of them at the edge."""
    kl, score = (np.concatenate([line[i] for line in lines]) for i in (0, 1))
    far = kl > FAR * np.quantile(kl, 0.9)
    if not far.any():
        return
    end = 1.15 * kl[~far].max()
    axes.set_xlim(-0.05 * end, end)
    for x, y in zip(kl[far], score[far], strict=True):
        axes.plot(end, y, ">", color="black", ms=7, clip_on=False, zorder=5)
        where = {"textcoords": "offset points", "ha": "right", "va": "center", "fontsize": 10}
        axes.annotate(f"KL {x:.3g}", (end, y), (-8, 0), **where)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Labels points (x, y, text, colour), each near it and clear of other labels, ends and mean lines."""
    pixels = 72 / axes.figure.dpi  # points per pixel
    points = [tuple(axes.transData.transform((x, y)) * pixels) for x, y, _, _ in ends]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    for line in axes.lines:
        if line.get_linewidth() == MEAN_WIDTH:
            along = axes.transData.transform(line.get_path().interpolated(30).vertices) * pixels
            taken += [(x - 2, y - 2, x + 2, y + 2) for x, y in along]
    for (x, y, text, colour), point in zip(ends, points, strict=True):
        width, height = LETTER[0] * len(text), LETTER[1]
        boxes = [_box_at(point, offset, width, height) for offset in LABEL_AT]
        free = [i for i, box in enumerate(boxes) if not any(_overlap(box, other) for other in taken)]
        best = free[0] if free else 0
        taken.append(boxes[best])
        line = {"arrowstyle": "-", "lw": 0.6, "color": colour, "shrinkA": 0, "shrinkB": 3}
        where = {
            "textcoords": "offset points",
            "ha": "center",
            "va": "center",
            "zorder": 6,
            "arrowprops": line if best >= len(SIDES) else None,
        }
        halo = [withStroke(linewidth=2.5, foreground="white")]
        axes.annotate(text, (x, y), LABEL_AT[best], color=colour, fontsize=10, path_effects=halo, **where)


def _box_at(
    point: tuple[float, float], offset: tuple[float, float], width: float, height: float
) -> tuple[float, float, float, float]:
    """Returns left, bottom, right and top of a label that is centred at an offset from a point."""
    x, y = point[0] + offset[0], point[1] + offset[1]
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]

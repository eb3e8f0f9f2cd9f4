"""Plots the training curves of runs: loss, learning rate, mean reward, and KL with its target.

With topics there are two more panels: score and KL by topic.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rlhf.algorithms.kl_control import KL_BAND
from rlhf.analysis.curves import Curve, RunCurves, running_mean, seeds_band
from rlhf.reports.curve_chart import Chart, Group, Panel, title
from rlhf.reports.plot_style import colour_of, new_figure, style
from rlhf.utils.console import listed

CUT, FAR = 0.02, 3  # the y axis leaves out 2% of the values at each end if it would be 3 times as long with them
LEGEND_WIDTH = 118  # characters in a row of the legend
TOPICS_DRAWN = 8  # at most, to keep the lines distinguishable
DASHES = {"solid": "-", "dashed": "--", "dotted": ":", "dash-dotted": "-."}  # of the groups in a topic panel
THIN, THICKER = 1.8, 1.4  # points: the thinnest line, and the step to the next thicker one
FEW = 4  # groups, up to which all of them have entries for their evaluations in the legend
LEGEND_ROW, LEGEND_ROWS = 0.24, 5  # inches; rows of a legend for which the figure has space
EVALUATIONS, TARGETS = "evaluation on held-out prompts", "dotted: KL target of a group"  # entries in the legend
TITLE_WIDTH = 42  # characters above a panel


def draw(chart: Chart) -> Figure:
    """Draws all panels on a figure that is 1,500 pixels wide."""
    heights = [3, 4, 4] if chart.topics else [3, 4]  # loss and learning rate need less space
    with style():
        figure = new_figure(10, 1.15 * sum(heights) + 1.2)
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
        grid = figure.subplots(len(heights), 2, sharex=True, height_ratios=heights)
        for axes, panel in zip(grid[:2].flat, chart.panels, strict=True):
            _draw_panel(axes, chart, panel)
        if chart.topics:
            _draw_topics(grid[2, 0], chart, "score", "Score by topic", "score")
            _draw_topics(grid[2, 1], chart, "kl", "KL by topic", "nats/sequence")
        for axes in grid[-1]:
            axes.set_xlabel(chart.axis.label)
        grid[0, 1].yaxis.set_major_formatter(FuncFormatter(power_of_ten(grid[0, 1].get_ylim()[1])))
        _draw_legend(figure, chart, grid.flat)
        figure.suptitle(title(chart))
    return figure


def _draw_legend(figure: Figure, chart: Chart, panels: Iterable[Axes]) -> None:
    """One legend for all panels, with one column per group if that fits."""
    entries = {}
    for axes in panels:
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = [f"{group.name}," for group in chart.groups]
    order = sorted(
        entries, key=lambda label: next((i for i, n in enumerate(names) if label.startswith(n)), len(names))
    )
    longest = max((len(line) for label in order for line in label.split("\n")), default=1)
    wanted = len(chart.groups) + 1 if chart.runs[1:] and not chart.topics else 4
    columns = max(1, min(wanted, LEGEND_WIDTH // (longest + 5)))
    rows = math.ceil(len(order) / columns)
    columns = math.ceil(len(order) / max(1, rows))  # fills all columns evenly
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * max(0, rows - LEGEND_ROWS))
    if EVALUATIONS in entries and chart.runs[1:]:  # of several groups, so in no group's colour
        entries[EVALUATIONS] = Line2D([], [], ls="none", marker="o", mfc="white", mec="black")
    if TARGETS in entries:
        entries[TARGETS] = Line2D([], [], ls=":", color="black")
    figure.legend([entries[label] for label in order], order, loc="outside lower center", ncols=max(1, columns))


def power_of_ten(highest: float):
    """Returns a tick formatter with the same power for all ticks, such as 1.5e-4."""
    power = math.floor(math.log10(highest)) if highest > 0 else 0
    return lambda value, _: f"{value / 10**power:.3g}e{power}" if value else "0"


def _draw_panel(axes: Axes, chart: Chart, panel: Panel) -> None:
    _label_axes(axes, chart, panel.title, panel.unit)
    missing, values, marks = [], [], []
    for number, group in enumerate(chart.groups):
        found = group.with_tag(panel.tag)
        if len(found) < len(group.runs):
            of = (
                f"\nby {len(group.runs) - len(found)} of {len(group.runs)} {group.name} runs" if chart.runs[1:] else ""
            )
            missing.append(f"{panel.tag}\nwas not logged{of}")
        if found:
            values += _draw_group(axes, chart, panel, group, found, _width(chart, panel, number))
        marks += _draw_evaluations(axes, chart, panel, group)
    if panel.tag.startswith("kl_"):
        marks += _draw_target(axes, chart, panel)
    if missing:
        _write_note(axes, missing, empty=not values)
    elif not any(np.isfinite(y).any() for _, y in values):
        _write_note(axes, [f"no value of {panel.tag}\nis finite"], empty=True)
    elif panel.smoothed:
        _limit_y(axes, values, marks)


def _label_axes(axes: Axes, chart: Chart, title: str, unit: str) -> None:
    axes.set(title=title, ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=chart.x != "time"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def _draw_topics(axes: Axes, chart: Chart, kind: str, title: str, unit: str) -> None:
    """Draws one line per topic and group, with gaps while other topics were trained.

    Each group has its own dashes. Several seeds are averaged at the updates that all of them have.
    """
    drawn, left = chart.topics[:TOPICS_DRAWN], len(chart.topics) - TOPICS_DRAWN
    groups = list(zip(chart.groups, DASHES, strict=False))
    dashed = ", ".join(f"{group.name} {dashes}" for group, dashes in groups[1:])
    _label_axes(axes, chart, textwrap.fill(f"{title} ({dashed})" if dashed else title, TITLE_WIDTH), unit)
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(drawn)))  # distinguishable in grey, too
    for topic, colour in zip(drawn, colours, strict=True):
        label = f"topic {topic}"
        for group, dashes in groups:
            found = group.with_tag(f"topic/{topic}/{kind}")
            updates = _shared_updates(found)
            if updates:
                x, y = _means_at(chart, found, updates, chart.smooth)
                breaks = np.flatnonzero(np.diff(updates) > 1) + 1
                x, y = np.insert(x, breaks, np.nan), np.insert(y, breaks, np.nan)
                _line(axes, x, y, color=colour, ls=DASHES[dashes], lw=1.8, label=label)
                label = None  # one entry per topic in the legend
    more = [f"{left} more topics: see the CSV table"] if left > 0 else []
    more += [f"{group.name} is not drawn: see the CSV table" for group in chart.groups[len(DASHES) :]]
    if more:
        axes.text(0.98, 0.98, "\n".join(more), transform=axes.transAxes, ha="right", va="top", fontsize=10)


def _shared_updates(found: Sequence[tuple[RunCurves, Curve]]) -> list[int]:
    """Returns the updates at which all curves have a point."""
    return sorted(set.intersection(*(set(curve.updates.tolist()) for _, curve in found))) if found else []


def _means_at(
    chart: Chart, found: Sequence[tuple[RunCurves, Curve]], updates: Sequence[int], span: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Returns x and the smoothed values at these updates, averaged over the curves."""
    at = [np.isin(curve.updates, updates) for _, curve in found]
    xs = [chart.axis.of(*pair)[here] for pair, here in zip(found, at, strict=True)]
    lines = [running_mean(c.updates, c.finite, span)[here] for (_, c), here in zip(found, at, strict=True)]
    return np.mean(xs, axis=0), np.mean(lines, axis=0)


def _write_note(axes: Axes, lines: Sequence[str], empty: bool) -> None:
    """Writes into the middle of a panel which data are missing. `empty`: the panel has no data."""
    paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    axes.text(0.5, 0.5, "\n".join(lines), transform=axes.transAxes, ha="center", va="center", bbox=paper)
    if empty:
        axes.set_yticks([])


def _width(chart: Chart, panel: Panel, number: int) -> float:
    """Returns a group's line width. Lines that are drawn first are thicker, so that equal lines remain visible."""
    drawn_later = max(min(len(chart.groups), FEW), 2) - 1 - min(number, FEW - 1)
    return THIN + THICKER * (int(number == 0) if panel.smoothed else drawn_later)


def _draw_group(
    axes: Axes, chart: Chart, panel: Panel, group: Group, found: list[tuple[RunCurves, Curve]], width: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draws a group's line, with the unsmoothed values of a single run or the band of several runs.

    Returns x and y of everything that was drawn.
    """
    xs = [chart.axis.of(run, curve) for run, curve in found]
    span, drawn = panel.span(chart.smooth), []
    if len(chart.runs) == 1 and span > 1:
        _line(axes, xs[0], found[0][1].finite, color=group.colour, lw=0.8, alpha=0.4, label="each update")
        drawn.append((xs[0], found[0][1].finite))
    lines = [running_mean(curve.updates, curve.finite, span) for _, curve in found]
    x, lowest, mean, highest = seeds_band(xs, lines)
    if len(found) > 1:
        axes.fill_between(x, lowest, highest, color=group.colour, alpha=0.2, lw=0)
    label = group.label if len(chart.runs) > 1 else chart.averaged if panel.smoothed else None
    _line(axes, x, mean, color=group.colour, ls=group.line_style.line, lw=width, label=label)
    return [*drawn, (x, lowest), (x, highest)]


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, **line_style: Any) -> None:
    """Draws a line. A value without finite neighbours is drawn as a dot."""
    finite = np.concatenate([[False], np.isfinite(y), [False]])
    alone = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    axes.plot(x, y, marker="." if alone.any() else None, markevery=alone.nonzero()[0].tolist(), **line_style)


def _draw_evaluations(axes: Axes, chart: Chart, panel: Panel, group: Group) -> list[np.ndarray]:
    """Draws the mean evaluation of a group as markers, at the updates that all runs have. Returns y."""
    found = group.with_tag(panel.evaluation)
    shared = _shared_updates(found)
    if not shared:
        return []
    x, y = _means_at(chart, found, shared)
    name = f"{group.name}, held-out prompts" if 1 < len(chart.groups) <= FEW else EVALUATIONS
    line_style = {"mfc": group.colour, "mec": "black", "ms": 6, "ls": "none", "zorder": 3}
    axes.plot(x, y, group.line_style.marker, label=name, **line_style)
    return [y]


def _draw_target(axes: Axes, chart: Chart, panel: Panel) -> list[np.ndarray]:
    """Draws the KL target of each update, and its band if beta is adapted. Returns the y values that were drawn."""
    if chart.held is None:
        if chart.runs[0].targets is None and len(chart.aims) == 1:
            axes.set_title(f"{panel.title} (beta fixed)")
        return _draw_targets_of_groups(axes, chart, panel) if chart.same_unit else []
    lines = defaultdict(list)  # phases of runs can start at different x; otherwise one line is enough
    for group in chart.groups:
        for run, curve in group.with_tag(panel.tag):
            length = {"updates": run.planned, "episodes": run.length_in_episodes, "time": run.algorithm}[chart.x]
            lines[length if len(chart.held.targets) > 1 else None].append((group, run, curve))
    drawn = []
    for found in lines.values():
        _, run, curve = max(
            found, key=lambda entry: chart.axis.of(*entry[1:])[-1]
        )  # the longest line covers the others
        held = run.targets
        x = np.append(0, chart.axis.of(run, curve))  # the target holds from the start of the first update
        nats = np.array([held.target_of(int(update)).nats for update in (0, *curve.updates)])
        names = dict.fromkeys(group.name for group, _, _ in found)
        colour = colour_of("target") if len(lines) == 1 else found[0][0].colour
        whose = "" if len(lines) == 1 else f"{listed(list(names))}, "
        of = "beta fixed" if held.horizon is None else f"band: {KL_BAND[0]:g} to {KL_BAND[1]:g} x"
        label = f"{whose}KL target {', '.join(f'{t.nats:g}' for t in held.targets)}/{chart.per}\n({of})"
        axes.plot(x, nats, color=colour, lw=1.5, ls="--", drawstyle="steps-pre", label=label, zorder=2.5)
        drawn.append(nats)
        if held.horizon is not None:
            axes.fill_between(x, KL_BAND[0] * nats, KL_BAND[1] * nats, step="pre", color=colour, alpha=0.12, lw=0)
            drawn += [KL_BAND[0] * nats, KL_BAND[1] * nats]
    return drawn


def _draw_targets_of_groups(axes: Axes, chart: Chart, panel: Panel) -> list[np.ndarray]:
    """Draws the KL target of each group as a dotted line of its colour. Returns the y values that were drawn."""
    drawn, label = [], TARGETS
    for group in chart.groups:
        found = [(run, curve) for run, curve in group.with_tag(panel.tag) if run.targets is not None]
        if found:
            run, curve = max(found, key=lambda pair: chart.axis.of(*pair)[-1])
            x = np.append(0, chart.axis.of(run, curve))
            nats = np.array([run.targets.target_of(int(update)).nats for update in (0, *curve.updates)])
            axes.plot(x, nats, color=group.colour, lw=1.5, ls=":", drawstyle="steps-pre", label=label, zorder=2.5)
            drawn.append(nats)
            label = None  # one entry in the legend
    return drawn


def _limit_y(axes: Axes, values: Sequence[tuple[np.ndarray, np.ndarray]], marks: Sequence[np.ndarray]) -> None:
    """Leaves out a few extreme values if they would flatten all others, and marks each with an arrow at the edge.

    `values` are x and y of the lines; `marks` are y values that must stay visible.
    """
    x, y = (np.concatenate([pair[i] for pair in values]) for i in (0, 1))
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    kept = [np.quantile(y, [CUT, 1 - CUT]), *(mark[np.isfinite(mark)] for mark in marks)]
    low, high = np.concatenate(kept).min(), np.concatenate(kept).max()
    spread = high - low
    if not 0 < FAR * spread < y.max() - y.min():
        return
    low, high = low - 0.3 * spread, high + 0.3 * spread
    axes.set_ylim(low, high)
    above, below = y > high, y < low
    for outside, edge, marker in ((above, 1, "^"), (below, 0, "v")):
        at = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 4}
        axes.plot(x[outside], np.full(outside.sum(), edge), marker, color="black", ms=5, ls="none", **at)
    reach = [f"up to {y.max():.3g}"] * bool(above.any()) + [f"down to {y.min():.3g}"] * bool(below.any())
    text = f"arrows: values {' and '.join(reach)}\nare outside the axis"
    axes.text(0.98, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=10)

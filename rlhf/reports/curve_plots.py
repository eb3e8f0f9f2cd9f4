"""Draw the training curves of one run, or of groups of runs: loss, learning rate, mean reward, and KL against its
target; if topics were trained in turn, score and KL by topic, too."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rlhf.algorithms.kl_control import KL_BAND
from rlhf.analysis.curves import Curve, RunCurves, running_mean, seeds_band
from rlhf.reports.curve_chart import Chart, Group, Panel
from rlhf.reports.plot_style import colour_of, new_figure, style
from rlhf.utils.console import listed

FAR = 10  # a panel whose values reach this many times farther than 96% of them do shows the 96%
WIDE = 98  # letters that fit beside each other in two columns of the legend
TOPICS_DRAWN = 8  # lines that can still be told apart
DASHES = {"solid": "-", "dashed": "--", "dotted": ":", "dash-dotted": "-."}  # of the algorithms in a topic's panel
THIN, THICKER = 1.8, 1.4  # points: the thinnest line, and the step to the next thicker one
TITLE_WIDTH = 42  # letters above a panel
CUT = 0.02  # share of the values at either end that such a panel may leave out


def draw(chart: Chart) -> Figure:
    """The panels, 1,500 pixels wide."""
    rows = 3 if chart.topics else 2
    with style():
        figure = new_figure(10, 4.5 * rows)
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
        grid = figure.subplots(rows, 2, sharex=True)
        for axes, panel in zip(grid[:2].flat, chart.panels, strict=True):
            _draw_panel(axes, chart, panel)
        if chart.topics:
            _draw_topics(grid[2, 0], chart, "score", "Score by topic", "score units")
            _draw_topics(grid[2, 1], chart, "kl", "KL by topic", "nats per sequence")
        for axes in grid[-1]:
            axes.set_xlabel(chart.axis.label)
        grid[0, 1].yaxis.set_major_formatter(FuncFormatter(power_of_ten(grid[0, 1].get_ylim()[1])))
        entries = {}  # what several panels show is explained once
        for axes in grid.flat:
            entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        columns = 2 if sum(sorted(map(len, entries))[-2:]) < WIDE else 1
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)
        figure.suptitle(title(chart))
    return figure


def title(chart: Chart) -> str:
    names = listed([group.name for group in chart.groups])
    recipes = sorted({run.config.recipe for run in chart.runs})
    what = f"{names}, recipe{'s' if len(recipes) > 1 else ''} {', '.join(recipes)}"
    if len(chart.runs) > 1:
        open_ends = [run.run.status for run in chart.runs if run.run.status != "finished"]
        state = "".join(f", {open_ends.count(s)} of {len(chart.runs)} runs {s}" for s in sorted(set(open_ends)))
        return f"{what}\nlines: {chart.averaged}{state}"
    run = chart.runs[0]
    status = run.run.status
    length = f"{run.planned:,} updates"
    state = length if status == "finished" else f"{status}, {run.last_update:,} of {length}"
    return f"{what}, seed {run.run.seed}\n{shortened(str(run.folder))}: {state}"


def shortened(name: str, most: int = 50) -> str:
    """A long name without its middle."""
    return name if len(name) <= most else f"{name[: most // 3]}…{name[-(most - most // 3 - 1) :]}"


def power_of_ten(highest: float):
    """A writer of ticks as they are written on a command line, all with the same power: 1.5e-4."""
    power = math.floor(math.log10(highest)) if highest > 0 else 0
    return lambda value, _: f"{value / 10**power:.3g}e{power}" if value else "0"


def _draw_panel(axes: Axes, chart: Chart, panel: Panel) -> None:
    _name_axes(axes, chart, panel.title, panel.unit)
    lacking, values, marks = [], [], []
    for number, group in enumerate(chart.groups):
        found = group.with_tag(panel.tag)
        if len(found) < len(group.runs):
            of = f" by {len(group.runs) - len(found)} of {len(group.runs)} {group.name} runs" if chart.runs[1:] else ""
            lacking.append(f"nothing was logged{of}\nunder the name {panel.tag}")
        if found:
            _draw_group(axes, chart, panel, group, found, _width(chart, panel, number))
            values += [curve.finite for _, curve in found]
        marks += _draw_evaluations(axes, chart, panel, group)
    if panel.tag.startswith("kl_"):
        marks += _draw_target(axes, chart, panel)
    if lacking:
        _tell(axes, lacking, nothing=not values)
    elif not any(np.isfinite(array).any() for array in values):
        _tell(axes, [f"no value of {panel.tag}\nis finite"], nothing=True)
    elif panel.smoothed:
        _keep_in_sight(axes, values, marks)


def _name_axes(axes: Axes, chart: Chart, title: str, unit: str) -> None:
    axes.set(title=title, ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=chart.x != "time"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def _draw_topics(axes: Axes, chart: Chart, kind: str, title: str, unit: str) -> None:
    """One line per topic and algorithm, with a gap where other topics were trained; an algorithm has its own dashes.
    Over seeds, the mean at the updates that all of them have."""
    drawn, left = chart.topics[:TOPICS_DRAWN], len(chart.topics) - TOPICS_DRAWN
    groups = list(zip(chart.groups, DASHES, strict=False))
    dashed = ", ".join(f"{group.name} {dashes}" for group, dashes in groups[1:])
    _name_axes(axes, chart, textwrap.fill(f"{title} ({dashed})" if dashed else title, TITLE_WIDTH), unit)
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(drawn)))  # told apart in grey, too
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
    more = [f"{left} more topics are in the table"] if left > 0 else []
    more += [f"{group.name} is not drawn: see the table" for group in chart.groups[len(DASHES) :]]
    if more:
        axes.text(0.98, 0.98, "\n".join(more), transform=axes.transAxes, ha="right", va="top", fontsize=10)


def _shared_updates(found: Sequence[tuple[RunCurves, Curve]]) -> list[int]:
    """The updates at which all of these curves have a point."""
    return sorted(set.intersection(*(set(curve.updates.tolist()) for _, curve in found))) if found else []


def _means_at(
    chart: Chart, found: Sequence[tuple[RunCurves, Curve]], updates: Sequence[int], span: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Where points at these updates stand, and their values, each over `span` updates: the means of the curves."""
    at = [np.isin(curve.updates, updates) for _, curve in found]
    places = [chart.axis.of(*pair)[here] for pair, here in zip(found, at, strict=True)]
    lines = [running_mean(c.updates, c.finite, span)[here] for (_, c), here in zip(found, at, strict=True)]
    return np.mean(places, axis=0), np.mean(lines, axis=0)


def _tell(axes: Axes, lines: Sequence[str], nothing: bool) -> None:
    """In words, in the middle of a panel, what is not there to be drawn; `nothing` else is."""
    paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    axes.text(0.5, 0.5, "\n".join(lines), transform=axes.transAxes, ha="center", va="center", bbox=paper)
    if nothing:
        axes.set_yticks([])


def _width(chart: Chart, panel: Panel, number: int) -> float:
    """The width of a group's line. Lines that lie on each other, as learning rates do, can all be seen: those drawn
    first are thicker."""
    drawn_later = max(len(chart.groups), 2) - 1 - number
    return THIN + THICKER * (int(number == 0) if panel.smoothed else drawn_later)


def _draw_group(
    axes: Axes, chart: Chart, panel: Panel, group: Group, found: list[tuple[RunCurves, Curve]], width: float
) -> None:
    """A group's line; the values behind it where it is the only run, the band of seeds where there are several."""
    places = [chart.axis.of(run, curve) for run, curve in found]
    span = panel.span(chart.smooth)
    if len(chart.runs) == 1 and span > 1:
        _line(axes, places[0], found[0][1].finite, color=group.colour, lw=0.8, alpha=0.4, label="each update")
    lines = [running_mean(curve.updates, curve.finite, span) for _, curve in found]
    x, lowest, mean, highest = seeds_band(places, lines)
    if len(found) > 1:
        axes.fill_between(x, lowest, highest, color=group.colour, alpha=0.2, lw=0)
    label = group.label if len(chart.runs) > 1 else chart.averaged if panel.smoothed else None
    _line(axes, x, mean, color=group.colour, lw=width, label=label)


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, **line_style: Any) -> None:
    """A line; a value with none beside it, which has no line, is a dot."""
    there = np.concatenate([[False], np.isfinite(y), [False]])
    alone = there[1:-1] & ~there[:-2] & ~there[2:]
    axes.plot(x, y, marker="." if alone.any() else None, markevery=alone.nonzero()[0].tolist(), **line_style)


def _draw_evaluations(axes: Axes, chart: Chart, panel: Panel, group: Group) -> list[np.ndarray]:
    """Marks at the evaluations that all runs of a group have made: the mean over them. Returns what was drawn."""
    found = group.with_tag(panel.evaluation)
    shared = _shared_updates(found)
    if not shared:
        return []
    x, y = _means_at(chart, found, shared)
    name = f"{group.name}, evaluation" if len(chart.groups) > 1 else "evaluation"
    line_style = {"mfc": group.colour, "mec": "black", "ms": 6, "ls": "none", "zorder": 3}
    axes.plot(x, y, group.line_style.marker, label=f"{name} on held-out prompts", **line_style)
    return [y]


def _draw_target(axes: Axes, chart: Chart, panel: Panel) -> list[np.ndarray]:
    """The target in force at each update, and the band around it where beta is steered. Returns what was drawn."""
    if chart.held is None:
        if chart.runs[0].targets is None and len(chart.aims) == 1:
            axes.set_title(f"{panel.title} (beta fixed)")
        return []
    lines = defaultdict(list)  # the phases of runs can be at different places; else one line serves all
    for group in chart.groups:
        for run, curve in group.with_tag(panel.tag):
            place = {"updates": run.planned, "episodes": run.run.plan.episodes, "time": run.algorithm}[chart.x]
            lines[place if len(chart.held.targets) > 1 else None].append((group, run, curve))
    drawn = []
    for found in lines.values():
        _, run, curve = max(found, key=lambda entry: chart.axis.of(*entry[1:])[-1])  # the longest serves the others
        held = run.targets
        x = np.append(0, chart.axis.of(run, curve))  # in force from the beginning of the first update
        nats = np.array([held.target_of(int(update)).nats for update in (0, *curve.updates)])
        names = dict.fromkeys(group.name for group, _, _ in found)
        colour = colour_of("target") if len(lines) == 1 else found[0][0].colour
        whose = "" if len(lines) == 1 else f"{listed(list(names))}, "
        of = "beta fixed" if held.horizon is None else f"band: {KL_BAND[0]:g} to {KL_BAND[1]:g} times"
        label = f"{whose}KL target {', '.join(f'{t.nats:g}' for t in held.targets)}/{chart.per}; {of}"
        axes.plot(x, nats, color=colour, lw=1.5, ls="--", drawstyle="steps-pre", label=label, zorder=2.5)
        drawn.append(nats)
        if held.horizon is not None:
            axes.fill_between(x, KL_BAND[0] * nats, KL_BAND[1] * nats, step="pre", color=colour, alpha=0.12, lw=0)
            drawn += [KL_BAND[0] * nats, KL_BAND[1] * nats]
    return drawn


def _keep_in_sight(axes: Axes, values: Sequence[np.ndarray], marks: Sequence[np.ndarray]) -> None:
    """Where a few `values` would flatten all others, show the others and say what is out of sight. `marks` stay."""
    pooled = np.concatenate([array[np.isfinite(array)] for array in values])
    most = [
        *np.quantile(pooled, [CUT, 1 - CUT]),
        *(f(m[np.isfinite(m)]) for m in marks if np.isfinite(m).any() for f in (np.min, np.max)),
    ]
    low, high = min(most), max(most)
    spread = high - low
    if not 0 < FAR * spread < pooled.max() - pooled.min():
        return
    low, high = low - 0.3 * spread, high + 0.3 * spread
    axes.set_ylim(low, high)
    out = pooled[(pooled < low) | (pooled > high)]
    where = f"{out.min():.3g} to {out.max():.3g}" if len(out) > 1 else f"{out[0]:.3g}"
    text = f"out of sight: {len(out)} of {len(pooled):,} values\n({where})"
    axes.text(0.98, 0.98, text, transform=axes.transAxes, ha="right", va="top", fontsize=10)

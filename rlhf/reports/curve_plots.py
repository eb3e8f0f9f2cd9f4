"""Plots the training curves of runs: mean reward, other judges, KL with its target, loss and learning rate.

With topics there are two more panels: score and KL by topic.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

from rlhf.algorithms.kl_control import KL_BAND
from rlhf.analysis.conditions import KL, RATED
from rlhf.analysis.curves import running_mean, seeds_band
from rlhf.reports.curve_chart import Chart, Group, Panel, title
from rlhf.reports.plot_style import COLOURS, WIDTH, finish, new_figure, style
from rlhf.settings.recipes import published_values
from rlhf.utils.console import listed

# the y axis leaves out 2% of a line at each end if it would be 3 times as long with them
CUT = 0.02
FAR = 3
TOPICS_DRAWN = 8  # at most, to keep the lines distinguishable
DASHES = {"solid": "-", "dashed": "--", "dotted": ":", "dash-dotted": "-."}  # of the groups in a topic panel
# points: a line, and the step to the next thicker one; thicker lines
THIN = 1.8
THICKER = 1.4
FEW = 4
# characters in a row above a panel, and above one that has half a row
ABOVE = 60
ABOVE_HALF = 30
EDGES = 0.015, 0.985  # of a panel, as shares of its width: places of published start and end values
# inches: heights of the last row and of the others
SHORT = 1.7
TALL = 2.5
# entries in the legend
EVALUATIONS = "evaluation on held-out prompts"
TARGETS = "dotted: KL target of a group"
NEUTRAL = {  # entries that stand for all groups, so in no group's colour
    EVALUATIONS: Line2D([], [], ls="none", marker="o", mfc="white", mec="black"),
    TARGETS: Line2D([], [], ls=":", color="black"),
}


def draw(chart: Chart) -> Figure:
    """Draws one row per panel, and below them loss and learning rate side by side, on a figure of 1,280 pixels."""
    wide = len(chart.panels) + (2 if chart.topics else 0)
    rows = [*([number, number] for number in range(wide)), [wide, wide + 1]]
    heights = [*[TALL] * wide, SHORT]
    with style():
        figure = new_figure(WIDTH, sum(heights))
        grid = figure.subplot_mosaic(rows, sharex=True, height_ratios=heights, width_ratios=[3, 2])
        for number, axes in grid.items():
            axes.xaxis.set_major_locator(MaxNLocator(6 if number < wide else 3, integer=chart.x != "time"))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
        for axes, panel in zip(figure.axes, chart.panels, strict=False):
            _draw_panel(axes, chart, panel)
        if chart.topics:
            _draw_topics(grid[wide - 2], chart, "score", "Score by topic", "score")
            _draw_topics(grid[wide - 1], chart, "kl", "KL by topic", "nats/sequence")
        grid[wide - 1].tick_params(labelbottom=True)  # its axis is twice as long as those below it
        for number, panel in enumerate(chart.small_panels, wide):
            _draw_panel(grid[number], chart, panel)
            grid[number].set_xlabel(chart.x_label)
        grid[wide + 1].yaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
        finish(figure, title(chart), NEUTRAL)
    return figure


def _draw_panel(axes: Axes, chart: Chart, panel: Panel) -> None:
    axes.set(title=panel.title, ylabel=panel.unit)
    groups = panel.groups or chart.groups
    notes = []
    is_kl = panel.tag.startswith("kl_")
    evaluated = [one for group in groups for one in group.conditions(panel.evaluation)]
    kls = [one for group in groups for one in group.conditions(panel.tag)] if is_kl else []
    for number, group in enumerate(groups):
        if panel.tag == "rewards/mean" and len({one.rewards for one in group.conditions(panel.tag)}) > 1:
            notes.append(f"{group.name} is not drawn: its runs have other rewards")
            continue
        apart = max((one.difference(evaluated[0], RATED) for one in group.conditions(panel.evaluation)), default="")
        if apart:
            notes.append(f"the evaluations of {group.name} are not drawn: {apart}")
            if panel.evaluation == panel.tag:
                continue
        if kls:  # a KL to another model is another quantity
            other = max((one.difference(kls[0], KL) for one in group.conditions(panel.tag)), default="")
            notes += [f"the KL of {group.name} has {other}"] if other else []
        # the learning rates are often equal: lines that are drawn first are thicker, so that all remain visible
        later = max(0, min(len(chart.groups), FEW) - 1 - number) if panel.tag == "learning_rate" else 0
        _draw_group(axes, chart, panel, group, THIN + THICKER * later)
        if not apart:
            _draw_evaluations(axes, chart, panel, group)
    kept = _draw_targets(axes, chart, panel) if is_kl else _draw_published(axes, groups, panel)
    values = [curve.values for group in groups for _, curve in group.with_tag(panel.tag)]
    missing = [group.name for group in groups if len(group.with_tag(panel.tag)) < len(group.runs)]
    notes += [f"not logged by {listed(missing)}"] if missing else []
    if not np.isfinite(np.concatenate([[np.nan], *values])).any():
        notes += [f"no value of {panel.tag} is finite"] if values else []
        axes.set_yticks([])
    elif panel.smoothed:
        notes += _limit_y(axes, [*values, *kept])
    width = ABOVE_HALF if panel.tag in ("loss", "learning_rate") else ABOVE
    axes.set_title("\n".join(textwrap.fill(line, width) for line in [axes.get_title(), *notes]))


def _draw_topics(axes: Axes, chart: Chart, kind: str, title: str, unit: str) -> None:
    """Draws one line per topic and run, with gaps while other topics were trained. Each group has its own dashes."""
    drawn = chart.topics[:TOPICS_DRAWN]
    left = len(chart.topics) - TOPICS_DRAWN
    notes = [f"{group.name} {dashes}" for group, dashes in list(zip(chart.groups, DASHES, strict=False))[1:]]
    notes += [f"{left} more topics: see the CSV table"] if left > 0 else []
    notes += [f"{group.name} is not drawn: see the CSV table" for group in chart.groups[len(DASHES) :]]
    axes.set(title=textwrap.fill(f"{title} ({', '.join(notes)})" if notes else title, ABOVE), ylabel=unit)
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(drawn)))  # distinguishable in grey, too
    for topic, colour in zip(drawn, colours, strict=True):
        label = f"topic {topic}"
        for group, dashes in zip(chart.groups, DASHES.values(), strict=False):
            for run, curve in group.with_tag(f"topic/{topic}/{kind}"):
                breaks = np.flatnonzero(np.diff(curve.updates) > 1) + 1
                y = running_mean(curve.updates, curve.finite, chart.smooth)
                x, y = (np.insert(part.astype(float), breaks, np.nan) for part in (chart.x_of(run, curve), y))
                _line(axes, x, y, color=colour, ls=dashes, lw=THIN, label=label)
                label = None  # one entry per topic in the legend


def _draw_group(axes: Axes, chart: Chart, panel: Panel, group: Group, width: float) -> None:
    """Draws a group's line, with the unsmoothed values of a single run or the band of several runs."""
    found = group.with_tag(panel.tag)
    if not found:
        return
    xs = [chart.x_of(run, curve) for run, curve in found]
    span = chart.smooth if panel.smoothed else 1
    if len(chart.runs) == 1 and span > 1:
        _line(axes, xs[0], found[0][1].finite, color=group.line_style.colour, lw=0.8, alpha=0.4, label="each update")
    lines = [running_mean(curve.updates, curve.finite, span) for _, curve in found]
    x, lowest, mean, highest = seeds_band(xs, lines)
    if len(found) > 1:
        axes.fill_between(x, lowest, highest, color=group.line_style.colour, alpha=0.2, lw=0)
    label = group.label if len(chart.runs) > 1 else chart.averaged if panel.smoothed else None
    _line(axes, x, mean, color=group.line_style.colour, ls=group.line_style.line, lw=width, label=label)


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, **line_style: Any) -> None:
    """Draws a line. A value without finite neighbours is drawn as a dot."""
    finite = np.concatenate([[False], np.isfinite(y), [False]])
    alone = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    axes.plot(x, y, marker="." if alone.any() else None, markevery=alone.nonzero()[0].tolist(), **line_style)


def _draw_evaluations(axes: Axes, chart: Chart, panel: Panel, group: Group) -> None:
    """Draws the mean evaluation of a group as markers, at the updates that all runs have."""
    found = group.with_tag(panel.evaluation)
    if found:
        shared = set.intersection(*(set(curve.updates.tolist()) for _, curve in found))
        at = [np.isin(curve.updates, list(shared)) for _, curve in found]
        x = [chart.x_of(*pair)[here] for pair, here in zip(found, at, strict=True)]
        y = [curve.finite[here] for (_, curve), here in zip(found, at, strict=True)]
        line_style = {"mfc": "white", "mec": group.line_style.colour, "mew": 1.5, "ms": 6, "ls": "none", "zorder": 3}
        axes.plot(np.mean(x, 0), np.mean(y, 0), group.line_style.marker, label=EVALUATIONS, **line_style)


def _draw_targets(axes: Axes, chart: Chart, panel: Panel) -> list[np.ndarray]:
    """Draws the KL target of each update: one line with its band if all runs have the same target, and otherwise one
    dotted line per group. Targets in another unit are not drawn. Returns the edges of the band."""
    lines = []
    band = []
    for group in chart.groups:
        found = [(run, curve) for run, curve in group.with_tag(panel.tag) if run.targets is not None]
        if found and found[0][0].config.kl.targets[0].per == chart.per:
            run, curve = max(found, key=lambda pair: chart.x_of(*pair)[-1])  # the longest one covers the others
            x = np.append(0, chart.x_of(run, curve))  # the target holds from the start of the first update
            nats = [run.targets.target_of(int(update)).nats for update in (0, *curve.updates)]
            lines.append((x, np.array(nats), group.line_style.colour))
    aims = {run.aim for run in chart.runs}
    held = chart.runs[0].targets if len(aims) == 1 else None
    same = held is not None and (len(held.targets) == 1 or len({(*x, *y) for x, y, _ in lines}) == 1)
    steps = {"drawstyle": "steps-pre", "zorder": 2.5, "lw": 1.5}
    if not same:
        for x, nats, colour in lines:
            axes.plot(x, nats, color=colour, ls=":", label=TARGETS, **steps)
    elif lines:
        x, nats, _ = max(lines, key=lambda line: line[0][-1])
        of = "beta fixed" if held.horizon is None else f"band: {KL_BAND[0]:g} to {KL_BAND[1]:g} x"
        label = f"KL target {', '.join(f'{t.nats:g}' for t in held.targets)}/{chart.per} ({of})"
        axes.plot(x, nats, color=COLOURS["target"], ls="--", label=label, **steps)
        if held.horizon is not None:
            band = [bound * nats for bound in KL_BAND]
            axes.fill_between(x, *band, step="pre", color=COLOURS["target"], alpha=0.12, lw=0)
    if aims == {None}:
        axes.set_title(f"{panel.title} (beta fixed)")
    return band


def _draw_published(axes: Axes, groups: Sequence[Group], panel: Panel) -> list[np.ndarray]:
    """Draws the values that the runs' recipes report from others: the start at the left edge of the panel, the end at
    the right edge. Returns them."""
    recipes = dict.fromkeys(run.config.recipe for group in groups for run in group.runs)
    every = filter(None, map(published_values, recipes))
    found = [known for known in every if known.metric in (panel.tag, panel.evaluation)]
    for known in found:
        label = f"reported by {known.source}, not reproduced here"
        marks = {"color": "black", "ls": "none", "marker": "*", "ms": 12, "clip_on": False, "zorder": 4}
        axes.plot(EDGES, [known.start, known.end], transform=axes.get_yaxis_transform(), label=label, **marks)
    return [np.array([known.start, known.end]) for known in found]


def _limit_y(axes: Axes, values: Sequence[np.ndarray]) -> list[str]:
    """Draws a few extreme values at the edge of the panel if they would flatten all others. Returns a note on them.
    `values` are the unsmoothed ones of each run, and others that must stay visible."""
    values = [y[np.isfinite(y)] for y in values if np.isfinite(y).any()]
    low = min(np.quantile(y, CUT, method="lower") for y in values)
    high = max(np.quantile(y, 1 - CUT, method="higher") for y in values)
    lowest = min(y.min() for y in values)
    highest = max(y.max() for y in values)
    spread = high - low
    if not 0 < FAR * spread < highest - lowest:
        return []
    low = max(lowest, low - 0.3 * spread)
    high = min(highest, high + 0.3 * spread)
    axes.set_ylim(low, high)
    for line in axes.lines:
        line.set_ydata(np.clip(line.get_ydata(), low, high))
    return [f"{lowest:.3g} to {highest:.3g}; extreme values are drawn at the edge"]

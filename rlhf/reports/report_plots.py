"""Pictures of the pages: contrasts, and score over KL with best-of-n."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhf.analysis.curves import RunCurves
from rlhf.reports.curve_chart import Group, groups_of, judges_of
from rlhf.reports.plot_style import COLOURS, MARKERS, ROW, WIDTH, finish, new_figure, style
from rlhf.utils.console import listed
from rlhf.utils.statistics import percent

KL = "eval/kl_divergence"
NAME_WIDTH = 22  # characters of a contrast's name in a row
FAR = 3  # the KL axis ends at this many times the KL that 90% of the points stay below
APART = 0.06  # share of the KL axis between two labels of best-of-n
GREY = "#444444"  # best-of-n, and arms without a curve


def forest(contrasts: Sequence[dict[str, Any]], judges: Sequence[str]) -> Figure:
    """Plots the contrasts by the measure that decides, each with its interval and the smallest difference that the
    comparison could have seen.

    Args:
        contrasts: `Contrast`s as JSON, at least one. There is one row per name.
        judges: their names, the deciding one first.
    """
    decides = "judge" if judges else "score"
    drawn = [c for c in contrasts if c["measure"] == decides]
    labels = [textwrap.fill(f"{c['name']} ({percent(c['level'])})", NAME_WIDTH) for c in drawn]
    heights = np.array([ROW * (label.count("\n") + 1.7) for label in labels])  # inches
    places = heights / 2 - np.cumsum(heights)
    with style():
        figure = new_figure(WIDTH, heights.sum() + 1)
        axes = figure.subplots()
        axes.set(xlabel=f"difference, {judges[0] if judges else 'score'}", ylim=(-heights.sum(), 0))
        axes.set_yticks(places, labels)
        axes.locator_params("x", nbins=6)
        axes.grid(visible=False, axis="y")
        axes.axvline(0, color="black", lw=1)
        for contrast, at, height in zip(drawn, places, heights, strict=True):
            _draw_contrast(axes, contrast, at, height)
        finish(figure, "Differences, with their intervals")
    return figure


def _draw_contrast(axes: Axes, contrast: dict[str, Any], at: float, height: float) -> None:
    """Draws a contrast in its row."""
    value, low, high = (contrast["difference"][key] for key in ("value", "low", "high"))
    visible = contrast["power"]["visible"]
    if visible is not None and np.isfinite(visible):  # marks, because an area would look like an interval
        label = "smallest visible difference (80% power)"
        ends = {"colors": COLOURS["start"], "linestyles": ":", "lw": 2, "label": label}
        axes.vlines([-visible, visible], at - 0.35 * height, at + 0.35 * height, **ends)
    if value is None:
        axes.text(0, at, " no value", va="center")
        return
    if low is not None:
        axes.hlines(at, low, high, color=COLOURS["above"], lw=2.5, label="confidence interval (level)")
    axes.plot(value, at, "o", color=COLOURS["above"], ms=7, label="difference")


def score_against_kl(
    runs: Sequence[RunCurves],
    arms: Sequence[str] = (),
    best_of: dict[str, Any] | None = None,
    ends: Sequence[dict[str, Any]] = (),
    judge: str = "",
) -> Figure:
    """Plots the evaluation score over the KL to the start model, and below it each other metric of the evaluations.

    Args:
        runs: one thin line each, and a thick line for the mean of a group.
        arms: name of the arm of each run; without them, runs are grouped by their settings.
        best_of: {"n", "kl", "measures": {"score"}} of best-of-n. Without "exact", "kl" is the upper bound.
        ends: {"name", "kl", "score", "judge"} of the start model and of arms that have no curve.
        judge: the name of the judge whose ratings are "judge" in `best_of` and `ends`.
    """
    groups = groups_of(runs, arms) if runs else []
    tags = {"eval/score": "score"} | {
        tag: name for tag, name in judges_of(runs).items() if not all(_is_score(run, tag) for run in runs)
    }
    kl = np.concatenate([*(run.scalars[KL].finite for run in runs if KL in run.scalars), [arm["kl"] for arm in ends]])
    kl = kl[np.isfinite(kl)] if np.isfinite(kl).any() else np.array((best_of or {"kl": [1]})["kl"])
    end = 1.15 * np.max(kl, where=kl <= FAR * np.quantile(kl, 0.9), initial=0) or 1
    notes = [
        "Evaluations during training over their KL",
        "lines: on the runs' own prompts; thick: means of groups",
    ]
    if kl.max() > end:
        notes.append(f"KL up to {kl.max():.3g}; values above {end:.3g} are drawn at the edge")
    if missing := [group.name for group in groups if not group.with_tag("eval/score")]:
        notes.append(f"no evaluation was logged by {listed(missing)}")
    with style():
        figure = new_figure(WIDTH, 3.5 * len(tags))
        panels = figure.subplots(len(tags), sharex=True, squeeze=False)[:, 0]
        for axes, (tag, name) in zip(panels, tags.items(), strict=True):
            axes.set_ylabel(textwrap.fill(name, 34))
            for group in groups:
                _draw_group(axes, group, tag, end)
        _draw_points(panels[0], "score", best_of, ends, end)
        if (decides := f"eval/{'gold' if judge == 'gold quality' else judge}") in tags:
            _draw_points(panels[list(tags).index(decides)], "judge", best_of, ends, end)
        panels[-1].set_xlabel("KL to the start model (nats/sequence)")
        panels[-1].set_xlim(min(0, *kl) - 0.03 * end, end)
        finish(figure, "\n".join(notes))
    return figure


def _draw_group(axes: Axes, group: Group, tag: str, end: float) -> None:
    """Draws the evaluations of a group's runs with a marker at the end of each run, and their mean if all have the
    same number of evaluations."""
    colour, marker, line = group.line_style
    found = [_evaluations(run, tag) for run in group.runs if {tag, KL} <= run.scalars.keys()]
    lines = []
    runs = [run for run in found if run.size]
    if len({run.shape for run in runs}) == 1:
        lines.append((np.mean(runs, axis=0), {"lw": 2.5, "ms": 8}))
    lines += [(run, {"lw": 0.8, "ms": 5, "alpha": 0.6}) for run in runs]
    for number, ((kl, y), width) in enumerate(lines):
        label = None if number else group.name
        axes.plot(np.minimum(kl, end), y, marker=marker, markevery=[-1], ls=line, color=colour, label=label, **width)


def _is_score(run: RunCurves, tag: str) -> bool:
    """True if the run did not log a metric, or it was the score at every evaluation."""
    return tag not in run.scalars or np.array_equal(run.scalars[tag].values, run.scalars["eval/score"].values)


def _evaluations(run: RunCurves, tag: str) -> np.ndarray:
    """Return (2, P): the KL and the metric of the evaluations that have both."""
    _, *at = np.intersect1d(run.scalars[KL].updates, run.scalars[tag].updates, return_indices=True)
    return np.stack([run.scalars[of].values[points] for of, points in zip((KL, tag), at, strict=True)])


def _draw_points(
    axes: Axes, measure: str, best_of: dict[str, Any] | None, ends: Sequence[dict[str, Any]], end: float
) -> None:
    """Draws best-of-n, the start model and the arms without a curve by a measure, up to a KL of `end`."""
    for number, arm in enumerate(ends):
        if arm.get(measure) is not None:
            marker = MARKERS[-1 - number % len(MARKERS)]
            axes.plot(min(arm["kl"], end), arm[measure], marker, color=GREY, ms=8, label=arm["name"])
    axes.margins(y=0.1)  # space for the labels of best-of-n
    if best_of is None or measure not in best_of["measures"]:
        return
    kl, score = (np.array(values, float) for values in (best_of["kl"], best_of["measures"][measure]))
    label = "best-of-n, with n" if best_of["exact"] else "best-of-n, with n (KL at most)"
    axes.plot(kl[kl <= end], score[kl <= end], ".:", color=GREY, ms=6, label=label)
    last = -end
    for n, x, y in zip(best_of["n"], kl, score, strict=True):
        if n > 1 and n & (n - 1) == 0 and last + APART * end < x <= end:  # powers of 2
            axes.annotate(f"{n}", (x, y), (0, 5), textcoords="offset points", ha="center", color=GREY)
            last = x

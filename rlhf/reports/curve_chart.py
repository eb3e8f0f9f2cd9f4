"""The contents of a plot of training curves: panels, groups of runs, and the x axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlhf.algorithms.kl_control import KLController
from rlhf.algorithms.table import in_order
from rlhf.analysis.curves import Curve, RunCurves
from rlhf.analysis.groups import group_runs, title_of
from rlhf.reports.plot_style import LineStyle, group_styles
from rlhf.settings.types import KL_METRICS
from rlhf.utils.console import listed

LONGEST_NAMES = 70  # characters of the groups' names in the title


@dataclass(frozen=True)
class Panel:
    """One panel of the plot."""

    title: str
    unit: str  # label of the y axis
    tag: str
    smoothed: bool = True
    evaluation: str | None = None  # tag that evaluations log, drawn as markers

    def span(self, smooth: int) -> int:
        return smooth if self.smoothed else 1


@dataclass(frozen=True)
class XAxis:
    """The x axis: updates, episodes, or time in units of `scale` seconds."""

    label: str
    kind: str
    scale: float = 1.0

    def of(self, run: RunCurves, curve: Curve) -> np.ndarray:
        """Returns the x values (P,) of a curve's points."""
        if self.kind == "time":
            return curve.seconds / self.scale
        return run.episodes_at(curve.updates) if self.kind == "episodes" else curve.updates


@dataclass(frozen=True)
class Group:
    """Runs with the same settings except for the seed."""

    algorithm: str
    name: str
    runs: Sequence[RunCurves]
    line_style: LineStyle
    settings: dict[str, str]  # those in which the groups differ, as text

    @property
    def label(self) -> str:
        if len(self.runs) == 1:
            return f"{self.name}, seed {self.runs[0].run.seed}"
        seeds = {run.run.seed for run in self.runs}
        of = f"{len(seeds)} seeds" if len(seeds) == len(self.runs) else f"{len(self.runs)} runs"
        return f"{self.name}, mean of {of}"

    @property
    def title(self) -> str:
        """The algorithm's name, with the control."""
        return title_of(self.runs[0].run)

    @property
    def colour(self) -> str:
        return self.line_style.colour

    def with_tag(self, tag: str) -> list[tuple[RunCurves, Curve]]:
        return [(run, run.scalars[tag]) for run in self.runs if tag in run.scalars]


def groups_of(runs: Sequence[RunCurves], labels: Sequence[str] = ()) -> list[Group]:
    """Returns the groups of runs with their names and line styles. Raises UserError for a wrong number of `labels`."""
    found = group_runs([(run.algorithm, run.run) for run in runs], labels)
    line_styles = group_styles([group.algorithm for group in found])
    return [
        Group(group.algorithm, group.label, [runs[i] for i in group.members], line_style, group.settings)
        for group, line_style in zip(found, line_styles, strict=True)
    ]


@dataclass(frozen=True)
class Chart:
    """Runs and how to draw them. `x` is updates, episodes or time; `smooth` is a number of updates; `labels` are names
    for the groups."""

    runs: Sequence[RunCurves]
    x: str
    smooth: int
    labels: Sequence[str] = ()

    @cached_property
    def groups(self) -> list[Group]:
        return groups_of(self.runs, self.labels)

    @property
    def several_algorithms(self) -> bool:
        return len({group.algorithm for group in self.groups}) > 1

    @cached_property
    def axis(self) -> XAxis:
        if self.x != "time":
            return XAxis(self.x, self.x)
        longest = max(run.seconds for run in self.runs)
        scale, unit = (1, "seconds") if longest < 120 else (60, "minutes") if longest < 7200 else (3600, "hours")
        return XAxis(f"training time ({unit})", "time", scale)

    @property
    def per(self) -> str:
        """The unit of the KL panel: "token" if all KL targets are per token, otherwise "sequence"."""
        return self.runs[0].config.kl.targets[0].per if self.same_unit else "sequence"

    @property
    def same_unit(self) -> bool:
        """True if the KL targets of all runs have the same unit."""
        return len({run.config.kl.targets[0].per for run in self.runs}) == 1

    @cached_property
    def aims(self) -> list[str]:
        """The different KL targets of the runs, as text."""
        return sorted({run.aim for run in self.runs})

    @property
    def held(self) -> KLController | None:
        """The KL targets if all runs have the same; otherwise None."""
        return self.runs[0].targets if len(self.aims) == 1 else None

    @property
    def panels(self) -> list[Panel]:
        own = " (not comparable between algorithms)" if self.several_algorithms else ""
        return [
            Panel(f"Loss{own}", "", "loss"),
            Panel("Learning rate", "", "learning_rate", smoothed=False),
            Panel("Mean reward", "score", "rewards/mean", evaluation="eval/score"),
            Panel("KL to the start model", f"nats/{self.per}", KL_METRICS[self.per]),
        ]

    @cached_property
    def topics(self) -> list[str]:
        """The topics among the logged metrics, in the order of training; empty without topics."""
        first: dict[str, int] = {}
        for run in self.runs:
            for tag, curve in run.scalars.items():
                kind, _, rest = tag.partition("/")
                if kind == "topic" and rest.endswith("/score"):
                    name = rest.removesuffix("/score")
                    first[name] = min(int(curve.updates[0]), first.get(name, int(curve.updates[0])))
        return sorted(first, key=first.get)

    @property
    def averaged(self) -> str:
        return f"mean of the last {self.smooth} updates" if self.smooth > 1 else "each update"


def title(chart: Chart) -> str:
    """Returns the figure's title: groups, recipe, and how far the runs are."""
    names = listed([group.name for group in chart.groups])
    if len(names) > LONGEST_NAMES:
        order = in_order(group.algorithm for group in chart.groups)
        titles = {group.title: None for group in sorted(chart.groups, key=lambda g: order.index(g.algorithm))}
        names = f"{listed(list(titles))}, {len(chart.groups)} groups"
    recipes = sorted({run.config.recipe for run in chart.runs})
    what = f"{names}, recipe{'s' if len(recipes) > 1 else ''} {', '.join(recipes)}"
    if len(chart.runs) > 1:
        open_ends = [run.run.status for run in chart.runs if run.run.status != "finished"]
        state = "".join(f", {open_ends.count(s)} of {len(chart.runs)} runs {s}" for s in sorted(set(open_ends)))
        bands = "; bands: lowest to highest run" if any(group.runs[1:] for group in chart.groups) else ""
        return f"{what}{state}\nlines: {chart.averaged}{bands}"
    run = chart.runs[0]
    status = run.run.status
    length = f"{run.planned:,} updates"
    state = length if status == "finished" else f"{status}, {run.last_update:,} of {length}"
    return f"{what}, seed {run.run.seed}\n{shortened(str(run.folder))}: {state}"


def shortened(name: str, most: int = 50) -> str:
    """Returns a long name without its middle part."""
    return name if len(name) <= most else f"{name[: most // 3]}…{name[-(most - most // 3 - 1) :]}"

"""The contents of a plot of training curves: panels, groups of runs, and the x axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rlhf.analysis.conditions import Conditions, of_run
from rlhf.analysis.curves import Curve, RunCurves
from rlhf.analysis.groups import group_runs, title_of
from rlhf.reports.plot_style import LineStyle, group_styles
from rlhf.settings.training import EVAL_METRICS
from rlhf.settings.types import KL_METRICS
from rlhf.utils.console import listed
from rlhf.utils.paths import path_on_page

LONGEST_NAMES = 70  # characters of the groups' names in the title


@dataclass(frozen=True)
class Panel:
    """One panel of the plot."""

    title: str
    unit: str  # label of the y axis
    tag: str
    smoothed: bool = True
    evaluation: str = ""  # tag that evaluations log, drawn as markers
    groups: Sequence[Group] = ()  # drawn in it; empty: all


@dataclass(frozen=True)
class Group:
    """Runs with the same settings except for the seed."""

    algorithm: str
    name: str
    runs: Sequence[RunCurves]
    line_style: LineStyle

    @property
    def label(self) -> str:
        if len(self.runs) == 1:
            return f"{self.name}, seed {self.runs[0].run.seed}"
        return f"{self.name}, mean of {len(self.runs)} runs"

    def conditions(self, tag: str) -> list[Conditions]:
        """Return the conditions of each run with this tag. Of the judges, they have the one that logged it."""
        judge = tag.removeprefix("eval/")
        found = [of_run(run.config, run.run) for run, _ in self.with_tag(tag)]
        return [replace(one, judges={judge: one.judges.get(judge)}) for one in found]

    def with_tag(self, tag: str) -> list[tuple[RunCurves, Curve]]:
        return [(run, run.scalars[tag]) for run in self.runs if tag in run.scalars]


def groups_of(runs: Sequence[RunCurves], names: Sequence[str | None]) -> list[Group]:
    """Return the groups of runs with their names and line styles; `names` as in `group_runs`."""
    found = group_runs([run.run for run in runs], names)
    line_styles = group_styles([group.algorithm for group in found])
    return [
        Group(group.algorithm, group.label, [runs[i] for i in group.members], line_style)
        for group, line_style in zip(found, line_styles, strict=True)
    ]


@dataclass(frozen=True)
class Chart:
    """Runs and how to draw them. `x` is updates, episodes or time; `smooth` is a number of updates; `names` are those
    that the user gave, as in `group_runs`."""

    runs: Sequence[RunCurves]
    x: str
    smooth: int
    names: Sequence[str | None] = ()

    @cached_property
    def groups(self) -> list[Group]:
        return groups_of(self.runs, self.names)

    @cached_property
    def time_unit(self) -> tuple[int, str]:
        """The unit of training time on the x axis: its seconds and its name."""
        longest = max(float(curve.seconds[-1]) for run in self.runs for curve in run.scalars.values())
        return (1, "seconds") if longest < 120 else (60, "minutes") if longest < 7200 else (3600, "hours")

    @property
    def x_label(self) -> str:
        return f"training time ({self.time_unit[1]})" if self.x == "time" else self.x

    def x_of(self, run: RunCurves, curve: Curve) -> np.ndarray:
        """Return the x values (P,) of a curve's points."""
        if self.x == "time":
            return curve.seconds / self.time_unit[0]
        return run.episodes_at(curve.updates) if self.x == "episodes" else curve.updates

    @property
    def per(self) -> str:
        """The unit of the KL panel: "token" if all KL targets are per token, otherwise "sequence"."""
        return "token" if all(run.config.kl.targets[0].per == "token" for run in self.runs) else "sequence"

    @property
    def panels(self) -> list[Panel]:
        """The panels of a whole row: what a run is trained for, and before the KL each further metric of the
        evaluations."""
        return [
            *self._reward_panels(),
            *(Panel(title, "", tag, smoothed=False, evaluation=tag) for tag, title in judges_of(self.runs).items()),
            Panel("KL to the start model", f"nats/{self.per}", KL_METRICS[self.per]),
        ]

    def _reward_panels(self) -> list[Panel]:
        """Return one panel for all groups with the same rewards: other rewards have other units."""
        panel = Panel("Mean reward", "score", "rewards/mean", evaluation="eval/score")
        same: dict[str, list[Group]] = {}
        for group in self.groups:
            first = group.runs[0]
            same.setdefault(of_run(first.config, first.run).rewards, []).append(group)
        if len(same) == 1:
            return [panel]
        return [
            replace(panel, title=f"Mean reward, {listed([group.name for group in part])}", groups=part)
            for part in same.values()
        ]

    @property
    def small_panels(self) -> list[Panel]:
        """The two panels of the last row."""
        several = len({run.algorithm for run in self.runs}) > 1
        return [
            Panel("Loss (not comparable between algorithms)" if several else "Loss", "", "loss"),
            Panel("Learning rate", "", "learning_rate", smoothed=False),
        ]

    @cached_property
    def topics(self) -> list[str]:
        """The topics among the logged metrics, in the order of training; empty without topics."""
        tags = [(tag.split("/"), curve) for run in self.runs for tag, curve in run.scalars.items()]
        found = [(curve.updates[0], tag[1]) for tag, curve in tags if tag[0] == "topic" and tag[-1] == "score"]
        return list(dict.fromkeys(name for _, name in sorted(found)))

    @property
    def averaged(self) -> str:
        return f"mean of the last {self.smooth} updates" if self.smooth > 1 else "each update"


def judges_of(runs: Sequence[RunCurves]) -> dict[str, str]:
    """Return tag -> title of gold quality and of the evaluation functions, in the order in which they were logged."""
    logged = dict.fromkeys(tag.removeprefix("eval/") for run in runs for tag in run.scalars if tag.startswith("eval/"))
    names = [name for name in logged if "/" not in name and name not in EVAL_METRICS]
    return {f"eval/{name}": f"{'Gold quality' if name == 'gold' else name} on held-out prompts" for name in names}


def title(chart: Chart) -> str:
    """Return the figure's title: groups, recipe, and how far the runs are."""
    names = listed([group.name for group in chart.groups])
    if len(names) > LONGEST_NAMES:
        titles = dict.fromkeys(title_of(group.runs[0].run) for group in chart.groups)
        names = f"{listed(list(titles))}, {len(chart.groups)} groups"
    recipes = sorted({run.config.recipe for run in chart.runs})
    what = f"{names}, recipe{'s' if len(recipes) > 1 else ''} {', '.join(recipes)}"
    run = chart.runs[0]
    runs = len(chart.runs)
    if runs == 1:
        state = "" if run.run.status == "finished" else f"{run.run.status}, {run.last_update:,} of "
        return f"{what}, seed {run.run.seed}\n{path_on_page(str(run.folder))}: {state}{run.planned:,} updates"
    open_ends = Counter(run.run.status for run in chart.runs if run.run.status != "finished")
    state = "".join(f", {count} of {runs} runs {status}" for status, count in sorted(open_ends.items()))
    bands = "; bands: lowest to highest run" if any(group.runs[1:] for group in chart.groups) else ""
    return f"{what}{state}\nlines: {chart.averaged}{bands}"

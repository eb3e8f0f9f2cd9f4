"""The tables of a comparison, as rows of text for console and page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from rlhf.analysis.audit import computed_figures, figure_label, figure_text
from rlhf.analysis.groups import ALL_PAIRS
from rlhf.analysis.statistics import interval_of, percent
from rlhf.analysis.verdict import Arm
from rlhf.utils.console import clock


class Tables(NamedTuple):
    """The tables of a comparison, each with its caption, columns and rows of text."""

    summary: dict[str, Any]
    contrasts: dict[str, Any]  # by the measure that decides
    folded: list[dict[str, Any]]  # what a page shows when a reader asks for it

    @property
    def first(self) -> list[dict[str, Any]]:
        return [self.summary, self.contrasts]


def tables(report: dict[str, Any], start: Arm, arms: Sequence[Arm]) -> Tables:
    """Return every table, in reading order."""
    return Tables(
        _summary_table(report),
        _difference_table(report),
        [
            *_in_parts(lambda part: figure_table([start, *part], report["judges"]), arms),
            contrast_table(report),
            *([_equal_table(report)] if report["at_equal"] else []),
            *_in_parts(lambda part: _spent_table(report, part), [arm for arm in arms if arm.runs]),
            *_in_parts(_settings_table, [arm for arm in arms if arm.settings]),
        ],
    )


def _summary_table(report: dict[str, Any]) -> dict[str, Any]:
    """Return the table with one row per arm, without columns in which no arm has a value."""
    measure = report["judges"][0] if report["judges"] else "score"
    cells = {
        f"{measure} (95% interval)": interval_of,
        "greedy decoding": lambda arm: figure_text("judge", arm["greedy"]),
        "KL (nats/sequence)": lambda arm: figure_text("kl", arm["kl"]),
        "training time": lambda arm: "-" if arm["seconds"] is None else clock(arm["seconds"]),
    }
    rows = [[arm["name"], *(show(arm) for show in cells.values())] for arm in report["summary"]]
    return _without_empty("Arms, on the same prompts", ["", *cells], rows)


def _without_empty(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a table without the columns in which no row has a value."""
    kept = [i for i in range(len(columns)) if any(row[i] != "-" for row in rows)]
    return {
        "caption": caption,
        "columns": [columns[i] for i in kept],
        "rows": [[row[i] for i in kept] for row in rows],
    }


def _in_parts(table: Callable[[Sequence[Arm]], dict[str, Any]], arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Return a table with one column per arm, as several tables if there are more than 4 arms."""
    made = [table(arms[i : i + ALL_PAIRS]) for i in range(0, len(arms), ALL_PAIRS)]
    for number, part in enumerate(made[1:] and made, 1):
        part["caption"] += f" (part {number} of {len(made)})"
    return made


def figure_table(arms: Sequence[Arm], judges: Sequence[str]) -> dict[str, Any]:
    """Return the table of figures, one column per arm. `judges` are the names of the judges."""
    names = computed_figures([figures for arm in arms for figures in arm.figures])
    rows = [
        [figure_label(name, judges), *(_over_seeds(partial(figure_text, name), arm.known(name)) for arm in arms)]
        for name in names
    ]
    several = any(arm.seeds[1:] for arm in arms)
    caption = f"Figures on the same prompts{': mean over seeds (lowest to highest seed)' if several else ''}"
    return {"caption": caption, "columns": ["", *(f"{arm.name}{_seeds(arm)}" for arm in arms)], "rows": rows}


def _seeds(arm: Arm) -> str:
    return f" ({len(arm.seeds)} seeds)" if arm.seeds[1:] else ""


def _over_seeds(show: Callable[[float], str], values: Sequence[float]) -> str:
    """Formats the mean of a figure over seeds, with its lowest and highest value."""
    if not values:
        return "-"
    spread = f" ({show(min(values))} to {show(max(values))})" if len(set(values)) > 1 else ""
    return show(fmean(values)) + spread


def _difference_table(report: dict[str, Any]) -> dict[str, Any]:
    """Return the differences by the measure that decides, and what finds them."""
    decides = "judge" if report["judges"] else "score"
    rows = [
        [c["name"], interval_of(c["difference"]), *_power_cells(c["power"])[:3]]
        for c in report["contrasts"]
        if c["measure"] == decides
    ]
    columns = ["", "difference (interval)", "smallest visible", "seeds needed", "prompts needed"]
    caption = (
        "Differences; the smallest one that 80% of such comparisons find; the seeds of each arm, or the prompts, with "
        "which they find the observed one"
    )
    return _without_empty(caption, columns, rows)


def contrast_table(report: dict[str, Any]) -> dict[str, Any]:
    """Return the table of differences by all measures, without the columns in which no contrast has a value."""
    rows = [
        [
            f"{c['name']}, {figure_label(c['measure'], report['judges'])}",
            interval_of(c["difference"]),
            interval_of(c["win_rate"], ""),
            _interval_kind(c),
            *_power_cells(c["power"]),
        ]
        for c in report["contrasts"]
    ]
    columns = ["", "difference (interval)", "win rate (interval)", "confidence interval",
               "smallest visible", "seeds needed", "prompts needed", "P(a new run wins)"]  # fmt: skip
    return _without_empty("Differences and win rates (a tie counts half) by each measure", columns, rows)


def _power_cells(power: dict[str, Any]) -> list[str]:
    visible = power["visible"]
    seeds = power["seeds"]
    prompts = power["prompts"]
    wins = power["first_wins"]
    return [
        "-" if visible is None else f"{visible:.3f}",
        "-" if seeds is None else str(seeds),
        "-" if prompts is None else f"{prompts:,}",
        "-" if wins is None else f"{wins:.0%}",
    ]


def _interval_kind(found: dict[str, Any]) -> str:
    """Return an interval's level and what was resampled, such as "95% over prompts"."""
    return f"{percent(found['level'])} over {found['over']}"


SPENT = {
    "episodes": ("episodes", "{:,.0f}".format),
    "updates": ("updates", "{:,.0f}".format),
    "optimizer_steps": ("optimizer steps", "{:,.0f}".format),
    "completion_tokens": ("completion tokens", "{:,.0f}".format),
    "seconds": ("training time (wall clock)", clock),
    "cpu_seconds": ("CPU time, all cores", clock),
    "peak_memory_gib": ("peak memory (GiB)", "{:.2f}".format),
}


def _spent_table(report: dict[str, Any], arms: Sequence[Arm]) -> dict[str, Any]:
    rows = []
    runs = [report["spent"][arm.name].values() for arm in arms]
    for name, (label, show) in SPENT.items():
        rows.append([label, *(_over_seeds(show, [run[name] for run in of if name in run]) for of in runs)])
    columns = ["", *(arm.name for arm in arms)]
    caption = (
        "Cost of each run: mean over seeds (lowest to highest seed); compare wall-clock times only of runs that had a "
        "machine to themselves"
    )
    return {"caption": caption, "columns": columns, "rows": rows}


def _settings_table(arms: Sequence[Arm]) -> dict[str, Any]:
    names = dict.fromkeys(name for arm in arms for name in arm.settings)
    rows = [[name, *(arm.settings.get(name, "-") for arm in arms)] for name in names]
    return {"caption": "Settings that differ", "columns": ["", *(arm.name for arm in arms)], "rows": rows}


def _equal_table(report: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [f"{row['budget']}: {found['name']}", interval_of(found), found["by"], _interval_kind(found)]
        for row in report["at_equal"]
        for found in row["differences"]
        if "missing" not in found
    ]
    caption = (
        "At equal budgets: the last evaluation during training within the budget, or interpolated at equal KL (the "
        "run's own evaluation prompts, not those above)"
    )
    columns = ["", "difference (interval)", "by", "confidence interval"]
    return {"caption": caption, "columns": columns, "rows": rows}

"""The tables of a comparison, as rows of text for console, Markdown and page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rlhf.analysis.audit import figures_of, label_of, shown
from rlhf.analysis.groups import ALL_PAIRS
from rlhf.analysis.statistics import interval_of, percent
from rlhf.analysis.verdict import Arm
from rlhf.utils.console import clock


def tables(report: dict[str, Any], arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Returns every table with its caption, columns and rows of text, in reading order."""
    return [
        *_in_parts(_figure_table, report, arms),
        _contrast_table(report),
        *([_equal_table(report)] if report["at_equal"] else []),
        *_in_parts(_spent_table, report, [arm for arm in arms if arm.runs]),
        *_in_parts(_settings_table, report, [arm for arm in arms if arm.settings]),
    ]


def _in_parts(
    table: Callable[[dict[str, Any], Sequence[Arm]], dict[str, Any]], report: dict[str, Any], arms: Sequence[Arm]
) -> list[dict[str, Any]]:
    """Returns a table with one column per arm, as several tables if there are more than 4 arms."""
    made = [table(report, arms[i : i + ALL_PAIRS]) for i in range(0, len(arms), ALL_PAIRS)]
    for number, part in enumerate(made[1:] and made, 1):
        part["caption"] += f" (part {number} of {len(made)})"
    return made


def _figure_table(report: dict[str, Any], arms: Sequence[Arm]) -> dict[str, Any]:
    rows, of_start = [], report["figures"]["start"]
    for name in figures_of([of_start, *(figures for arm in arms for figures in arm.figures)]):
        label = label_of(name, report["judges"])
        rows.append([label, shown(name, of_start.get(name)), *(_mean(name, arm.known(name)) for arm in arms)])
    columns = ["", "start model", *(f"{arm.name}{_seeds(arm)}" for arm in arms)]
    return {
        "caption": "Figures on the same prompts: mean over seeds (lowest to highest seed)",
        "columns": columns,
        "rows": rows,
    }


def _seeds(arm: Arm) -> str:
    return f" ({len(arm.seeds)} seed{'s' if len(arm.seeds) > 1 else ''})" if arm.trained else ""


def _mean(name: str, known: Sequence[float]) -> str:
    if not known:
        return "-"
    spread = f" ({shown(name, min(known))} to {shown(name, max(known))})" if len(known) > 1 else ""
    return shown(name, fmean(known)) + spread


def _contrast_table(report: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [
            f"{c['name']}, {_measure_name(c['measure'], report['judges'])}",
            interval_of(c["difference"]),
            interval_of(c["win_rate"], ""),
            _interval_kind(c),
            *_power_cells(c["power"]),
        ]
        for c in report["contrasts"]
    ]
    columns = ["", "difference (interval)", "win rate (interval)", "confidence interval",
               "smallest visible difference", "seeds for this one", "P(a new run wins)"]  # fmt: skip
    caption = (
        "Differences and win rates (a tie counts half); the difference that this comparison finds with 80% power, and "
        "the seeds of each arm with which the observed one is found"
    )
    return {"caption": caption, "columns": columns, "rows": rows}


def _power_cells(power: dict[str, Any]) -> list[str]:
    visible, seeds, wins = power["visible"], power["seeds"], power["first_wins"]
    return [
        "-" if visible is None else f"{visible:.3f}",
        "-" if seeds is None else str(seeds),
        "-" if wins is None else f"{wins:.0%}",
    ]


def _measure_name(measure: str, judges: Sequence[str]) -> str:
    """Returns "score" or "judge", with the judge's name if there are several judges."""
    name = measure.partition("/")[2] or next(iter(judges), "")
    return "score" if measure == "scores" else f"judge {name}" if len(judges) > 1 else "judge"


def _interval_kind(found: dict[str, Any]) -> str:
    """Returns an interval's level and what was resampled, such as "95% over prompts"."""
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
    for name, (label, show) in SPENT.items():
        cells = []
        for arm in arms:
            values = [run[name] for run in report["spent"][arm.name].values() if name in run]
            spread = f" ({show(min(values))} to {show(max(values))})" if len(set(values)) > 1 else ""
            cells.append(show(fmean(values)) + spread if values else "-")
        rows.append([label, *cells])
    columns = ["", *(arm.name for arm in arms)]
    caption = (
        "Cost of each run: mean over seeds (lowest to highest seed); compare wall-clock times only of runs that had a "
        "machine to themselves"
    )
    return {"caption": caption, "columns": columns, "rows": rows}


def _settings_table(report: dict[str, Any], arms: Sequence[Arm]) -> dict[str, Any]:
    names = dict.fromkeys(name for arm in arms for name in arm.settings)
    rows = [[name, *(arm.settings.get(name, "-") for arm in arms)] for name in names]
    return {"caption": "Settings that differ", "columns": ["", *(arm.name for arm in arms)], "rows": rows}


def _equal_table(report: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for row in report["at_equal"]:
        for name, reached in row["sides"].items() if row["kind"] != "kl" else ():
            judge = "-" if reached["judge"] is None else f"{reached['judge']:.3f}"
            score = "-" if reached["score"] is None else f"{reached['score']:+z.3f}"
            rows.append([f"{row['budget']}: {name}", score, judge, f"{reached['kl']:.2f}",
                         f"{reached['update']:.0f}"])  # fmt: skip
        for found in row["differences"]:
            if "missing" not in found:
                cells = ["", ""]
                cells[found["by"] == "judge"] = f"{interval_of(found)}, {_interval_kind(found)}"
                kl = f"{row['number']:.2f}" if row["kind"] == "kl" else ""
                rows.append([f"{row['budget']}: {found['name']}", *cells, kl, ""])
    samples = " or ".join(map(str, report["at_equal"][0]["completions"])) + " completion(s)"
    caption = (
        "At equal budgets: the last evaluation during training within the budget, or interpolated at equal KL (the "
        f"run's own evaluation prompts, not those above; {samples} per prompt)"
    )
    columns = ["", "score", "judge", "KL (nats/sequence)", "after update (mean)"]
    return {"caption": caption, "columns": columns, "rows": rows}

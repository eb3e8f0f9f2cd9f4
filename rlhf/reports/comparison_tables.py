"""The tables of a comparison, as rows of text for console, Markdown and page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rlhf.analysis.audit import figures_of, label_of, shown
from rlhf.analysis.groups import ALL_PAIRS, short_label, short_pair
from rlhf.analysis.statistics import interval_of, percent
from rlhf.analysis.verdict import RunGroup
from rlhf.utils.console import clock


def tables(report: dict[str, Any], groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Returns every table with its caption, columns and rows of text."""
    equal = [_equal_table(report)] if report["at_equal"] else []
    differ = [_group_table(report, groups)] if any(group.settings for group in groups) else []
    return [
        *differ,
        *_in_parts(_figure_table, report, groups),
        _contrast_table(report),
        _within_table(report),
        *_in_parts(_spent_table, report, groups),
        *equal,
    ]


def _in_parts(
    table: Callable[[dict[str, Any], Sequence[RunGroup]], dict[str, Any]],
    report: dict[str, Any],
    groups: Sequence[RunGroup],
) -> list[dict[str, Any]]:
    """Returns a table with one column per group, as several tables if there are more than 4 groups."""
    parts = [groups[i : i + ALL_PAIRS] for i in range(0, len(groups), ALL_PAIRS)]
    made = [table(report, part) for part in parts]
    for number, part in enumerate(made[1:] and made, 1):
        part["caption"] += f" (part {number} of {len(made)})"
    return made


MAIN = ("score", "judge", "kl", "length")  # figures in the table of groups


def _group_table(report: dict[str, Any], groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Returns one row per group: the settings in which the groups differ, and the most important figures."""
    names = list(dict.fromkeys(name for group in groups for name in group.settings))
    main = [name for name in MAIN if any(group.known(name) for group in groups)]
    rows = [
        [
            # the settings have separate columns
            short_label(group.name, group.title, group.settings),
            ", ".join(map(str, group.seeds)),
            *(group.settings.get(name, "-") for name in names),
            *(_mean(name, group.known(name)) for name in main),
        ]
        for group in groups
    ]
    columns = ["", "seeds", *names, *(label_of(name, report["judges"]) for name in main)]
    caption = "Groups: the settings in which they differ, and mean figures over seeds (lowest to highest seed)"
    return {"caption": caption, "columns": columns, "rows": rows}


def _figure_table(report: dict[str, Any], groups: Sequence[RunGroup]) -> dict[str, Any]:
    rows, of_start = [], report["figures"]["start"]
    for name in figures_of([of_start, *(figures for group in groups for figures in group.figures)]):
        of_groups = [group.known(name) for group in groups]
        label = label_of(name, report["judges"])
        rows.append([label, shown(name, of_start.get(name)), *(_mean(name, v) for v in of_groups)])
    columns = ["", "start model", *(f"{s.name} ({_seeds(s)})" for s in groups)]
    return {
        "caption": "Figures on the same prompts: mean over seeds (lowest to highest seed)",
        "columns": columns,
        "rows": rows,
    }


def _seeds(group: RunGroup) -> str:
    return f"{len(group.seeds)} seed{'s' if len(group.seeds) > 1 else ''}"


def _mean(name: str, known: Sequence[float]) -> str:
    if not known:
        return "-"
    spread = f" ({shown(name, min(known))} to {shown(name, max(known))})" if len(known) > 1 else ""
    return shown(name, fmean(known)) + spread


def _contrast_table(report: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [
            f"{_pair(c['name'], report)}, {_measure_name(c['measure'], report['judges'])}",
            interval_of(c["difference"]),
            interval_of(c["win_rate"], ""),
            _interval_kind(c),
        ]
        for c in report["contrasts"]
    ]
    columns = ["", "difference (interval)", "win rate (interval)", "confidence interval"]
    return {"caption": "Differences and win rates (a tie counts half)", "columns": columns, "rows": rows}


def _pair(name: str, report: dict[str, Any]) -> str:
    return name if name.endswith("- start model") else short_pair(name, report["groups"])


def _measure_name(measure: str, judges: Sequence[str]) -> str:
    """Returns "score" or "judge", with the judge's name if there are several judges."""
    name = measure.partition("/")[2] or next(iter(judges), "")
    return "score" if measure == "scores" else f"judge {name}" if len(judges) > 1 else "judge"


def _interval_kind(found: dict[str, Any]) -> str:
    """Returns an interval's level and what was resampled, such as "95% over prompts"."""
    return f"{percent(found['level'])} over {found['over']}"


def _within_table(report: dict[str, Any]) -> dict[str, Any]:
    kinds = dict.fromkeys(name for row in report["within"] for name in row if name != "run")
    rows = [[row["run"], *(_within_cell(row.get(name), name) for name in kinds)] for row in report["within"]]
    columns = ["", *(_within_label(name, report["judges"]) for name in kinds)]
    return {"caption": "Each run minus the start model (95% intervals over prompts)", "columns": columns, "rows": rows}


def _within_cell(value: dict[str, Any] | None, kind: str) -> str:
    return "-" if value is None else interval_of(value, "" if "win_rate" in kind.partition("/")[0] else "+")


def _within_label(kind: str, judges: Sequence[str]) -> str:
    """Returns a column's name, with the judge's name if there are several judges."""
    kind, _, name = kind.partition("/")
    label = kind.replace("_", " ")
    if len(judges) < 2 or kind == "score" or kind == "score_win_rate":
        return label
    return f"judge {name or judges[0]}" + (", win rate" if kind == "judge_win_rate" else "")


SPENT = {
    "episodes": ("episodes", "{:,.0f}".format),
    "updates": ("updates", "{:,.0f}".format),
    "optimizer_steps": ("optimizer steps", "{:,.0f}".format),
    "completion_tokens": ("completion tokens", "{:,.0f}".format),
    "seconds": ("training time (wall clock)", clock),
    "cpu_seconds": ("CPU time, all cores", clock),
    "peak_memory_gib": ("peak memory (GiB)", "{:.2f}".format),
}


def _spent_table(report: dict[str, Any], groups: Sequence[RunGroup]) -> dict[str, Any]:
    rows = []
    for name, (label, show) in SPENT.items():
        cells = []
        for group in groups:
            values = [run[name] for run in report["spent"][group.name].values() if name in run]
            spread = f" ({show(min(values))} to {show(max(values))})" if len(set(values)) > 1 else ""
            cells.append(show(fmean(values)) + spread if values else "-")
        rows.append([label, *cells])
    columns = ["", *(group.name for group in groups)]
    caption = (
        "Cost of each run: mean over seeds (lowest to highest seed); compare wall-clock times only of runs that had a "
        "machine to themselves"
    )
    return {"caption": caption, "columns": columns, "rows": rows}


def samples_in_words(row: dict[str, Any]) -> str:
    """Returns the completions per prompt of the evaluations during training, such as "one completion"."""
    counts = row["completions"]
    return "one completion" if counts == [1] else f"{' or '.join(map(str, counts))} completions"


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
                rows.append([f"{row['budget']}: {short_pair(found['name'], row['sides'])}", *cells, kl, ""])
    caption = (
        "At equal budgets: the last evaluation during training within the budget, or interpolated at equal KL (the "
        f"run's own evaluation prompts, not those above; {samples_in_words(report['at_equal'][0])} per prompt)"
    )
    columns = ["", "score", "judge", "KL (nats/sequence)", "after update (mean)"]
    return {"caption": caption, "columns": columns, "rows": rows}

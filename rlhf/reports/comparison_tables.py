"""The tables of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rlhf.analysis.groups import ALL_PAIRS
from rlhf.analysis.verdict import Arm
from rlhf.reports.tables import TextTable, figure_label, figure_names, figure_text, without_empty
from rlhf.utils.console import number
from rlhf.utils.statistics import interval_of, percent


def folded_tables(report: dict[str, Any], start: Arm, arms: Sequence[Arm]) -> list[TextTable]:
    """Return the tables that a page shows when a reader asks for them, those with rows."""
    tables = [
        *_in_parts(lambda part: figure_table([start, *part], report["judges"]), arms),
        contrast_table(report),
        _equal_table(report),
        *_in_parts(lambda part: _spent_table(report, part), [arm for arm in arms if arm.runs]),
        *_in_parts(_settings_table, [arm for arm in arms if arm.settings]),
    ]
    return [table for table in tables if table.rows]


def summary_table(report: dict[str, Any]) -> TextTable:
    """Return the table with one row per arm, without columns in which no arm has a value."""
    measure = report["judges"][0] if report["judges"] else "score"
    cells = {
        f"{measure} (95% interval)": interval_of,
        "greedy decoding": lambda arm: figure_text("judge", arm["greedy"]),
        "KL (nats per sequence)": lambda arm: figure_text("kl", arm["kl"]),
        "training time": lambda arm: figure_text("seconds", arm["seconds"]),
    }
    rows = [[arm["name"], *(show(arm) for show in cells.values())] for arm in report["summary"]]
    return without_empty("Arms, on the same prompts", ["", *cells], rows)


def _in_parts(table: Callable[[Sequence[Arm]], TextTable], arms: Sequence[Arm]) -> list[TextTable]:
    """Return a table with one column per arm, as several tables if there are more than 4 arms."""
    made = [table(arms[i : i + ALL_PAIRS]) for i in range(0, len(arms), ALL_PAIRS)]
    if len(made) < 2:
        return made
    return [
        part._replace(caption=f"{part.caption} (part {number} of {len(made)})") for number, part in enumerate(made, 1)
    ]


def figure_table(arms: Sequence[Arm], judges: Sequence[str]) -> TextTable:
    """Return the table of figures, one column per arm. `judges` are the names of the judges."""
    several = any(arm.seeds[1:] for arm in arms)
    caption = f"Figures on the same prompts{': mean (lowest to highest)' if several else ''}"
    columns = [f"{arm.name} ({len(arm.seeds)} {arm.unit}s)" if arm.seeds[1:] else arm.name for arm in arms]
    # a figure that only some models of an arm have, such as a KL, is not the arm's
    whole = [[{n: found[n] for n in found if arm.mean(n) is not None} for found in arm.figures] for arm in arms]
    return _over_seeds(caption, columns, whole, judges)


def _over_seeds(
    caption: str, columns: Sequence[str], arms: Sequence[Sequence[dict]], judges: Sequence[str] = ()
) -> TextTable:
    """Return the means of the figures over the seeds of each arm, with the lowest and the highest value."""
    rows = []
    for name in figure_names([figures for arm in arms for figures in arm]):
        row = [figure_label(name, judges)]
        for arm in arms:
            values = [figures[name] for figures in arm if figures.get(name) is not None]
            ends = [figure_text(name, end) for end in (min(values), max(values))] if len(set(values)) > 1 else []
            mean = figure_text(name, fmean(values) if values else None)
            row.append(f"{mean} ({' to '.join(ends)})" if ends else mean)
        rows.append(row)
    return TextTable(caption, ["", *columns], rows)


CONTRASTS = ["", "difference (interval)", "smallest visible", "seeds needed", "prompts needed", "win rate (interval)",
             "confidence interval", "P(a new run wins)"]  # fmt: skip


def difference_table(report: dict[str, Any]) -> TextTable:
    """Return the differences by the measure that decides, and what finds them."""
    decides = "judge" if report["judges"] else "score"
    rows = [[c["name"], *_cells(c)[:4]] for c in report["contrasts"] if c["measure"] == decides]
    return without_empty("Differences, and what finds them in 80% of such comparisons", CONTRASTS[:5], rows)


def contrast_table(report: dict[str, Any]) -> TextTable:
    """Return the table of differences by all measures, without the columns in which no contrast has a value."""
    judges = report["judges"]
    rows = [[f"{c['name']}, {figure_label(c['measure'], judges)}", *_cells(c)] for c in report["contrasts"]]
    return without_empty("Differences and win rates (a tie counts half) by each measure", CONTRASTS, rows)


def _cells(found: dict[str, Any]) -> list[str]:
    """Return a contrast's row of CONTRASTS without its name."""
    power = found["power"]
    forms = {"visible": lambda value: number(value, 3), "seeds": str, "prompts": "{:,}".format,
             "first_wins": "{:.0%}".format}  # fmt: skip
    *enough, wins = ("-" if power[name] is None else form(power[name]) for name, form in forms.items())
    return [interval_of(found["difference"]), *enough, interval_of(found["win_rate"], ""), _interval_kind(found), wins]


def _interval_kind(found: dict[str, Any]) -> str:
    """Return an interval's level and what was resampled, such as "95% over prompts"."""
    return f"{percent(found['level'])} over {found['over']}"


def _spent_table(report: dict[str, Any], arms: Sequence[Arm]) -> TextTable:
    caption = (
        "Cost of each run: mean over seeds (lowest to highest seed); compare wall-clock times only of runs that had a "
        "machine to themselves"
    )
    runs = [list(report["spent"][arm.name].values()) for arm in arms]
    return _over_seeds(caption, [arm.name for arm in arms], runs)


def _settings_table(arms: Sequence[Arm]) -> TextTable:
    names = dict.fromkeys(name for arm in arms for name in arm.settings)
    rows = [[name, *(arm.settings.get(name, "-") for arm in arms)] for name in names]
    return TextTable("Settings that differ", ["", *(arm.name for arm in arms)], rows)


def _equal_table(report: dict[str, Any]) -> TextTable:
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
    return TextTable(caption, columns, rows)

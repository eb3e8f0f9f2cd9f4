"""A comparison's report: Markdown, page, JSON and pictures from one set of figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from config import config_of_run
from rlhf.audit import LABELS, figures, shown, target_at_end, warnings
from rlhf.budgets import at_equal, looks_of
from rlhf.console import Screen, clock
from rlhf.curves import RunCurves
from rlhf.errors import UserError, raise_if
from rlhf.evaluation_report import sides_of
from rlhf.measuring import Bench, Generations
from rlhf.pages import render, write_page
from rlhf.pictures import as_data_url, save_picture
from rlhf.report_pictures import distributions, score_against_kl
from rlhf.rollout import generator
from rlhf.runlogs import differences, environment, flat_settings, now, write_json
from rlhf.seeds import MAY_DIFFER
from rlhf.statistics import A_SHARE, over_prompts, win_rates
from rlhf.trained import Trained
from rlhf.verdict import Side, Verdict, judge_runs

SAMPLES = 8  # prompts shown
MEASURE_NAMES = {"scores": "score", "judged": "judge"}


def check_sides(models: Sequence[Trained]) -> None:
    """Refuse what cannot be pooled: an algorithm's runs of unlike settings, a seed twice, what is no run."""
    faults = [f"not a run: {m.name}. compare_runs.py takes run folders" for m in models if m.run is None]
    raise_if(faults)
    for algorithm in ("ppo", "grpo"):
        runs = [m for m in models if m.run["algorithm"] == algorithm]
        for other in runs[1:]:
            unlike = differences(runs[0].run["settings"], other.run["settings"], MAY_DIFFER)
            if unlike:
                faults.append(
                    f"{runs[0].name} and {other.name} differ in {', '.join(unlike)}: the runs. Seeds are pooled, "
                    "settings are not: compare one setting of an algorithm at a time"
                )
        seeds = [m.run["seed"] for m in runs]
        for seed in sorted({s for s in seeds if seeds.count(s) > 1}):
            faults.append(f"two runs of {algorithm.upper()} have the seed {seed}: the runs. Name each seed once")
    raise_if(faults)


def make_sides(models: Sequence[Trained], measured: Sequence[Generations]) -> list[Side]:
    """PPO's runs and GRPO's, those that there are, by seed."""
    pairs = sorted(zip(models, measured, strict=True), key=lambda pair: pair[0].run["seed"])
    sides = []
    for algorithm in ("ppo", "grpo"):
        mine = [(m.run, replies) for m, replies in pairs if m.run["algorithm"] == algorithm]
        if mine:
            sides.append(Side(algorithm, [run for run, _ in mine], [replies for _, replies in mine]))
    return sides


def make_comparison(
    bench: Bench, sides: Sequence[Side], start: Generations, curves: Sequence[RunCurves]
) -> tuple[dict[str, Any], Verdict]:
    """Everything that is said, ready for JSON."""
    seed = bench.settings.seed
    verdict = judge_runs(sides, start, bench.judge_name, seed)
    looks = {side.name: [looks_of(c, bench.judge) for c in curves if c.algorithm == side.algorithm] for side in sides}
    return {
        "made": now(),
        **environment(),
        "verdict": verdict.sentences,
        "caveats": verdict.caveats,
        "warnings": _warnings(sides, start, seed),
        "facts": dict([*bench.facts(), *_unlike(sides)]),
        "figures": {"start": figures(start)}
        | {side.name: dict(zip(map(str, side.seeds), map(figures, side.measured), strict=True)) for side in sides},
        "contrasts": [asdict(c) for c in verdict.contrasts],
        "within": _within(sides, start, seed),
        "spent": {
            side.name: {str(run["seed"]): {**run.get("spent", {}), **_costs(run)} for run in side.runs}
            for side in sides
        },
        "at_equal": at_equal(looks, seed),
        "samples": _samples(bench, sides, start),
    }, verdict


def _unlike(sides: Sequence[Side]) -> list[tuple[str, str]]:
    """The settings in which the two algorithms' runs differ."""
    if len(sides) < 2:
        return []
    one, two = (side.runs[0]["settings"] for side in sides)
    names = [n for n in differences(one, two, MAY_DIFFER) if n != "algorithm"]
    here, there = flat_settings(one), flat_settings(two)
    text = "; ".join(f"{n} {here.get(n)} and {there.get(n)}" for n in names) or "none but each algorithm's own"
    return [(f"settings that differ, {sides[0].name} and {sides[1].name}", text)]


def _warnings(sides: Sequence[Side], start: Generations, seed: int) -> list[str]:
    return [
        f"{side.name}, seed {run['seed']}: {warning}"
        for side in sides
        for run, replies in zip(side.runs, side.measured, strict=True)
        for warning in warnings(replies, start, seed, target_at_end(config_of_run(run)))
    ]


def _within(sides: Sequence[Side], start: Generations, seed: int) -> list[dict[str, Any]]:
    """Each run against the start model, with intervals over prompts."""
    rows = []
    for side in sides:
        for run, replies in zip(side.runs, side.measured, strict=True):
            row = {"run": f"{side.name}, seed {run['seed']}"}
            for measure, name in MEASURE_NAMES.items():
                ours, theirs = getattr(replies, measure), getattr(start, measure)
                if ours is not None:
                    row[name] = asdict(over_prompts(ours.mean(axis=1) - theirs.mean(axis=1), seed))
                    row[f"{name}_win_rate"] = asdict(over_prompts(win_rates(ours, theirs), seed, A_SHARE))
            rows.append(row)
    return rows


def _costs(run: dict[str, Any]) -> dict[str, float]:
    """Time and memory of a finished run."""
    return {name: run["figures"][name] for name in ("seconds", "peak_memory_gib") if name in run.get("figures", {})}


def _samples(bench: Bench, sides: Sequence[Side], start: Generations) -> list[dict[str, Any]]:
    """Prompts drawn at random, with all completions of the start model and of each side's first seed."""
    drawn = generator(bench.settings.seed, 0, "show").permutation(len(bench.examples))[:SAMPLES]
    everyone = [start, *(side.measured[0] for side in sides)]
    return [
        {"messages": list(bench.examples[i].messages), "sides": sides_of(everyone, i)} for i in sorted(drawn.tolist())
    ]


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(report: dict[str, Any], sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Every table with its caption, columns and rows of text."""
    return [
        _figure_table(report, sides),
        _contrast_table(report),
        _within_table(report),
        _spent_table(report, sides),
        _equal_table(report),
    ]


def _figure_table(report: dict[str, Any], sides: Sequence[Side]) -> dict[str, Any]:
    rows = []
    for name, (label, _) in LABELS.items():
        of_sides = [side.figure(name) for side in sides]
        if all(value is None for values in of_sides for value in values):
            continue
        rows.append([label, shown(name, report["figures"]["start"][name]), *(_mean(name, v) for v in of_sides)])
    columns = ["", "start model", *(f"{s.name} ({_seeds(s)})" for s in sides)]
    return {
        "caption": "On the same prompts: mean over seeds (lowest to highest seed)",
        "columns": columns,
        "rows": rows,
    }


def _seeds(side: Side) -> str:
    return f"{len(side.seeds)} seed{'s' if len(side.seeds) > 1 else ''}"


def _mean(name: str, values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    spread = f" ({shown(name, min(known))} to {shown(name, max(known))})" if len(known) > 1 else ""
    return shown(name, fmean(known)) + spread


def _contrast_table(report: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [
            f"{c['name']}, {MEASURE_NAMES[c['measure']]}",
            _interval(c["difference"], "+"),
            _interval(c["win_rate"], ""),
            c["over"] + (" and prompts" if c["over"] == "seeds" else " within one run"),
        ]
        for c in report["contrasts"]
    ]
    columns = ["", "difference (95% interval)", "win rate, ties half (95% interval)", "interval over"]
    return {
        "caption": "Differences (the last column says what the intervals are over)",
        "columns": columns,
        "rows": rows,
    }


def _within_table(report: dict[str, Any]) -> dict[str, Any]:
    judged = "judge" in report["within"][0]
    kinds = [("score", "+"), ("score_win_rate", ""), *([("judge", "+"), ("judge_win_rate", "")] if judged else [])]
    rows = [[row["run"], *(_interval(row[name], sign) for name, sign in kinds)] for row in report["within"]]
    columns = ["", *(name.replace("_", " ") for name, _ in kinds)]
    return {"caption": "Each run less the start model, 95% intervals over prompts", "columns": columns, "rows": rows}


def _interval(found: dict[str, float | None], sign: str) -> str:
    if found["low"] is None:
        return f"{found['value']:{sign}.3f}"
    return f"{found['value']:{sign}.3f} ({found['low']:{sign}.3f} to {found['high']:{sign}.3f})"


SPENT = {
    "episodes": ("episodes", "{:,.0f}".format),
    "updates": ("updates", "{:,.0f}".format),
    "optimizer_steps": ("optimizer steps", "{:,.0f}".format),
    "reply_tokens": ("reply tokens", "{:,.0f}".format),
    "seconds": ("time", clock),
    "peak_memory_gib": ("peak memory, GiB", "{:.2f}".format),
}


def _spent_table(report: dict[str, Any], sides: Sequence[Side]) -> dict[str, Any]:
    rows = []
    for name, (label, show) in SPENT.items():
        cells = []
        for side in sides:
            values = [run[name] for run in report["spent"][side.name].values() if name in run]
            spread = f" ({show(min(values))} to {show(max(values))})" if len(set(values)) > 1 else ""
            cells.append(show(fmean(values)) + spread if values else "-")
        rows.append([label, *cells])
    columns = ["", *(side.name for side in sides)]
    return {"caption": "What each run spent: mean over seeds (lowest to highest)", "columns": columns, "rows": rows}


def _equal_table(report: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for row in report["at_equal"]:
        for name, reached in row["sides"].items():
            judge = "-" if reached["judge"] is None else f"{reached['judge']:.3f}"
            rows.append([f"{row['budget']}: {name}", f"{reached['score']:+.3f}", judge, f"{reached['kl']:.2f}",
                         f"{reached['update']:.0f}"])  # fmt: skip
        if row.get("difference") is not None:
            found, cells = row["difference"], ["", ""]
            cells[found["by"] == "judge"] = f"{_interval(found, '+')}, over {found['over']}"
            rows.append([f"{row['budget']}: {' - '.join(row['sides'])}", *cells, "", ""])
    caption = "At equal budgets: each run's own last evaluation inside the budget, one reply to each of its prompts"
    columns = ["", "score", "judge", "KL, nats/sequence", "after update (mean)"]
    return {"caption": caption, "columns": columns, "rows": rows}


# --- out -------------------------------------------------------------------------------------------------------------


def show_comparison(report: dict[str, Any], verdict: Verdict, made: Sequence[dict], screen: Screen) -> None:
    """On the console: the tables, then the verdict."""
    for table in made:
        screen.table(table["caption"], table["columns"], table["rows"], lines=False)
    for warning in report["warnings"]:
        screen.say(f"warning: {warning}")
    screen.say("verdict:")
    for sentence in verdict.sentences:
        screen.say(f"  {sentence}")
    for caveat in verdict.caveats:
        screen.say(f"  ({caveat})")


def write_comparison(
    report: dict[str, Any],
    made: Sequence[dict],
    sides: Sequence[Side],
    start: Generations,
    curves: Sequence[RunCurves],
    output: str,
    screen: Screen,
) -> None:
    """comparison.html, comparison.md with its picture, comparison.json."""
    folder = Path(output)
    if folder.is_file():
        raise UserError(f"a file, not a folder: --output {folder}. Name another with --output")
    folder.mkdir(parents=True, exist_ok=True)
    picture = score_against_kl(curves)
    save_picture(picture, folder / "score_against_kl.png")
    write_json(folder / "comparison.json", report)
    pooled = distributions([start, *(s.measured[0] for s in sides)], ["start", *(s.algorithm for s in sides)])
    shared = {
        "title": "Start model, " + " and ".join(side.name for side in sides),
        "report": report,
        "facts": list(report["facts"].items()),
        "tables": made,
    }
    write_page(folder / "comparison.md", render("comparison.md", **shared))
    page = render(
        "comparison.html", **shared, score_against_kl=as_data_url(picture), distributions=as_data_url(pooled)
    )
    write_page(folder / "comparison.html", page)
    screen.say("saved:")
    screen.facts(
        [
            (str(folder / "comparison.html"), "the page: open it in a browser"),
            (str(folder / "comparison.md"), "the same for a repository or a paper's appendix"),
            (str(folder / "comparison.json"), "the same as data"),
        ]
    )

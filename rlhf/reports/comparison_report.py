"""The report of a comparison, as console output, Markdown, page, JSON and picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import compress, groupby
from pathlib import Path
from typing import Any

from rlhf.analysis.audit import against, as_json, figures, target_at_end, warnings, without_score
from rlhf.analysis.compared_runs import groups_of
from rlhf.analysis.curves import RunCurves
from rlhf.analysis.equal_budget import EvalPoint, at_equal, result_over
from rlhf.analysis.evaluator import GenerationResults, ModelEvaluator
from rlhf.analysis.groups import ALL_PAIRS, differing_settings, in_one_spelling, short_label, short_pair, unread
from rlhf.analysis.models import ModelRef, episodes_of
from rlhf.analysis.statistics import LEVEL, interval_of, percent
from rlhf.analysis.verdict import RunGroup, judge_runs
from rlhf.checkpoints.run_record import RunRecord, environment, now
from rlhf.config import config_of_run
from rlhf.reports.comparison_tables import samples_in_words
from rlhf.reports.evaluation_report import completions_by_model
from rlhf.reports.plot_style import COLOURS, as_data_url, group_styles, save_picture
from rlhf.reports.report_plots import distributions, score_against_kl
from rlhf.settings.fields import as_text
from rlhf.utils.console import Screen, listed
from rlhf.utils.files import json_ready, write_json, write_text
from rlhf.utils.html import render
from rlhf.utils.rng import rng_for

SAMPLES = 8  # prompts with completions in the report
MOST_DRAWN = 6  # groups in the picture of distributions: more lines cannot be told apart


def make_groups(
    models: Sequence[ModelRef], measured: Sequence[GenerationResults], labels: Sequence[str] = ()
) -> list[RunGroup]:
    """Returns the groups of runs with the same settings, each in the order of seeds. `labels` are their names."""
    groups = []
    for found in groups_of(models, labels):
        members = sorted(found.members, key=lambda i: models[i].run.seed)
        runs, episodes = [models[i].run for i in members], [episodes_of(models[i]) for i in members]
        results = [measured[i] for i in members]
        groups.append(RunGroup(found.algorithm, runs, results, episodes, found.label, found.settings))
    return groups


def make_comparison(
    evaluator: ModelEvaluator,
    groups: Sequence[RunGroup],
    start: GenerationResults,
    eval_points: Sequence[tuple[str, list[EvalPoint]]],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the comparison as JSON-ready data. `eval_points`: (name of the group, evaluations during training) per
    run. `notes` are more caveats."""
    seed = evaluator.settings.seed
    judges = [judge.name for judge in evaluator.judges]
    independent = not judges or evaluator.judges[0].independent
    verdict = judge_runs(groups, start, evaluator.judge_name, seed, evaluator.score_name, independent)
    everyone = [start, *(results for group in groups for results in group.measured)]
    by_group = {group.name: [found for name, found in eval_points if name == group.name] for group in groups}
    equal = at_equal(by_group, evaluator.rate if judges else None, seed)
    report = {
        "made": now(),
        **environment(),
        "verdict": verdict.sentences,
        "caveats": [
            *verdict.caveats,
            *notes,
            *without_score(everyone),
            *at_equal_in_words(equal, evaluator.judge_name),
        ],
        "judges": judges,
        "warnings": _warnings(groups, start, seed),
        "facts": dict([*evaluator.facts(), *settings_that_differ(groups)]),
        "groups": {group.name: {"algorithm": group.algorithm, "settings": group.settings} for group in groups},
        "figures": {"start": figures(start)}
        | {group.name: dict(zip(map(str, group.seeds), group.figures, strict=True)) for group in groups},
        "contrasts": [asdict(c) for c in verdict.contrasts],
        "within": _within(groups, start, seed),
        "spent": {group.name: {str(run.seed): _costs(run) for run in group.runs} for group in groups},
        "at_equal": equal,
        "samples": _samples(evaluator, groups, start),
    }
    return json_ready(report)


def at_equal_in_words(rows: Sequence[dict[str, Any]], judge: str | None = None) -> list[str]:
    """Returns one line per equal budget with the difference of each pair, and one per pair with its differences at all
    equal KLs. `judge` is the judge that decides."""
    if not rows:
        return ["a run has no stored evaluations, so there is no comparison at equal training time"]
    lines = []
    for (kind, groups), same in groupby(rows, key=lambda row: (row["kind"], list(row["sides"]))):
        row, *more = same
        kls = [f"{one['number']:.3g}" for one in (row, *more) if kind == "kl" and groups]
        budget = f"equal KL ({', '.join(kls)} nats/sequence)" if kls else row["budget"]
        found = [pair for pair in row["differences"] if "missing" not in pair]
        if found:
            unrated = judge is not None and found[0]["by"] == "score"
            why = f"; {judge} may need columns of these prompts, which --prompts replaces" if unrated else ""
            level = "" if found[0]["level"] == LEVEL else f", {percent(found[0]['level'])} intervals"
            pairs = zip(*(one["differences"] for one in (row, *more)), strict=True)
            lines.append(
                f"at {budget}, by the {found[0]['by']} in the evaluations during training (their own prompts, "
                f"{samples_in_words(row)} each{why}){level}: "
                f"{'; '.join(_pair_in_words(pair, groups, kind) for pair in pairs)}"
            )
        elif row["differences"]:
            reasons = dict.fromkeys(pair["missing"] for pair in row["differences"])
            lines.append(f"no comparison at {budget}: {'; '.join(reasons)}")
    return lines


def _pair_in_words(at: Sequence[dict[str, Any]], groups: Sequence[str], kind: str) -> str:
    """Returns a pair's difference at a budget, or its differences at all equal KLs, and the result."""
    name, result = short_pair(at[0]["name"], groups), result_over(at)
    if missing := [pair["missing"] for pair in at if "missing" in pair]:
        return f"{name} not compared ({missing[0]})"
    differences = f"{name} = {', '.join(interval_of(pair) for pair in at)}"
    if kind != "kl":
        return f"{differences}, {'significant' if result in ('better', 'worse') else 'not significant'}"
    one, other = groups
    depends = "which one is better depends on the KL"
    results = {"better": f"{one} is better", "worse": f"{other} is better", "mixed": depends}
    return f"{differences}: {results.get(result, 'no significant difference')}"


def settings_that_differ(groups: Sequence[RunGroup]) -> list[tuple[str, str]]:
    """Returns the settings in which the groups differ, without those that not both algorithms use; then each K.

    More than 4 groups have only the names of these settings here, because a table has the values.
    """
    if len(groups) < 2:
        return []
    flat = [run.flat_settings for run in in_one_spelling([group.runs[0] for group in groups])]
    differ = [name for name in differing_settings([group.algorithm for group in groups], flat) if name != "K"]
    if len(groups) > ALL_PAIRS:
        return [("settings that differ", f"{', '.join(differ) or 'none'} (see the table of groups)")]
    read = {name: [name not in unread(group.algorithm) for group in groups] for name in differ}
    if any(of.get("K") is not None for of in flat):
        read["K"] = [of.get("K") is not None for of in flat]
    parts = [] if differ else ["only those of a single algorithm"]
    names = [short_label(group.name, group.title, group.settings) for group in groups]
    if len(set(names)) == len(names):
        for name, reads in read.items():
            values = [f"{of} {as_text(have.get(name, 'unknown'), ' ')}" for of, have in zip(names, flat, strict=True)]
            parts.append(f"{name}: {', '.join(compress(values, reads))}")
        return [("settings that differ", "; ".join(parts))]
    for name, reads in read.items():  # the labels of groups of one algorithm consist of these settings
        cells = [as_text(have.get(name, "unknown"), " ") if of else "-" for have, of in zip(flat, reads, strict=True)]
        parts.append(f"{name}: {' / '.join(cells)}")
    return [("settings that differ", f"{'; '.join(parts)} (in the order of the groups)")]


def _warnings(groups: Sequence[RunGroup], start: GenerationResults, seed: int) -> list[str]:
    return [
        f"{group.name}, seed {run.seed}: {warning}"
        for group in groups
        for run, completions in zip(group.runs, group.measured, strict=True)
        for warning in warnings(completions, start, seed, target_at_end(config_of_run(run)))
    ]


def _within(groups: Sequence[RunGroup], start: GenerationResults, seed: int) -> list[dict[str, Any]]:
    """Compares each run with the start model, with intervals over prompts."""
    rows = []
    for group in groups:
        for run, completions in zip(group.runs, group.measured, strict=True):
            found = as_json(against(completions, start, seed))
            kept = {"score": "score", "score_win_rate": "win_rate"}
            for wins in (name for name in found if name.startswith("judge_win_rate")):
                kept |= {name: name for name in (wins.replace("_win_rate", "", 1), wins)}
            known = {name: found[figure] for name, figure in kept.items() if found[figure] is not None}
            rows.append({"run": f"{group.name}, seed {run.seed}", **known})
    return rows


def _costs(run: RunRecord) -> dict[str, float]:
    """Returns the counts, time and memory of a finished run; empty for an unfinished one."""
    spent, figures = asdict(run.spent) if run.spent else {}, run.figures or {}
    return spent | {name: figures[name] for name in ("seconds", "cpu_seconds", "peak_memory_gib") if name in figures}


def _samples(evaluator: ModelEvaluator, groups: Sequence[RunGroup], start: GenerationResults) -> list[dict[str, Any]]:
    """Returns random prompts with all completions of the start model and of each group's first seed."""
    drawn = rng_for(evaluator.settings.seed, 0, "show").permutation(len(evaluator.examples))[:SAMPLES]
    everyone = [start, *(group.measured[0] for group in groups)]
    return [
        {"messages": list(evaluator.examples[i].messages), "sides": completions_by_model(everyone, i)}
        for i in sorted(drawn.tolist())
    ]


# --- output ----------------------------------------------------------------------------------------------------------


def show_comparison(report: dict[str, Any], made: Sequence[dict], screen: Screen) -> None:
    """Prints the tables, the warnings and the verdict."""
    for table in made:
        screen.table(table["caption"], table["columns"], table["rows"], lines=False)
    for warning in report["warnings"]:
        screen.say(f"warning: {warning}")
    screen.say("Verdict")
    for sentence in report["verdict"]:
        screen.say(f"  {sentence}")
    for caveat in report["caveats"]:
        screen.say(f"  note: {caveat}")


def write_comparison(
    report: dict[str, Any],
    made: Sequence[dict],
    groups: Sequence[RunGroup],
    start: GenerationResults,
    curves: Sequence[RunCurves],
    folder: Path,
    screen: Screen,
    labels: Sequence[str] = (),
) -> None:
    """Writes comparison.html, comparison.md with its picture, and comparison.json. `labels` as in `make_groups`."""
    picture = score_against_kl(curves, labels)
    save_picture(picture, folder / "score_against_kl.png")
    write_json(folder / "comparison.json", report)
    shown = groups[:MOST_DRAWN]
    colours = [COLOURS["start"], *(line_style.colour for line_style in group_styles([g.algorithm for g in groups]))]
    pooled = distributions([start, *(group.measured[0] for group in shown)], [], colours[: len(shown) + 1])
    names = listed([group.name for group in groups]) if len(groups) <= ALL_PAIRS else f"{len(groups)} groups of runs"
    shared = {
        "title": f"Comparison of the start model{' and ' if len(groups) > ALL_PAIRS else ', '}{names}",
        "shown": len(shown),
        "report": report,
        "facts": list(report["facts"].items()),
        "tables": made,
    }
    write_text(folder / "comparison.md", render("comparison.md", **shared))
    page = render(
        "comparison.html", **shared, score_against_kl=as_data_url(picture), distributions=as_data_url(pooled)
    )
    write_text(folder / "comparison.html", page)
    screen.say("saved:")
    screen.facts(
        [
            (str(folder / "comparison.html"), "page for the browser"),
            (str(folder / "comparison.md"), "the same as Markdown"),
            (str(folder / "comparison.json"), "the figures as JSON"),
        ]
    )

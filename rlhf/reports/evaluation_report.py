"""The report of an evaluation, as console output, JSON and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf.analysis.audit import (
    against,
    figures,
    figures_of,
    label_of,
    shown,
    target_at_end,
    warnings,
    without_score,
)
from rlhf.analysis.evaluator import GenerationResults, ModelEvaluator
from rlhf.analysis.models import ModelRef, equal_to_start
from rlhf.analysis.statistics import interval_of, ranks
from rlhf.checkpoints.run_record import environment, now
from rlhf.config import config_of_run
from rlhf.data.prompts import FEW_PROMPTS
from rlhf.reports.plot_style import as_data_url, group_styles
from rlhf.reports.report_plots import distributions
from rlhf.utils.console import Screen
from rlhf.utils.files import json_ready, write_json, write_text
from rlhf.utils.html import render

SHOWN_ON_SCREEN = 3  # prompts; the page shows all
VERSUS_CAPTION = "Compared with the start model (95% confidence intervals over prompts)"
READ_THEM = "The audit checks only figures, so read the completions, too."


def make_report(
    evaluator: ModelEvaluator,
    models: Sequence[ModelRef],
    measured: Sequence[GenerationResults],
    start: GenerationResults | None,
) -> dict[str, Any]:
    """Returns the report on the models as JSON-ready data."""
    seed = evaluator.settings.seed
    everyone = [results for results in (start, *measured) if results is not None]
    report = {
        "made": now(),
        **environment(),
        "facts": dict(evaluator.facts()),
        "judges": [judge.name for judge in evaluator.judges],
        "notes": [*equal_to_start(models), *without_score(everyone)],
        "seed": seed,
        "start": start and {"label": start.label, "source": evaluator.start.source, "figures": figures(start)},
        "models": [_entry(*pair, start, seed) for pair in zip(models, measured, strict=True)],
        "prompts": [
            {"messages": list(example.messages), "sides": completions_by_model(everyone, i)}
            for i, example in enumerate(evaluator.examples)
        ],
    }
    return json_ready(report)


def _entry(model: ModelRef, results: GenerationResults, start: GenerationResults | None, seed: int) -> dict[str, Any]:
    """Returns one model's part of the report."""
    target = target_at_end(config_of_run(model.run)) if model.run else None
    differ = against(results, start, seed) if start is not None else None
    return {
        "label": results.label,
        "source": model.source,
        "base": model.base,
        "which": model.which or None,
        "algorithm": model.run.algorithm if model.run else None,
        "figures": figures(results),
        "against_start": differ and {name: value and asdict(value) for name, value in differ.items()},
        "warnings": warnings(results, start, seed, target) if start is not None else [],
    }


def completions_by_model(everyone: Sequence[GenerationResults], prompt: int) -> list[dict[str, Any]]:
    """Returns each model's completions of one prompt, the highest score first."""
    return [{"model": completions.label, "completions": ranked(completions, prompt)} for completions in everyone]


def ranked(completions: GenerationResults, prompt: int) -> list[dict[str, Any]]:
    """Returns one model's completions of one prompt with rank, BEST / MEDIUM / WORST, scores and KL.

    "judge" is the first judge's rating, "judges" those of all judges. A completion without a score is the last, and
    has no rank and no label.
    """
    ratings = {name: values[prompt].tolist() for name, values in completions.judged.items()}
    rows = [
        {
            "rank": rank,
            "label": label,
            "score": float(completions.scores[prompt, k]),
            "judge": next((values[k] for values in ratings.values()), None),
            "judges": {name: values[k] for name, values in ratings.items()},
            "kl": float(completions.kl[prompt, k]) if completions.kl is not None else None,
            "tokens": int(completions.lengths[prompt, k]),
            "ended": bool(completions.ended[prompt, k]),
            "text": completions.texts[prompt][k],
        }
        for k, (rank, label) in enumerate(ranks(completions.scores[prompt].tolist()))
    ]
    return json_ready(sorted(rows, key=lambda row: row["rank"] or len(rows) + 1))


def labelled(completion: dict[str, Any]) -> str:
    """Returns a completion's label and score, such as "BEST +1.20"."""
    if completion["score"] is None:
        return "no score"
    return f"{completion['label']} {completion['score']:+z.2f}"


def figure_table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows, with one row per figure and one column per model. Empty rows are left out."""
    everyone = [*([report["start"]] if report["start"] else []), *report["models"]]
    rows = [
        [label_of(name, report["judges"]), *(shown(name, m["figures"].get(name)) for m in everyone)]
        for name in figures_of([m["figures"] for m in everyone])
    ]
    return ["", *(m["label"] for m in everyone)], rows


def versus_table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows of the comparison with the start model; empty if there is none."""
    if report["start"] is None:
        return [], []
    rows, figures = [], report["models"][0]["figures"]
    for name in report["models"][0]["against_start"]:
        found = [m["against_start"][name] for m in report["models"]]
        if any(value is not None for value in found):
            kind, sign = (", difference", "+") if name in figures else ("", "")
            cells = ("-" if value is None else interval_of(value, sign) for value in found)
            rows.append([label_of(name, report["judges"]) + kind, *cells])
    return ["", *(m["label"] for m in report["models"])], rows


def show_report(report: dict[str, Any], screen: Screen) -> None:
    """Prints a few prompts with their ranked completions, the tables, and the warnings."""
    for prompt in report["prompts"][:SHOWN_ON_SCREEN]:
        cells = ["\n\n".join(f"{labelled(c)}: {c['text']}" for c in side["completions"]) for side in prompt["sides"]]
        screen.table(prompt["messages"][-1]["content"], [side["model"] for side in prompt["sides"]], [cells])
    screen.table("Figures, on the same prompts", *figure_table(report), lines=False)
    if report["start"] is not None:
        screen.table(VERSUS_CAPTION, *versus_table(report), lines=False)
    else:
        screen.say("no start model: no comparison and no audit (give one with --baseline)")
    if len(report["prompts"]) < FEW_PROMPTS:
        screen.say(f"only {len(report['prompts'])} prompts: figures and intervals are approximate. Evaluate on more")
    for note in report["notes"]:
        screen.say(f"note: {note}")
    for model in report["models"]:
        for warning in model["warnings"]:
            screen.say(f"warning: {model['label']}: {warning}")
        if model["figures"]["score"] is None:
            screen.say(f"warning: {model['label']}: no completion has a score, so the audit has nothing to compare")
        elif report["start"] is not None and not model["warnings"]:
            screen.say(f"{model['label']}: no signs of reward hacking. {READ_THEM}")


def write_report(report: dict[str, Any], pictured: Sequence[GenerationResults], folder: Path, screen: Screen) -> None:
    """Writes evaluation.json and evaluation.html."""
    write_json(folder / "evaluation.json", report)
    kinds = [*(["start"] if report["start"] else []), *(m["algorithm"] or "" for m in report["models"])]
    page = render(
        "evaluation.html",
        title="Evaluation: completions, scored and ranked",
        facts=list(report["facts"].items()),
        models=report["models"],
        figures=figure_table(report),
        versus=versus_table(report),
        versus_caption=VERSUS_CAPTION,
        read_them=READ_THEM,
        picture=as_data_url(distributions(pictured, [styled.colour for styled in group_styles(kinds)])),
        prompts=report["prompts"],
        everything=report,
    )
    write_text(folder / "evaluation.html", page)
    screen.say(f"saved: {folder / 'evaluation.html'} and {folder / 'evaluation.json'}")

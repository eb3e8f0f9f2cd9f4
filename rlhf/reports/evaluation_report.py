"""The report of an evaluation, and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlhf.analysis.audit import rated_prompts, target_at_end, warnings, without_score
from rlhf.analysis.conditions import changed_code
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.models import equal_to_start
from rlhf.analysis.verdict import Arm, contrast, few_prompts
from rlhf.checkpoints.run_record import environment, now
from rlhf.data.row import Example
from rlhf.reports.comparison_tables import contrast_table, figure_table
from rlhf.reports.page import Page, Picture
from rlhf.reports.report_plots import forest
from rlhf.reports.tables import FigureRow, TextTable, before_and_after, figure_names
from rlhf.trainer.evaluation import Evaluation
from rlhf.utils.console import Screen, listed, number
from rlhf.utils.paths import path_on_page
from rlhf.utils.results import json_ready
from rlhf.utils.statistics import ranks

SHOWN_ON_SCREEN = 3  # prompts; the page shows all
# a completion on the console
SCORED = "{label} {score}: {text}"
UNSCORED = "no score: {text}"
FOREST = "Differences, with their intervals and the smallest visible difference"
READ_THEM = "The audit checks only figures, so read the completions, too."


def make_report(evaluator: ModelEvaluator, arms: Sequence[Arm], start: Arm | None) -> dict[str, Any]:
    """Return the report on models, each of which is an arm, as JSON-ready data."""
    seed = evaluator.settings.seed
    all_arms = [arm for arm in (start, *arms) if arm is not None]
    everyone = [arm.measured[0] for arm in all_arms]
    copies = evaluator.drop_copies(everyone)
    few = few_prompts(*everyone[0].scores.shape)
    contrasts = [contrast(arm, start, measure, seed) for measure in everyone[0].measures for arm in arms if start]
    models = [_entry(arm, start, evaluator) for arm in arms]
    unscored = [model["label"] for model in models if model["figures"]["score"] is None]
    enough = min(2, len(evaluator.examples))  # prompts to check whether the judge agrees with the score
    unrated = [arm.name for arm in arms if start and rated_prompts(arm.measured[0], start.measured[0]) < enough]
    unrated = [name for name in unrated if evaluator.judges and name not in unscored]
    unchecked = {*unscored, *unrated}
    clean = [model["label"] for model in models if start and not model["warnings"] and model["label"] not in unchecked]
    signs = "too few prompts to show signs" if few else "no signs"
    said = evaluator.screen
    notes = [
        *dict.fromkeys(said.notes),
        *few,
        *equal_to_start([arm.models[0] for arm in arms]),
        *copies,
        *without_score(everyone),
    ]
    if start is None:
        notes.append("no start model: no comparison and no audit (give one with --baseline)")
    report = {
        "made": now(),
        **environment(),
        "facts": dict(evaluator.facts()),
        "judges": [judge.name for judge in evaluator.judges],
        "headline": f"{listed(clean)}: {signs} of reward hacking. {READ_THEM}" if clean else "",
        "warnings": [
            *dict.fromkeys(said.warnings),
            *changed_code(evaluator.runs, evaluator.config),
            *(f"{model['label']}: {warning}" for model in models for warning in model["warnings"]),
        ],
        "notes": [
            *notes,
            *(f"{name}: no completion has a score, so there is no audit" for name in unscored),
            *(f"{name}: the audit did not compare judge and score, because ratings are missing" for name in unrated),
        ],
        "seed": seed,
        "start": start
        and {"label": start.name, "source": path_on_page(evaluator.start.source), "figures": start.figures[0]},
        "models": models,
        "contrasts": [asdict(c) for c in contrasts],
        "prompts": with_completions(evaluator.examples, range(len(evaluator.examples)), all_arms),
    }
    return json_ready(report)


def _entry(arm: Arm, start: Arm | None, evaluator: ModelEvaluator) -> dict[str, Any]:
    """Return one model's part of the report."""
    (model,) = arm.models
    (results,) = arm.measured
    seed = evaluator.settings.seed
    return {
        "label": arm.name,
        "source": path_on_page(model.source),
        "base": model.base and path_on_page(model.base),
        "which": model.which or None,
        "algorithm": arm.algorithm or None,
        "figures": arm.figures[0],
        "warnings": warnings(results, start.measured[0], seed, target_at_end(model, evaluator))
        if start is not None
        else [],
    }


def with_completions(examples: Sequence[Example], chosen: Sequence[int], arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Return the chosen prompts with the completions by the first model of each arm, the highest score first."""
    return [
        {
            "messages": list(examples[i].messages),
            "sides": [{"model": arm.name, "completions": ranked(arm.measured[0], i)} for arm in arms],
        }
        for i in chosen
    ]


def ranked(completions: Evaluation, prompt: int) -> list[dict[str, Any]]:
    """Return one model's completions of one prompt with rank, BEST / MEDIUM / WORST, scores and KL.

    "judge" is the first judge's rating, "judges" those of all judges. A completion without a score is the last, and
    has no rank and no label.
    """
    ratings = {name: values[prompt].tolist() for name, values in completions.judged.items()}
    rows = [
        {
            "rank": rank,
            "label": label,
            "score": completions.scores[prompt, k],
            "judge": next((values[k] for values in ratings.values()), None),
            "judges": {name: values[k] for name, values in ratings.items()},
            "kl": None if completions.kl is None else completions.kl[prompt, k],
            "tokens": completions.lengths[prompt, k],
            "ended": completions.ended[prompt, k],
            "text": completions.texts[prompt][k],
        }
        for k, (rank, label) in enumerate(ranks(completions.scores[prompt].tolist()))
    ]
    return json_ready(sorted(rows, key=lambda row: row["rank"] or len(rows) + 1))


def evaluation_page(report: dict[str, Any], arms: Sequence[Arm], start: Arm | None) -> Page:
    """Return the page of an evaluation: each model beside the start model, if there is one."""
    blocks: list[TextTable | Picture] = [figure_table(arms, report["judges"])]
    folded = []
    if start is not None:
        blocks = [_before_and_after(report, model) for model in report["models"]]
        blocks.append(Picture("differences", FOREST, forest(report["contrasts"], report["judges"])))
        folded = [contrast_table(report)]
    return Page("evaluation", "Evaluation: completions, scored and ranked", report, blocks, folded)


def _before_and_after(report: dict[str, Any], model: dict[str, Any]) -> TextTable:
    """Return the table of the start model's figures and a model's."""
    start = report["start"]
    name = f"{model['label']} - {start['label']}"
    ends = {c["measure"]: c["difference"] for c in report["contrasts"] if c["name"] == name}
    rows = []
    for figure in figure_names([start["figures"], model["figures"]]):
        values = [of["figures"].get(figure) for of in (start, model)]
        found = ends.get(figure, {"low": None})
        rows.append(FigureRow(figure, values, None if found["low"] is None else (found["low"], found["high"])))
    columns = [start["label"], model["label"]]
    return before_and_after("Figures on the same prompts", columns, rows, report["judges"])


def show_prompts(report: dict[str, Any], screen: Screen) -> None:
    """Print a few prompts with their ranked completions."""
    for prompt in report["prompts"][:SHOWN_ON_SCREEN]:
        cells = [
            "\n\n".join(
                SCORED.format(**c | {"score": number(c["score"], sign="+")}) if c["label"] else UNSCORED.format(**c)
                for c in side["completions"]
            )
            for side in prompt["sides"]
        ]
        screen.table(prompt["messages"][-1]["content"], [side["model"] for side in prompt["sides"]], [cells])

"""The report of an evaluation, as console output, JSON and page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf.analysis.audit import target_at_end, warnings, without_score
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.models import equal_to_start
from rlhf.analysis.statistics import few_prompts, ranks
from rlhf.analysis.verdict import Arm, contrast
from rlhf.checkpoints.run_record import environment, now
from rlhf.reports.comparison_tables import contrast_table, figure_table
from rlhf.reports.plot_style import as_data_url
from rlhf.reports.report_plots import forest
from rlhf.trainer.evaluation import Evaluation
from rlhf.utils.console import Screen
from rlhf.utils.files import json_ready, update_dir_atomically, write_json, write_text
from rlhf.utils.html import render
from rlhf.utils.paths import path_on_page

SHOWN_ON_SCREEN = 3  # prompts; the page shows all
# a completion on the console
SCORED = "{label} {score:+z.2f}: {text}"
UNSCORED = "no score: {text}"
READ_THEM = "The audit checks only figures, so read the completions, too."


def make_report(evaluator: ModelEvaluator, arms: Sequence[Arm], start: Arm | None) -> dict[str, Any]:
    """Return the report on models, each of which is an arm, as JSON-ready data."""
    seed = evaluator.settings.seed
    all_arms = [arm for arm in (start, *arms) if arm is not None]
    everyone = [arm.measured[0] for arm in all_arms]
    copies = evaluator.drop_copies(everyone)
    few = few_prompts(*everyone[0].scores.shape)
    contrasts = [contrast(arm, start, measure, seed) for measure in everyone[0].measures for arm in arms if start]
    report = {
        "made": now(),
        **environment(),
        "facts": dict(evaluator.facts()),
        "judges": [judge.name for judge in evaluator.judges],
        "notes": [
            *few,
            *equal_to_start([arm.models[0] for arm in arms]),
            *copies,
            *without_score(everyone),
        ],
        # of an audit without warnings
        "no_signs": "too few prompts to show signs of reward hacking" if few else "no signs of reward hacking",
        "seed": seed,
        "start": start
        and {"label": start.name, "source": path_on_page(evaluator.start.source), "figures": start.figures[0]},
        "models": [_entry(arm, start, seed) for arm in arms],
        "contrasts": [asdict(c) for c in contrasts],
        "prompts": [
            {"messages": list(example.messages), "sides": completions_by_arm(all_arms, i)}
            for i, example in enumerate(evaluator.examples)
        ],
    }
    return json_ready(report)


def _entry(arm: Arm, start: Arm | None, seed: int) -> dict[str, Any]:
    """Return one model's part of the report."""
    (model,) = arm.models
    (results,) = arm.measured
    return {
        "label": arm.name,
        "source": path_on_page(model.source),
        "base": model.base and path_on_page(model.base),
        "which": model.which or None,
        "algorithm": arm.algorithm or None,
        "figures": arm.figures[0],
        "warnings": warnings(results, start.measured[0], seed, target_at_end(model)) if start is not None else [],
    }


def completions_by_arm(arms: Sequence[Arm], prompt: int) -> list[dict[str, Any]]:
    """Return the completions of one prompt by the first model of each arm, the highest score first."""
    return [{"model": arm.name, "completions": ranked(arm.measured[0], prompt)} for arm in arms]


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


def tables(report: dict[str, Any], arms: Sequence[Arm], start: Arm | None) -> list[dict[str, Any]]:
    """Return the tables with their captions, columns and rows of text."""
    everyone = [arm for arm in (start, *arms) if arm is not None]
    return [figure_table(everyone, report["judges"]), *([contrast_table(report)] if start is not None else [])]


def show_report(report: dict[str, Any], made: Sequence[dict], screen: Screen) -> None:
    """Prints a few prompts with their ranked completions, the tables, and the warnings."""
    for prompt in report["prompts"][:SHOWN_ON_SCREEN]:
        cells = [
            "\n\n".join((SCORED if c["label"] else UNSCORED).format(**c) for c in side["completions"])
            for side in prompt["sides"]
        ]
        screen.table(prompt["messages"][-1]["content"], [side["model"] for side in prompt["sides"]], [cells])
    for table in made:
        screen.table(table["caption"], table["columns"], table["rows"], lines=False)
    if report["start"] is None:
        screen.say("no start model: no comparison and no audit (give one with --baseline)")
    for note in report["notes"]:
        screen.say(f"note: {note}")
    for model in report["models"]:
        for warning in model["warnings"]:
            screen.say(f"warning: {model['label']}: {warning}")
        if model["figures"]["score"] is None:
            screen.say(f"warning: {model['label']}: no completion has a score, so the audit has nothing to compare")
        elif report["start"] is not None and not model["warnings"]:
            screen.say(f"{model['label']}: {report['no_signs']}. {READ_THEM}")


def write_report(
    report: dict[str, Any],
    made: Sequence[dict],
    folder: Path,
    screen: Screen,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Writes evaluation.json and evaluation.html, or after an error none of them. `check` is called before files are
    written, as in `update_dir_atomically`."""
    page = render(
        "evaluation.html",
        title="Evaluation: completions, scored and ranked",
        facts=list(report["facts"].items()),
        models=report["models"],
        tables=made,
        read_them=READ_THEM,
        picture=as_data_url(forest(report["contrasts"], report["judges"])) if report["contrasts"] else None,
        prompts=report["prompts"],
        everything=report,
    )

    def write(staging: Path) -> None:
        write_json(staging / "evaluation.json", report)
        write_text(staging / "evaluation.html", page)

    update_dir_atomically(folder, write, check)
    screen.say(f"saved: {folder / 'evaluation.html'} and {folder / 'evaluation.json'}")

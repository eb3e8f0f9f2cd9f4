"""The report of a comparison, and its page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from rlhf.analysis.audit import target_at_end, warnings, without_score
from rlhf.analysis.best_of_n import best_of_n
from rlhf.analysis.conditions import KL, RATED, SAMPLED, SCORED, changed_code, unlike
from rlhf.analysis.curves import RunCurves
from rlhf.analysis.equal_budget import EvalPoint, at_equal
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.groups import compared_pairs
from rlhf.analysis.verdict import START, Arm, Evidence, best_of_arm, judge_arms
from rlhf.checkpoints.run_record import RunRecord, environment, now
from rlhf.reports.comparison_tables import difference_table, folded_tables, summary_table
from rlhf.reports.evaluation_report import FOREST, with_completions
from rlhf.reports.page import Page, Picture
from rlhf.reports.report_plots import forest, score_against_kl
from rlhf.trainer.evaluation import Evaluation
from rlhf.utils.console import listed
from rlhf.utils.results import json_ready
from rlhf.utils.rng import rng_for
from rlhf.utils.statistics import A_SHARE, Estimate, over_seeds, paired, per_prompt, share_limits

SAMPLES = 8  # random prompts with completions in the report


def make_comparison(
    evaluator: ModelEvaluator,
    arms: Sequence[Arm],
    start: Arm,
    samples: Evaluation | None,
    best_of: Sequence[int],
    eval_points: dict[str, list[list[EvalPoint]]],
    notes: Sequence[str] = (),
) -> tuple[list[Arm], dict[str, Any]]:
    """Return the arms with the baselines, and the comparison as JSON-ready data.

    Args:
        evaluator: has evaluated the arms and the start model.
        samples: n completions of each prompt by the start model; None: there is no best-of-n.
        best_of: n of each best-of-n that is an arm.
        eval_points: name of an arm -> the evaluations during training of each of its runs.
        notes: more caveats.
    """
    seed = evaluator.settings.seed
    measured = [results for arm in (start, *arms) for results in arm.measured]
    copies = evaluator.drop_copies([*measured, *filter(None, [samples])])
    judge = evaluator.judge_name
    best = None
    if samples is not None:
        best = best_of_n(samples.scores, {m: values for m, values in samples.measures.items() if m != "score"})
    arms = [*arms, *(best_of_arm(samples, n, best) for n in best_of)]
    pairs = [(one.name, other.name) for one, other in compared_pairs(arms)]
    stored = SAMPLED if judge else SCORED  # the judge rates stored completions again
    *apart, undrawn = (
        unlike({arm.name: arm.runs for arm in arms}, evaluator.config, evaluator.settings, conditions)
        for conditions in (stored, stored | KL, SCORED | RATED | KL)
    )
    equal = at_equal(eval_points, evaluator.rate if judge else None, seed, pairs, apart)
    independent = judge is None or evaluator.judges[0].independent
    verdict = judge_arms(arms, start, seed, Evidence(judge, evaluator.score_name, independent, equal, best))
    drawn = sorted(rng_for(seed, 0, "show").permutation(len(evaluator.examples))[:SAMPLES].tolist())
    report = {
        "made": now(),
        **environment(),
        "headline": verdict.headline,
        "verdict": verdict.sentences,
        "notes": [
            *dict.fromkeys(evaluator.screen.notes),
            *verdict.caveats,
            *copies,
            *notes,
            *without_score(measured),
            *(not_compared(equal) if eval_points else []),
            *map("no line in the picture over KL: {}".format, undrawn.values()),
        ],
        "judges": [judge.name for judge in evaluator.judges],
        "warnings": [
            *dict.fromkeys(evaluator.screen.warnings),
            *changed_code(evaluator.runs, evaluator.config),
            *_warnings(arms, start, evaluator),
        ],
        "facts": dict(evaluator.facts()),
        "arms": {arm.name: {"algorithm": arm.algorithm, "settings": arm.settings} for arm in arms},
        "summary": [_summary(arm, seed) for arm in (start, *arms)],
        "figures": {"start": start.figures[0]} | {arm.name: by_seed(arm, arm.figures) for arm in arms},
        "contrasts": [asdict(c) for c in verdict.contrasts],
        "best_of": best and {"n": best.n, "kl": best.kl, "exact": best.exact, "measures": best.measures},
        "spent": {arm.name: by_seed(arm, [_costs(m.run) if m.run else {} for m in arm.models]) for arm in arms},
        "at_equal": equal,
        "undrawn": undrawn,
        "samples": with_completions(evaluator.examples, drawn, (start, *arms)),
    }
    return arms, json_ready(report)


def _summary(arm: Arm, seed: int) -> dict[str, Any]:
    """Return what a reader looks for first: the measure that decides with its 95% interval, the same with greedy
    decoding, the KL, and the seconds of training."""
    decides = "judge" if arm.measured[0].judged else "score"
    values = np.array([[per_prompt(results.measures[decides])] for results in arm.measured])  # (S, 1, P)
    known = paired(values)
    limits = share_limits(np.hstack([results.measures[decides] for results in arm.measured])) and A_SHARE
    found = over_seeds(known, seed, (arm.trained, False), limits)[0] if known.size else Estimate(math.nan)
    seconds = [run.figures["seconds"] for run in arm.runs if run.figures]
    return {
        "name": arm.name,
        **asdict(found),
        "greedy": arm.mean("variant/greedy"),
        "kl": arm.mean("kl"),
        "seconds": fmean(seconds) if seconds else None,
    }


def by_seed(arm: Arm, values: Sequence[Any]) -> dict[str, Any]:
    """Return a value for each model of an arm by its seed; by the arm's name for a baseline."""
    return dict(zip(arm.seeds or [arm.name], values, strict=False))


def not_compared(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line per equal budget at which pairs cannot be compared."""
    if not rows:
        return ["a run has no stored evaluations, so there is no comparison at equal episodes, time or KL"]
    return [
        f"no comparison at {row['budget']}: {'; '.join(reasons)}"
        for row in rows
        if (reasons := dict.fromkeys(pair["missing"] for pair in row["differences"] if "missing" in pair))
    ]


def _warnings(arms: Sequence[Arm], start: Arm, evaluator: ModelEvaluator) -> list[str]:
    return [
        f"{arm.name}, {number if model.run is None else f'seed {number}'}: {warning}"
        for arm in arms
        for model, number, results in zip(arm.models, arm.seeds, arm.measured, strict=False)
        for warning in warnings(results, start.measured[0], evaluator.settings.seed, target_at_end(model, evaluator))
    ]


def _costs(run: RunRecord) -> dict[str, float]:
    """Return the counts, time and memory of a finished run; empty for an unfinished one."""
    spent = asdict(run.spent) if run.spent else {}
    figures = run.figures or {}
    return spent | {name: figures[name] for name in ("seconds", "cpu_seconds", "peak_memory_gib") if name in figures}


# --- output ----------------------------------------------------------------------------------------------------------


def comparison_page(
    report: dict[str, Any], start: Arm, arms: Sequence[Arm], curves: Sequence[tuple[str, RunCurves]]
) -> Page:
    """Return the page of a comparison. `curves`: (name of the arm, its curves) of each run. Arms without curves are
    points in the picture."""
    curves = [(name, run) for name, run in curves if name not in report["undrawn"]]
    names = [name for name, _ in curves]
    ends = [{"name": START, **report["figures"]["start"]}] + [
        {"name": arm.name} | {name: arm.mean(name) for name in ("kl", "score", "judge")}
        for arm in arms
        if arm.trained and arm.name not in names and arm.mean("kl") is not None
    ]
    runs = [run for _, run in curves]
    over_kl = score_against_kl(runs, names, report["best_of"], ends, *report["judges"][:1])
    blocks = [
        summary_table(report),
        Picture("forest", FOREST, forest(report["contrasts"], report["judges"])),
        difference_table(report),
        Picture("score_against_kl", "Evaluation score over KL to the start model, with best-of-n", over_kl),
    ]
    title = f"Comparison of {listed([arm.name for arm in arms])}"
    return Page("comparison", title, report, blocks, folded_tables(report, start, arms))

"""Compares runs at equal episodes and at equal training time, with the evaluations made during training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from rlhf.analysis.curves import RunCurves
from rlhf.analysis.groups import compared_pairs
from rlhf.analysis.statistics import FEW_SCORED, level_of_each, over_seeds_if_any, paired, per_prompt, scored
from rlhf.utils.console import clock, listed
from rlhf.utils.errors import UserError


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation made during training: S completions of each of P evaluation prompts, prompt by prompt."""

    update: int
    episodes: int
    seconds: float
    rows: list[dict[str, Any]]  # P x S: prompt, completion, score, kl in nats per sequence, ended
    judged: np.ndarray | None = None  # (P x S,); NaN, also in `scores`: no function applies

    @property
    def scores(self) -> np.ndarray:
        return np.array([np.nan if row["score"] is None else row["score"] for row in self.rows])

    @property
    def samples(self) -> int:
        """The number of completions per prompt."""
        same = (row["prompt"] == self.rows[0]["prompt"] for row in self.rows)
        return sum(1 for _ in takewhile(bool, same))

    @property
    def prompts(self) -> list:
        return [row["prompt"] for row in self.rows[:: self.samples]]

    def by_prompt(self, measure: str) -> np.ndarray:
        """Returns the mean of "scores" or "judged" for each prompt (P,)."""
        return per_prompt(getattr(self, measure).reshape(-1, self.samples))


def read_eval_points(run: RunCurves) -> list[EvalPoint]:
    """Returns a run's evaluations in order, the start model's first; empty if the run stored none.

    Raises UserError if a file of completions is corrupted.
    """
    if "eval/score" not in run.scalars:
        return []
    logged = run.scalars["eval/score"]
    seconds = dict(zip(logged.updates.tolist(), logged.seconds.tolist(), strict=True))
    found = []
    for file in sorted((run.folder / "samples").glob("update-*.jsonl")):
        update = int(file.stem.split("-")[1])
        if update not in seconds:
            continue  # written, but not yet logged
        try:
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        except ValueError as error:
            raise UserError(
                f"incomplete or corrupted: {file} ({error}). Delete it to compare without this evaluation"
            ) from None
        found.append(EvalPoint(update, int(run.episodes_at(np.array([update]))[0]), seconds[update], rows))
    return found


Rate = Callable[
    [Sequence[dict[str, Any]]], np.ndarray | None
]  # rows -> a judge's ratings; None if it cannot rate them


def rated(inside: dict[str, list[EvalPoint]], rate: Rate | None) -> dict[str, list[EvalPoint]]:
    """Returns the evaluation points with the judge's ratings; without ratings if it cannot rate all of them."""
    points = [point for group in inside.values() for point in group]
    ratings = [] if rate is None else [rate(point.rows) for point in points]
    if not ratings or any(found is None for found in ratings):
        return inside
    judged = iter(ratings)
    return {name: [replace(point, judged=next(judged)) for point in group] for name, group in inside.items()}


def at_equal(eval_points: dict[str, list[list[EvalPoint]]], rate: Rate | None, seed: int) -> list[dict[str, Any]]:
    """Returns one row at equal episodes and one at equal time: the last evaluation of each run within that budget, and
    the difference of each compared pair of groups (`compared_pairs`).

    `eval_points` maps a group's name to the evaluations of its runs. `rate` returns the judge's ratings; None: there
    is no judge. The budget is the smallest that a run reached. The list is empty if a run has no evaluations.
    """
    every = [run for group in eval_points.values() for run in group]
    if not all(every):
        return []
    rows = []
    for of, show in (("episodes", "{:,} episodes".format), ("seconds", lambda s: f"{clock(s)} of training")):
        most = min(getattr(run[-1], of) for run in every)
        last = {
            name: [[eval_point for eval_point in run if getattr(eval_point, of) <= most][-1] for run in group]
            for name, group in eval_points.items()
        }
        inside = rated(last, rate)
        pairs = compared_pairs(list(inside))
        level = level_of_each(len(pairs))
        rows.append(
            {
                "budget": show(most),
                "completions": sorted({point.samples for group in inside.values() for point in group}),
                "sides": {name: _summary(found) for name, found in inside.items()},
                "differences": [_difference({name: inside[name] for name in pair}, seed, level) for pair in pairs],
            }
        )
    return rows


def _summary(found: Sequence[EvalPoint]) -> dict[str, float | None]:
    """Returns the means over a group's runs."""
    return {
        "update": float(np.mean([eval_point.update for eval_point in found])),
        "score": _mean([eval_point.scores for eval_point in found]),
        "judge": None if found[0].judged is None else _mean([eval_point.judged for eval_point in found]),
        "kl": float(np.mean([row["kl"] for eval_point in found for row in eval_point.rows])),
    }


def _mean(values: Sequence[np.ndarray]) -> float | None:
    """Returns the mean over runs of the mean over scored completions; None if a run has none."""
    known = [scored(of_run) for of_run in values]
    return float(np.mean([of_run.mean() for of_run in known])) if all(map(len, known)) else None


def _difference(pair: dict[str, Sequence[EvalPoint]], seed: int, level: float) -> dict[str, Any]:
    """Returns the first group of `pair` minus the second one with its interval, by the judge if there is one.

    If the two cannot be compared, "missing" holds the reason.
    """
    name, (one, other) = " - ".join(pair), pair.values()
    late = [group for group, found in pair.items() if any(eval_point.update == 0 for eval_point in found)]
    if late:
        return {"name": name, "missing": f"{listed(late)} had no evaluation after the start yet"}
    if any(eval_point.prompts != one[0].prompts for eval_point in (*one, *other)):
        return {"name": name, "missing": f"{listed(list(pair))} used different evaluation prompts"}
    measure = "scores" if one[0].judged is None else "judged"
    gaps = paired(np.array([[a.by_prompt(measure) - b.by_prompt(measure) for b in other] for a in one]))
    if gaps.shape[-1] < 2:
        return {"name": name, "missing": f"{FEW_SCORED[gaps.shape[-1]]} of {listed(list(pair))}"}
    found, over = over_seeds_if_any(gaps, seed, level=level)
    by = "score" if measure == "scores" else "judge"
    return {"name": name, "by": by, "over": over, "level": level, **asdict(found)}

"""What runs had reached at equal episodes and at equal time: from their own evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from rlhf.analysis.curves import RunCurves
from rlhf.analysis.statistics import level_of_each, over_seeds_if_any
from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt
from rlhf.rewards.rewards import Rewards
from rlhf.utils.console import clock, listed
from rlhf.utils.errors import UserError


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation that a run made of itself. P evaluation prompts, one reply each."""

    update: int
    episodes: int
    seconds: float
    rows: list[dict[str, Any]]  # P: prompt, reply, score, kl in nats per sequence, ended
    judged: np.ndarray | None = None  # (P,)

    @property
    def scores(self) -> np.ndarray:
        return np.array([row["score"] for row in self.rows])

    @property
    def prompts(self) -> list:
        return [row["prompt"] for row in self.rows]


def read_eval_points(run: RunCurves) -> list[EvalPoint]:
    """A run's evaluations in order, the start model's first; empty where it kept none. Raises UserError for a torn
    file of replies."""
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
            raise UserError(f"torn: {file} ({error}). Remove it to compare without it") from None
        found.append(EvalPoint(update, update * run.episodes_per_update, seconds[update], rows))
    return found


def rescore(look: EvalPoint, judge: Rewards | None) -> EvalPoint:
    """With the judge's scores of its replies."""
    if judge is None:
        return look
    prompts = [Prompt((), Example(tuple(row["prompt"]))) for row in look.rows]
    texts, ended = [row["reply"] for row in look.rows], [row["ended"] for row in look.rows]
    judged = judge.score(prompts, texts, [()] * len(texts), ended).total
    return EvalPoint(look.update, look.episodes, look.seconds, look.rows, np.array(judged))


def at_equal(looks: dict[str, list[list[EvalPoint]]], judge: Rewards | None, seed: int) -> list[dict[str, Any]]:
    """One row at equal episodes and one at equal time: each side's last evaluations inside that budget, and the
    difference of each pair of sides.

    `looks` has a side's runs by name, and a run's evaluations. The budget is the smallest that a run came to. Empty
    if a run kept no evaluations.
    """
    every = [run for side in looks.values() for run in side]
    if not all(every):
        return []
    rows = []
    for of, show in (("episodes", "{:,} episodes".format), ("seconds", lambda s: f"{clock(s)} of training")):
        most = min(getattr(run[-1], of) for run in every)
        inside = {
            name: [rescore([look for look in run if getattr(look, of) <= most][-1], judge) for run in side]
            for name, side in looks.items()
        }
        pairs = list(combinations(inside, 2))
        level = level_of_each(len(pairs))
        rows.append(
            {
                "budget": show(most),
                "sides": {name: _summary(found) for name, found in inside.items()},
                "differences": [_difference({name: inside[name] for name in pair}, seed, level) for pair in pairs],
            }
        )
    return rows


def _summary(found: Sequence[EvalPoint]) -> dict[str, float | None]:
    """Means over a side's runs."""
    return {
        "update": float(np.mean([look.update for look in found])),
        "score": float(np.mean([look.scores.mean() for look in found])),
        "judge": None if found[0].judged is None else float(np.mean([look.judged.mean() for look in found])),
        "kl": float(np.mean([row["kl"] for look in found for row in look.rows])),
    }


def _difference(pair: dict[str, Sequence[EvalPoint]], seed: int, level: float) -> dict[str, Any]:
    """The first side of `pair` less the second one, by the judge if there is one, with its interval; or, under
    "missing", why the two cannot be compared."""
    name, (one, other) = " - ".join(pair), pair.values()
    late = [side for side, found in pair.items() if any(look.update == 0 for look in found)]
    if late:
        return {"name": name, "missing": f"{listed(late)} had not evaluated itself yet"}
    if any(look.prompts != one[0].prompts for look in (*one, *other)):
        return {"name": name, "missing": f"{listed(list(pair))} evaluated different prompts"}
    measure = "scores" if one[0].judged is None else "judged"
    gaps = np.array([[getattr(a, measure) - getattr(b, measure) for b in other] for a in one])
    found, over = over_seeds_if_any(gaps, seed, level=level)
    by = "score" if measure == "scores" else "judge"
    return {"name": name, "by": by, "over": over, "level": level, **asdict(found)}

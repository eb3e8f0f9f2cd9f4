"""What runs spent, and what they had reached at equal episodes and at equal time: from their own evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhf.console import clock
from rlhf.curves import RunCurves
from rlhf.measuring import Judge
from rlhf.prompts import Example
from rlhf.statistics import over_prompts, over_seeds


@dataclass(frozen=True)
class Look:
    """One evaluation that a run made of itself. P evaluation prompts, one reply each."""

    update: int
    episodes: int
    seconds: float
    kl: float  # nats per sequence
    scores: np.ndarray  # (P,)
    judged: np.ndarray | None  # (P,)


def looks_of(run: RunCurves, judge: Judge | None) -> list[Look]:
    """A run's evaluations in order, the start model's first; judged again from their replies."""
    clocked = run.scalars["eval/score"]
    seconds = dict(zip(clocked.updates.tolist(), clocked.seconds.tolist(), strict=True))
    per_update = run.run["plan"]["episodes"] // run.run["plan"]["updates"]
    found = []
    for file in sorted((Path(run.folder) / "samples").glob("update-*.jsonl")):
        update = int(file.stem.split("-")[1])
        if update not in seconds:
            continue  # written, but not yet logged
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        examples = [Example(tuple(row["prompt"])) for row in rows]
        judged = judge(examples, [r["reply"] for r in rows], [r["ended"] for r in rows]) if judge else None
        found.append(
            Look(
                update=update,
                episodes=update * per_update,
                seconds=seconds[update],
                kl=float(np.mean([row["kl"] for row in rows])),
                scores=np.array([row["score"] for row in rows]),
                judged=np.array(judged) if judged is not None else None,
            )
        )
    return found


def at_equal(looks: dict[str, list[list[Look]]], seed: int) -> list[dict]:
    """Rows of a table: at equal episodes and at equal time, each side's last evaluations inside that budget.

    `looks` has a side's runs by name, and a run's evaluations. The budget is the smallest that a run came to.
    """
    every = [run for side in looks.values() for run in side]
    rows = []
    for of, show in (("episodes", "{:,} episodes".format), ("seconds", lambda s: f"{clock(s)} of training")):
        most = min(getattr(run[-1], of) for run in every)
        inside = {
            name: [[look for look in run if getattr(look, of) <= most][-1] for run in side]
            for name, side in looks.items()
        }
        row = {"budget": show(most), "sides": {name: _summary(found) for name, found in inside.items()}}
        if len(inside) == 2:
            row["difference"] = _difference(*inside.values(), seed)
        rows.append(row)
    return rows


def _summary(found: Sequence[Look]) -> dict[str, float | None]:
    """Means over a side's runs."""
    return {
        "update": float(np.mean([look.update for look in found])),
        "score": float(np.mean([look.scores.mean() for look in found])),
        "judge": None if found[0].judged is None else float(np.mean([look.judged.mean() for look in found])),
        "kl": float(np.mean([look.kl for look in found])),
    }


def _difference(one: Sequence[Look], other: Sequence[Look], seed: int) -> dict | None:
    """One side less the other, by the judge where there is one; None where they evaluated other prompts."""
    name = "scores" if one[0].judged is None else "judged"
    ours, theirs = ([getattr(look, name) for look in side] for side in (one, other))
    if len({len(values) for values in (*ours, *theirs)}) > 1:
        return None
    gaps = np.array([[a - b for b in theirs] for a in ours])
    few = min(len(ours), len(theirs)) < 2
    found = over_prompts(gaps.mean(axis=(0, 1)), seed) if few else over_seeds(gaps, seed)
    return {
        "by": "score" if name == "scores" else "judge",
        "over": "prompts" if few else "seeds",
        "value": found.value,
        "low": found.low,
        "high": found.high,
    }

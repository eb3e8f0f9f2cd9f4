"""Compares runs at equal episodes, equal training time and equal KL, with the evaluations made during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from rlhf.analysis.curves import RunCurves
from rlhf.analysis.groups import compared_pairs
from rlhf.utils.console import clock, listed
from rlhf.utils.errors import UserError
from rlhf.utils.files import read_jsonl
from rlhf.utils.statistics import (
    few_scored,
    level_of_each,
    over_seeds,
    paired,
    per_prompt,
    scored,
    share_limits,
)

KLS = 3  # KLs at which a pair is compared
KEYS = {"prompt", "completion", "score", "kl", "ended"}  # of a stored completion
FARTHEST = 1.25  # largest ratio of the KL of a run's first evaluation after the start to a KL at which it is compared


@dataclass
class EvalPoint:
    """One evaluation made during training: S completions of each of P evaluation prompts, prompt by prompt."""

    update: int
    episodes: int
    seconds: float
    rows: list[dict[str, Any]]  # P x S: prompt, completion, score, kl in nats per sequence, ended
    # (P x S,); NaN, also in `score`: no function applies; in `kl`: it was not measured
    judge: np.ndarray | None = None

    @property
    def score(self) -> np.ndarray:
        return np.array([row["score"] for row in self.rows], float)  # None becomes NaN

    @property
    def kl(self) -> np.ndarray:
        return np.array([row["kl"] for row in self.rows], float)

    @property
    def samples(self) -> int:
        """The number of completions per prompt."""
        same = (row["prompt"] == self.rows[0]["prompt"] for row in self.rows)
        return sum(1 for _ in takewhile(bool, same))

    @property
    def prompts(self) -> list:
        return [row["prompt"] for row in self.rows[:: self.samples]]

    def by_prompt(self, measure: str) -> np.ndarray:
        """Return the mean of "score", "judge" or "kl" for each prompt (P,)."""
        return per_prompt(getattr(self, measure).reshape(-1, self.samples))


def read_eval_points(run: RunCurves) -> list[EvalPoint]:
    """Return a run's evaluations in order, the start model's first; empty if the run stored none.

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
        fix = "Delete it to compare without this evaluation"
        rows = read_jsonl(file, fix)
        point = EvalPoint(update, int(run.episodes_at(np.array([update]))[0]), seconds[update], rows)
        whole = rows and all(isinstance(row, dict) and row.keys() >= KEYS for row in rows)
        if not whole or len(rows) % point.samples:
            raise UserError("incomplete or corrupted", file, fix)
        found.append(point)
    return found


Rate = Callable[[Sequence[dict[str, Any]]], np.ndarray | None]  # rows -> a judge's ratings; None: it cannot rate them
Runs = dict[str, list[list[EvalPoint]]]  # group -> run -> evaluations
Mix = list[tuple[float, EvalPoint]]  # a run at a budget: evaluations with weights, whose sum is 1
Groups = dict[str, list[Mix]]  # group -> run
NOT_RATED = "the judge cannot rate the stored completions: it may need columns of the data, which are not stored"


def rate_all(points: Sequence[EvalPoint], rate: Rate | None) -> bool:
    """Adds the judge's ratings to evaluations; none, and False, if there is a judge that cannot rate all of them."""
    ratings = [rate(point.rows) if rate else None for point in points]
    rated = not any(found is None for found in ratings)
    for point, of_rows in zip(points, ratings, strict=True):
        point.judge = of_rows if rated else None
    return rated or rate is None


def at_equal(
    eval_points: Runs,
    rate: Rate | None,
    seed: int,
    pairs: Sequence[tuple[str, str]] = (),
    unlike: Sequence[Mapping[str, str]] = ({}, {}),
) -> list[dict[str, Any]]:
    """Return one row at equal episodes and one at equal time, with the difference of each pair of groups (`pairs`,
    or `compared_pairs`); then one row for each pair and each of its KLs (`common_kls`), whose intervals hold together.

    At equal episodes and time, a run's last evaluation within the smallest budget that a run reached is compared, at
    equal KL an interpolation (`at_kl`). `rate` returns the judge's ratings; None: there is no judge. `unlike` has
    the groups whose evaluations cannot be used, with the reason: at equal episodes and time, and at equal KL. The list
    is empty if a run has no evaluations.
    """
    if not eval_points or not all(run for group in eval_points.values() for run in group):
        return []
    budgets = [
        _at_last(eval_points, "episodes", "{:,} episodes".format),
        _at_last(eval_points, "seconds", lambda seconds: f"{clock(seconds)} of training"),
    ]
    pairs = [pair for pair in pairs if set(pair) <= set(eval_points)] or compared_pairs(list(eval_points))
    apart = []
    for pair in pairs:
        both = {name: eval_points[name] for name in pair}
        missing = _reason(pair, unlike[1])
        kls, missing = ([], missing) if missing else common_kls(both)
        apart += [{"name": " - ".join(pair), "missing": missing}] if missing else []
        for kl in kls:
            mixed = {name: [at_kl(run, kl) for run in group] for name, group in both.items()}
            budgets.append(({"kind": "kl", "number": kl, "budget": f"KL {kl:.3g} nats/sequence"}, mixed))
    used = [point for _, groups in budgets for group in groups.values() for run in group for _, point in run]
    missing = "" if rate_all(list({id(point): point for point in used}.values()), rate) else NOT_RATED
    rows = []
    for budget, groups in budgets:
        level = level_of_each(len(pairs) * (KLS if budget["kind"] == "kl" else 1))
        found = [
            _difference({name: groups[name] for name in pair}, seed, level, _reason(pair, unlike[0]) or missing)
            for pair in pairs
            if set(pair) <= set(groups)
        ]
        rows.append({**budget, "differences": found})
    none = {"kind": "kl", "number": None, "budget": "equal KL", "differences": apart}
    return [*rows, none] if apart else rows


def _reason(pair: Sequence[str], unlike: Mapping[str, str]) -> str:
    return "; ".join(filter(None, map(unlike.get, pair)))


def _at_last(eval_points: Runs, of: str, show: Callable[[Any], str]) -> tuple[dict[str, Any], Groups]:
    """Return the smallest number of "episodes" or "seconds" that a run reached, and the last evaluations in it."""
    most = min(getattr(run[-1], of) for group in eval_points.values() for run in group)
    last = {
        name: [[(1.0, [point for point in run if getattr(point, of) <= most][-1])] for run in group]
        for name, group in eval_points.items()
    }
    return {"kind": of, "number": most, "budget": show(most)}, last


def common_kls(groups: Runs) -> tuple[list[float], str]:
    """Return the KLs at which groups are compared, in nats per sequence, or an empty list and the reason.

    They are the lowest, the middle and the highest KL between evaluations of every run after the start, but at least a
    third of the highest. If a run's first evaluation after the start is slightly above the range (`FARTHEST`), the
    highest is the only one. Scores are not read.
    """
    paths = [(name, run, _rising(run)[0]) for name, group in groups.items() for run in group]
    for name, run, kl in paths:
        if any(point.prompts != run[0].prompts for point in run):
            return [], f"{name} used different evaluation prompts during training"
        if not kl[-1] > max(kl[0], 0):  # also if it is NaN
            return [], f"no evaluation of a run of {name} has a higher KL than its first one"
    first, above = max((kl[1], name) for name, _, kl in paths)
    highest, below = min((kl[-1], name) for name, _, kl in paths)
    if max(first / FARTHEST, *(kl[0] for _, _, kl in paths)) >= highest:
        reason = f"{above} was first evaluated at KL {first:.3g}, and a run of {below} reached only KL {highest:.3g}"
        return [], f"{reason}: train with a smaller --eval-every"
    return np.unique(np.linspace(min(max(first, highest / 3), highest), highest, KLS)).tolist(), ""


def _rising(run: Sequence[EvalPoint]) -> tuple[np.ndarray, np.ndarray]:
    """Return the KLs (B,) of a monotone regression over the run, and where its blocks of evaluations begin (B + 1,).

    The measured KLs are noisy. Successive evaluations whose KL falls are one block with their mean.
    """
    found = isotonic_regression([np.nanmean(point.kl) for point in run])
    return found.x[found.blocks[:-1]], found.blocks


def at_kl(run: Sequence[EvalPoint], kl: float) -> Mix:
    """Return the run at a KL: the start with weight 0, and the blocks of `_rising` between which the KL was reached.

    The interpolation is linear in sqrt(KL), as scores are in most of a training (Bai et al. 2022, arXiv 2204.05862).
    """
    kls, begin = _rising(run)
    after = max(int(np.searchsorted(kls, kl)), 1)
    low, high = np.sqrt(np.maximum(kls[after - 1 : after + 1], 0))
    share = (np.sqrt(kl) - low) / (high - low)
    blocks = [(1 - share, run[begin[after - 1] : begin[after]]), (share, run[begin[after] : begin[after + 1]])]
    return [(0.0, run[0]), *((weight / len(block), point) for weight, block in blocks for point in block if weight)]


def _weighted_mean(run: Mix, measure: str) -> np.ndarray:
    """Return the weighted mean of "score", "judge" or "kl" for each prompt (P,)."""
    return sum(weight * point.by_prompt(measure) for weight, point in run if weight)


def _values(run: Mix, measure: str) -> np.ndarray:
    """Return the mean for each prompt (P,); at equal KL, its spread over prompts includes the error of the KL.

    A prompt with a high KL makes the run reach a KL earlier, so slope x (KL - mean KL) is subtracted, which does not
    change the mean (delta method). The slope of a gain that is proportional to sqrt(KL) is gain / (2 x KL). If the KL
    was measured on some of the prompts, the error of its mean comes from these alone, each with a larger weight.
    """
    values = _weighted_mean(run, measure)
    weight, start = run[0]
    gain = scored(values - start.by_prompt(measure))
    if weight or not len(gain):
        return values
    kl = _weighted_mean(run, "kl")
    both = ~np.isnan(kl + values)
    slope = gain.mean() / (2 * scored(kl).mean()) * len(scored(values)) / both.sum()
    return values - slope * np.where(both, kl - kl[both].mean(), 0)


def at_equal_kl(rows: Sequence[dict[str, Any]], pair_name: str) -> list[dict[str, Any]]:
    """Return the differences of a pair at each KL of `at_equal`, with the KL as "number"."""
    at = [row | pair for row in rows if row["kind"] == "kl" for pair in row["differences"]]
    return [pair for pair in at if pair["name"] == pair_name]


def result_over(differences: Sequence[dict[str, Any]]) -> str:
    """Return "better" (at least one interval is above 0 and none below), "worse", "equal", "mixed" (some are above 0
    and some below) or "unknown" (a difference has no interval)."""
    if not differences or any(pair.get("low") is None for pair in differences):
        return "unknown"
    above = any(pair["low"] > 0 for pair in differences)
    below = any(pair["high"] < 0 for pair in differences)
    return ("mixed" if below else "better") if above else "worse" if below else "equal"


def _difference(pair: dict[str, Sequence[Mix]], seed: int, level: float, missing: str) -> dict[str, Any]:
    """Return the first group of `pair` minus the second one with its interval, by the judge if there is one.

    If the two cannot be compared, "missing" holds the reason: the given one, or another one.
    """
    name = " - ".join(pair)
    if missing:
        return {"name": name, "missing": missing}
    one, other = pair.values()
    late = [group for group, found in pair.items() if any(run[-1][1].update == 0 for run in found)]
    if late:
        return {"name": name, "missing": f"{listed(late)} had no evaluation after the start yet"}
    start = one[0][0][1]
    if any(point.prompts != start.prompts for run in (*one, *other) for _, point in run):
        return {"name": name, "missing": f"{listed(list(pair))} used different evaluation prompts"}
    by = "score" if start.judge is None else "judge"
    # the spread over seeds includes the error of the KL
    values = _values if min(len(one), len(other)) < 2 else _weighted_mean
    gaps = paired(np.array([[values(a, by) - values(b, by) for b in other] for a in one]))
    if gaps.shape[-1] < 2:
        return {"name": name, "missing": f"{few_scored(gaps.shape[-1], by)} of {listed(list(pair))}"}
    limits = share_limits(np.hstack([getattr(point, by) for run in (*one, *other) for _, point in run]))
    found, over = over_seeds(gaps, seed, limits=limits, level=level)
    return {"name": name, "by": by, "over": over, "level": level, **asdict(found)}

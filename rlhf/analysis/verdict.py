"""PPO, GRPO and the start model on the same prompts, over seeds: differences, their intervals, and two sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from rlhf.algorithms.table import ALGORITHMS
from rlhf.analysis.audit import figures
from rlhf.analysis.evaluator import Generations
from rlhf.analysis.statistics import A_SHARE, EVEN, OVER_PROMPTS, Estimate, interval, over_seeds_if_any, win_rates
from rlhf.checkpoints.run_record import RunRecord

MEASURES = ("scores", "judged")
ENOUGH_SEEDS = 5
FEW_PROMPTS = 20


@dataclass(frozen=True)
class Side:
    """One algorithm's runs: the same settings, one seed each. Lists in the same order."""

    algorithm: str
    runs: list[RunRecord]
    measured: list[Generations]
    episodes: list[int]  # after which the measured weights were kept

    @property
    def name(self) -> str:
        return self.algorithm.upper()

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @cached_property
    def figures(self) -> list[dict[str, float | None]]:
        return [figures(replies) for replies in self.measured]

    def known(self, name: str) -> list[float]:
        """One figure of every run that has it."""
        return [found[name] for found in self.figures if found[name] is not None]


@dataclass(frozen=True)
class Contrast:
    """One side less another one, or less the start model, by one measure ("scores" or "judged")."""

    name: str  # such as "PPO - GRPO"
    measure: str
    difference: Estimate
    win_rate: Estimate
    over: str  # what the intervals are over


def contrast(side: Side, other: Side | Generations, measure: str, seed: int) -> Contrast:
    """Differences per prompt, and win rates of all pairs of completions, ties half.

    Intervals as in over_seeds_if_any.
    """
    trained = isinstance(other, Side)
    ours = [getattr(replies, measure) for replies in side.measured]
    theirs = [getattr(replies, measure) for replies in (other.measured if trained else [other])]
    gaps = np.array([[a.mean(axis=1) - b.mean(axis=1) for b in theirs] for a in ours])  # (S, T, P)
    wins = np.array([[win_rates(a, b) for b in theirs] for a in ours])
    difference, over = over_seeds_if_any(gaps, seed, not trained)
    win_rate, _ = over_seeds_if_any(wins, seed, not trained, EVEN, A_SHARE)
    return Contrast(f"{side.name} - {other.name if trained else 'start model'}", measure, difference, win_rate, over)


@dataclass(frozen=True)
class Verdict:
    """What can be said, and by what."""

    sentences: list[str]
    caveats: list[str]
    contrasts: list[Contrast]


def judge_runs(
    sides: Sequence[Side],
    start: Generations,
    judge_name: str | None,
    seed: int,
    score_name: str = "the reward that was trained on",
) -> Verdict:
    """The verdict in two sentences, by the judge where there is one, else by the score, called `score_name`."""
    measures = [m for m in MEASURES if getattr(start, m) is not None]
    against_start = {m: [contrast(side, start, m, seed) for side in sides] for m in measures}
    between = {m: contrast(*sides, m, seed) for m in measures} if len(sides) == 2 else {}
    by = f"by the {judge_name}, which no training saw" if judge_name else f"by {score_name}"
    deciding = against_start[measures[-1]]
    if between:
        sentences = [_between(sides, between[measures[-1]], by), _against_start(sides, deciding, start)]
    else:
        other = " or ".join(name.upper() for name in ALGORITHMS if name != sides[0].algorithm)
        alone = f"Whether {other} would do better cannot be told from {sides[0].name}'s runs alone."
        sentences = [_against_start(sides, deciding, start, f"{by}, "), alone]
    contrasts = [c for m in measures for c in (*against_start[m], *([between[m]] if between else []))]
    return Verdict(sentences, _caveats(sides, between, judge_name), contrasts)


def said(estimate: Estimate, over: str, sign: str = "+") -> str:
    """A figure with its interval, named."""
    if estimate.low is None:
        return f"{estimate.value:{sign}.3f}, without an interval"
    return f"{estimate.value:{sign}.3f}, 95% interval over {over} {interval(estimate.low, estimate.high, sign)}"


def _between(sides: Sequence[Side], found: Contrast, by: str) -> str:
    one, two = (side.name for side in sides)
    figure = f"({found.name}: {said(found.difference, found.over)}){_budget(sides)}."
    if not found.difference.excludes(0):
        return f"No difference shown between {one} and {two} {by} {figure}"
    better, worse = (one, two) if found.difference.value > 0 else (two, one)
    where = "In these runs " if found.over == OVER_PROMPTS else ""
    return f"{where}{better}'s replies are better than {worse}'s {by} {figure}"


def _budget(sides: Sequence[Side]) -> str:
    """At what budget, in words."""
    episodes = [count for side in sides for count in side.episodes]
    low, high = min(episodes), max(episodes)
    return (
        f", after {low:,} episodes each" if low == high else f", after UNEQUAL budgets ({low:,} to {high:,} episodes)"
    )


def _against_start(sides: Sequence[Side], found: Sequence[Contrast], start: Generations, by: str = "") -> str:
    parts = []
    for side, one in zip(sides, found, strict=True):
        if one.difference.excludes(0):
            shown = f"{side.name} is {'better' if one.difference.value > 0 else 'worse'} than the start model"
        else:
            shown = f"no difference shown between {side.name} and the start model"
        parts.append(f"{shown} ({said(one.difference, one.over)}){_price(side, start)}")
    text = by + "; ".join(parts)
    return text[0].upper() + text[1:] + "."


def _price(side: Side, start: Generations) -> str:
    """What was paid: perplexity and KL."""
    kl, read = side.known("kl"), side.known("perplexity")
    parts = [f"perplexity x {fmean(read) / start.perplexity:.2f}"] if read and start.perplexity else []
    parts += [f"KL {fmean(kl):.2f}/sequence"] if kl else []
    return f", at {' and '.join(parts)}" if parts else ""


def _caveats(sides: Sequence[Side], between: dict[str, Contrast], judge_name: str | None) -> list[str]:
    notes = []
    alone = [f"{side.name}: {side.seeds[0]}" for side in sides if len(side.runs) == 1]
    if alone:
        notes.append(
            f"one seed ({', '.join(alone)}) cannot tell whether the same settings with another seed would end "
            "elsewhere: intervals with it are over prompts within these runs. Train others with --seeds 42 123 777"
        )
    few = [f"{side.name} {len(side.runs)}" for side in sides if 1 < len(side.runs) < ENOUGH_SEEDS]
    if few:
        notes.append(f"few seeds ({', '.join(few)}): intervals over so few are wide, and rough themselves")
    if judge_name is None:
        notes.append(
            "no judge: the score is what was trained on, and rises under reward hacking too. --judge-model names a "
            "reward model that training never saw"
        )
    by_score, by_judge = between.get("scores"), between.get("judged")
    if by_judge is not None and by_judge.difference.excludes(0):
        if not by_score.difference.excludes(0):
            notes.append(f"by the score no difference is shown ({said(by_score.difference, by_score.over)})")
        elif (by_score.difference.value > 0) != (by_judge.difference.value > 0):
            notes.append("score and judge prefer different sides: the score's winner exploits the reward model")
    prompts = len(sides[0].measured[0].scores)
    if prompts < FEW_PROMPTS:
        notes.append(f"only {prompts} prompts: intervals over so few are rough. Raise --num-prompts")
    return notes

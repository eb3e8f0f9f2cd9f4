"""Algorithms and the start model on the same prompts, over seeds: differences, their intervals, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import fmean

import numpy as np

from rlhf.analysis.audit import figures
from rlhf.analysis.evaluator import GenerationResults
from rlhf.analysis.statistics import (
    A_SHARE,
    EVEN,
    LEVEL,
    OVER_PROMPTS,
    Estimate,
    interval,
    level_of_each,
    over_seeds_if_any,
    percent,
    win_rates,
)
from rlhf.checkpoints.run_record import RunRecord

MEASURES = ("scores", "judged")
ENOUGH_SEEDS = 5
FEW_PROMPTS = 20


@dataclass(frozen=True)
class RunGroup:
    """One algorithm's runs: the same settings, one seed each. Lists in the same order."""

    algorithm: str
    runs: list[RunRecord]
    measured: list[GenerationResults]
    episodes: list[int]  # after which the measured weights were kept

    @property
    def name(self) -> str:
        return self.algorithm.upper()

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @cached_property
    def figures(self) -> list[dict[str, float | None]]:
        return [figures(completions) for completions in self.measured]

    def known(self, name: str) -> list[float]:
        """One figure of every run that has it."""
        return [found[name] for found in self.figures if found[name] is not None]


@dataclass(frozen=True)
class Contrast:
    """One side less another one, or less the start model, by one measure ("scores" or "judged")."""

    name: str  # "ONE - OTHER", the sides' names
    measure: str
    difference: Estimate
    win_rate: Estimate
    over: str  # what the intervals are over
    level: float  # of the intervals

    @property
    def text(self) -> str:
        """The difference with its interval."""
        value, low, high = self.difference.value, self.difference.low, self.difference.high
        if low is None:
            return f"{value:+.3f}, without an interval"
        return f"{value:+.3f}, {percent(self.level)} interval over {self.over} {interval(low, high)}"


def contrast(
    group: RunGroup, other: RunGroup | GenerationResults, measure: str, seed: int, level: float = LEVEL
) -> Contrast:
    """Differences per prompt, and win rates of all pairs of completions, ties half.

    Intervals as in over_seeds_if_any.
    """
    trained = isinstance(other, RunGroup)
    one = [getattr(completions, measure) for completions in group.measured]
    another = [getattr(completions, measure) for completions in (other.measured if trained else [other])]
    gaps = np.array([[a.mean(axis=1) - b.mean(axis=1) for b in another] for a in one])  # (S, T, P)
    wins = np.array([[win_rates(a, b) for b in another] for a in one])
    difference, over = over_seeds_if_any(gaps, seed, not trained, level=level)
    win_rate, _ = over_seeds_if_any(wins, seed, not trained, EVEN, A_SHARE, level)
    name = f"{group.name} - {other.name if trained else 'start model'}"
    return Contrast(name, measure, difference, win_rate, over, level)


@dataclass(frozen=True)
class Verdict:
    """What can be said, and by what."""

    sentences: list[str]
    caveats: list[str]
    contrasts: list[Contrast]


def judge_runs(
    groups: Sequence[RunGroup],
    start: GenerationResults,
    judge_name: str | None,
    seed: int,
    score_name: str = "the reward that was trained on",
) -> Verdict:
    """The verdict, by the judge if there is one, else by the score, called `score_name`.

    One sentence for each pair of sides, then one on all sides against the start model. The pairs' intervals are
    widened for the number of pairs; those against the start model are not.
    """
    measures = [m for m in MEASURES if getattr(start, m) is not None]
    against_start = {m: [contrast(group, start, m, seed) for group in groups] for m in measures}
    pairs = list(combinations(groups, 2))
    level = level_of_each(len(pairs))
    between = {m: [contrast(*pair, m, seed, level) for pair in pairs] for m in measures}
    by, unseen = (f"by the {judge_name}", ", which no training saw") if judge_name else (f"by {score_name}", "")
    deciding = against_start[measures[-1]]
    if pairs:
        shown = zip(pairs, between[measures[-1]], strict=True)
        sentences = [_between(*pair, found, by + ("" if i else unseen)) for i, (pair, found) in enumerate(shown)]
        sentences.append(_against_start(groups, deciding, start))
    else:
        alone = f"Whether another algorithm would do better cannot be told from {groups[0].name}'s runs alone."
        sentences = [_against_start(groups, deciding, start, f"{by}{unseen}, "), alone]
    contrasts = [c for m in measures for c in (*against_start[m], *between[m])]
    return Verdict(sentences, _caveats(groups, between, judge_name), contrasts)


def _between(first: RunGroup, second: RunGroup, found: Contrast, by: str) -> str:
    one, two = first.name, second.name
    figure = f"({found.name}: {found.text}){_budget([first, second])}."
    if not found.difference.excludes(0):
        return f"No difference shown between {one} and {two} {by} {figure}"
    better, worse = (one, two) if found.difference.value > 0 else (two, one)
    where = "In these runs " if found.over == OVER_PROMPTS else ""
    return f"{where}{better}'s replies are better than {worse}'s {by} {figure}"


def _budget(groups: Sequence[RunGroup]) -> str:
    """At what budget, in words."""
    episodes = [count for group in groups for count in group.episodes]
    low, high = min(episodes), max(episodes)
    return (
        f", after {low:,} episodes each" if low == high else f", after UNEQUAL budgets ({low:,} to {high:,} episodes)"
    )


def _against_start(
    groups: Sequence[RunGroup], found: Sequence[Contrast], start: GenerationResults, by: str = ""
) -> str:
    parts = []
    for group, one in zip(groups, found, strict=True):
        if one.difference.excludes(0):
            shown = f"{group.name} is {'better' if one.difference.value > 0 else 'worse'} than the start model"
        else:
            shown = f"no difference shown between {group.name} and the start model"
        parts.append(f"{shown} ({one.text}){_price(group, start)}")
    text = by + "; ".join(parts)
    return text[0].upper() + text[1:] + "."


def _price(group: RunGroup, start: GenerationResults) -> str:
    """What was paid: perplexity and KL."""
    kl, read = group.known("kl"), group.known("perplexity")
    parts = [f"perplexity x {fmean(read) / start.perplexity:.2f}"] if read and start.perplexity else []
    parts += [f"KL {fmean(kl):.2f}/sequence"] if kl else []
    return f", at {' and '.join(parts)}" if parts else ""


def _caveats(groups: Sequence[RunGroup], between: dict[str, list[Contrast]], judge_name: str | None) -> list[str]:
    """What limits the verdict. `between`: by measure, a contrast for each pair of sides."""
    notes = []
    if len(between["scores"]) > 1:
        notes.append(_several_pairs(between["scores"]))
    alone = [f"{group.name}: {group.seeds[0]}" for group in groups if len(group.runs) == 1]
    if alone:
        notes.append(
            f"one seed ({', '.join(alone)}) cannot tell whether the same settings with another seed would end "
            "elsewhere: intervals with it are over prompts within these runs. Train others with --seeds 42 123 777"
        )
    few = [f"{group.name} {len(group.runs)}" for group in groups if 1 < len(group.runs) < ENOUGH_SEEDS]
    if few:
        notes.append(f"few seeds ({', '.join(few)}): intervals over so few are wide, and rough themselves")
    if judge_name is None:
        notes.append(
            "no judge: the score is what was trained on, and rises under reward hacking too. --judge-model names a "
            "reward model that training never saw"
        )
    notes += _unlike_the_score(between)
    prompts = len(groups[0].measured[0].scores)
    if prompts < FEW_PROMPTS:
        notes.append(f"only {prompts} prompts: intervals over so few are rough. Raise --num-prompts")
    return notes


def _several_pairs(contrasts: Sequence[Contrast]) -> str:
    """How the intervals of several pairs are corrected."""
    count, level = len(contrasts), percent(contrasts[0].level)
    return (
        f"{count} pairs of algorithms are compared, so each pair gets a {level} interval (Bonferroni): all {count} of "
        f"one measure hold together with {percent(LEVEL)} confidence. The {percent(LEVEL)} intervals against the "
        "start model are not corrected"
    )


def _unlike_the_score(between: dict[str, list[Contrast]]) -> list[str]:
    """For each pair whose judge shows a difference: whether the score shows none, or the opposite one."""
    notes = []
    for by_score, by_judge in zip(between["scores"], between.get("judged", []), strict=False):
        pair = f"{by_judge.name}: " if len(between["judged"]) > 1 else ""
        if not by_judge.difference.excludes(0):
            continue
        if not by_score.difference.excludes(0):
            notes.append(f"{pair}by the score no difference is shown ({by_score.text})")
        elif (by_score.difference.value > 0) != (by_judge.difference.value > 0):
            notes.append(f"{pair}score and judge prefer different sides: the score's winner exploits the reward model")
    return notes

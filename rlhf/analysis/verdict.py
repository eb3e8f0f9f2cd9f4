"""The verdict of a comparison: differences between groups of runs and to the start model, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from types import SimpleNamespace

import numpy as np

from rlhf.algorithms.table import label_of
from rlhf.analysis.audit import figures
from rlhf.analysis.evaluator import GenerationResults
from rlhf.analysis.groups import ALL_PAIRS, compared_pairs, control_notes, control_of
from rlhf.analysis.statistics import (
    A_SHARE,
    EVEN,
    LEVEL,
    OVER_PROMPTS,
    RESULTS,
    Contrast,
    Estimate,
    level_of_each,
    over_seeds_if_any,
    paired,
    per_prompt,
    percent,
    power_of,
    win_rates,
)
from rlhf.checkpoints.run_record import RunRecord
from rlhf.settings.training import name_with_control

ENOUGH_SEEDS = 5
FEW_PROMPTS = 20


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same settings and different seeds. All lists have the same order."""

    algorithm: str
    runs: list[RunRecord]
    measured: list[GenerationResults]
    episodes: list[int]  # trained before the evaluated weights were saved
    label: str | None = None  # None: the algorithm's name
    settings: dict[str, str] = field(default_factory=dict)  # those in which the groups differ

    @property
    def title(self) -> str:
        """The algorithm's name, with the control."""
        return name_with_control(label_of(self.algorithm), control_of(self.runs[0]))

    @property
    def name(self) -> str:
        return self.label or self.title

    @property
    def trained(self) -> bool:
        return True

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @cached_property
    def figures(self) -> list[dict[str, float | None]]:
        return [figures(completions) for completions in self.measured]

    def known(self, name: str) -> list[float]:
        """Returns one figure of each run that has it."""
        return [found[name] for found in self.figures if found.get(name) is not None]


def contrast(
    group: RunGroup, other: RunGroup | GenerationResults, measure: str, seed: int, level: float = LEVEL
) -> Contrast:
    """Computes the difference, its power and the win rate of two groups, with intervals as in `over_seeds_if_any`.

    Both have a name, `measured` and `trained`, which is False for a baseline; a GenerationResults is the start model.
    Prompts without a scored completion in every run are left out; without any prompt the values are NaN.
    """
    if isinstance(other, GenerationResults):
        other = SimpleNamespace(name="start model", measured=[other], trained=False)
    one, another = ([found.measures[measure] for found in arm.measured] for arm in (group, other))
    gaps = paired(np.array([[per_prompt(a) - per_prompt(b) for b in another] for a in one]))  # (S, T, P)
    wins = paired(np.array([[win_rates(a, b) for b in another] for a in one]))
    trained = (group.trained, other.trained)
    difference, win_rate, over = Estimate(math.nan), Estimate(math.nan), OVER_PROMPTS
    if gaps.size:
        difference, over = over_seeds_if_any(gaps, seed, trained, level=level)
        win_rate, _ = over_seeds_if_any(wins, seed, trained, EVEN, A_SHARE, level)
    name, power = f"{group.name} - {other.name}", power_of(gaps, trained, level)
    return Contrast(name, measure, difference, win_rate, power=power, over=over, level=level)


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    sentences: list[str]
    caveats: list[str]
    contrasts: list[Contrast]


def judge_runs(
    groups: Sequence[RunGroup],
    start: GenerationResults,
    judge_name: str | None,
    seed: int,
    score_name: str = "the training reward",
    independent: bool = True,
) -> Verdict:
    """Returns the verdict, by the first judge if there is one, otherwise by the score, which is called `score_name`.

    `independent` is False if RL training used the judge, too.

    There is one sentence for each pair of groups in `compared_pairs`, then one for each group against the start model
    (one for all of them if there are more than 4 groups). The intervals of the pairs are widened for the number of
    pairs; those against the start model are not.
    """
    measures = list(start.measures)
    decides = measures[min(1, len(measures) - 1)]
    against_start = {m: [contrast(group, start, m, seed) for group in groups] for m in measures}
    pairs = compared_pairs(groups)
    level = level_of_each(len(pairs))
    between = {m: [contrast(*pair, m, seed, level) for pair in pairs] for m in measures}
    use = "not used in RL training" if independent else "also a reward of RL training"
    by = f"by the judge ({judge_name}, {use})" if judge_name else f"by score ({score_name})"
    deciding = against_start[decides]
    if len(groups) > ALL_PAIRS:
        sentences = _of_many(groups, between[decides], deciding, by)
    elif pairs:
        found = zip(pairs, between[decides], strict=True)
        sentences = [_between(*pair, one, by if i == 0 else _short(by)) for i, (pair, one) in enumerate(found)]
        sentences += [_against_start(*pair, start, _short(by)) for pair in zip(groups, deciding, strict=True)]
    else:
        alone = "All runs are in one group, so there is nothing to compare it with."
        sentences = [_against_start(groups[0], deciding[0], start, by), alone]
    contrasts = [c for m in measures for c in (*against_start[m], *between[m])]
    return Verdict(sentences, _caveats(groups, between, decides, judge_name), contrasts)


def kind_of(groups: Sequence[RunGroup]) -> str:
    """Returns what the groups are: "algorithms" if each has another one and none is a control, otherwise "groups"."""
    different = len({group.algorithm for group in groups}) == len(groups)
    return "algorithms" if different and all(control_of(group.runs[0]) == "none" for group in groups) else "groups"


def _short(by: str) -> str:
    """The measure without the explanation in brackets, which only the first sentence has."""
    return by.partition(" (")[0]


def _of_many(groups: Sequence[RunGroup], between: Sequence[Contrast], start: Sequence[Contrast], by: str) -> list[str]:
    """The sentences on more than 4 groups, of which each is compared with the first one and with the start model."""
    first, *others = groups
    sentences = [f"Each group is compared with {first.name}, the first one, {by}: the others minus this one."]
    for group, found in zip(others, between, strict=True):
        here = found.where.lower()
        sentences.append(
            f"{group.name}, {here}{RESULTS[found.result]} the first one: {found.text}{_budget([first, group])}."
        )
    for result, words in RESULTS.items():
        names = [group.name for group, found in zip(groups, start, strict=True) if found.result == result]
        if names:
            sentences.append(f"{words.capitalize()} the start model {_short(by)}: {'; '.join(names)}.")
    return sentences


def _outcome(one: str, two: str, found: Contrast, by: str) -> str:
    """What a difference says about two groups, without its figure."""
    if found.result == "unknown":
        return f"{one} cannot be compared with {two} {by}"
    if found.result == "equal":
        return f"No significant difference between {one} and {two} {by}"
    return f"{one} is {RESULTS[found.result]} {two} {by}"


def _between(first: RunGroup, second: RunGroup, found: Contrast, by: str) -> str:
    """The sentence on two groups."""
    text = _outcome(first.name, second.name, found, by)
    if found.result == "worse":
        text = f"{second.name} is better than {first.name} {by}"
    figure = "" if found.result == "unknown" else f"{found.name} = "
    return f"{found.where}{text}: {figure}{found.text}{_budget([first, second])}."


def _budget(groups: Sequence[RunGroup]) -> str:
    """The number of episodes as text."""
    episodes = [count for group in groups for count in group.episodes]
    low, high = min(episodes), max(episodes)
    return (
        f", after {low:,} episodes each" if low == high else f", after UNEQUAL budgets ({low:,} to {high:,} episodes)"
    )


def _against_start(group: RunGroup, found: Contrast, start: GenerationResults, by: str) -> str:
    """The sentence on a group and the start model, with the group's perplexity and KL."""
    text = f"{_outcome(group.name, 'the start model', found, by)}: {found.text}"
    kl, perplexity = group.known("kl"), group.known("perplexity")
    parts = [f"KL {fmean(kl):.2f}/sequence"] if kl else []
    parts += [f"perplexity x {fmean(perplexity) / start.perplexity:.2f}"] if perplexity and start.perplexity else []
    return f"{', '.join([text, *parts])}."


def _caveats(
    groups: Sequence[RunGroup], between: dict[str, list[Contrast]], decides: str, judge_name: str | None
) -> list[str]:
    """Returns what limits the verdict.

    Args:
        groups: the groups.
        between: per measure, one contrast for each compared pair of groups.
        decides: the measure of the verdict's sentences.
        judge_name: the judge that decides; None: the score does.
    """
    notes = control_notes([(group.name, group.runs[0]) for group in groups])
    if len(between["scores"]) > 1:
        notes.append(_several_pairs(groups, between["scores"]))
    if len(groups) > ALL_PAIRS:
        notes.append(_highest(groups, decides))
    alone = [f"{group.name}: {group.seeds[0]}" for group in groups if len(group.runs) == 1]
    if alone:
        which = ", ".join(alone) if len(groups) <= ALL_PAIRS else f"{len(alone)} groups"
        notes.append(
            f"one seed ({which}) does not show how much the result depends on the seed: intervals are over "
            "prompts only and hold for these runs. Train more seeds, for example with --seeds 42 123 777"
        )
    few = [f"{group.name} {len(group.runs)}" for group in groups if 1 < len(group.runs) < ENOUGH_SEEDS]
    if few:
        which = ", ".join(few) if len(groups) <= ALL_PAIRS else f"{len(few)} groups have fewer than {ENOUGH_SEEDS}"
        notes.append(f"few seeds ({which}): intervals over so few seeds are wide and approximate")
    if judge_name is None:
        notes.append(
            "no judge: the score is the training reward, which also rises under reward hacking. Give a reward model "
            "that was not used in RL training with --judge-model, or evaluation functions with --eval-func"
        )
    notes += _unlike_the_score(between, kind_of(groups))
    prompts = len(groups[0].measured[0].scores)
    if prompts < FEW_PROMPTS:
        notes.append(f"only {prompts} prompts: intervals over so few prompts are approximate. Evaluate on more")
    return notes


def _several_pairs(groups: Sequence[RunGroup], contrasts: Sequence[Contrast]) -> str:
    """Returns the caveat on the correction for several pairs."""
    count, level = len(contrasts), percent(contrasts[0].level)
    what = f"{count} pairs of {kind_of(groups)} are compared"
    if len(groups) > ALL_PAIRS:
        what = f"each of {count} groups is compared with the first one only"
    return (
        f"{what}, so each pair has a {level} interval (Bonferroni correction): all {count} intervals hold together "
        f"with {percent(LEVEL)} confidence. The {percent(LEVEL)} intervals against the start model are not corrected"
    )


def _highest(groups: Sequence[RunGroup], measure: str) -> str:
    """Returns the caveat on the group with the highest mean, with which the others are not compared."""
    figure, by = ("score", "score") if measure == "scores" else ("judge", "the judge")
    means = {group.name: fmean(group.known(figure)) for group in groups if group.known(figure)}
    if not means:
        return "no group has a mean, because no completion has a score"
    best = max(means, key=means.get)
    return (
        f"{best} has the highest mean by {by} ({means[best]:+z.3f}), but the highest of {len(groups)} means is partly "
        "chance: before you rely on it, train this group and the one to beat with new seeds, and compare these two"
    )


def _unlike_the_score(between: dict[str, list[Contrast]], kind: str) -> list[str]:
    """Lists the pairs with a significant difference by the judge, but none or the opposite one by the score."""
    notes = []
    for by_score, by_judge in zip(between["scores"], between.get("judged", []), strict=False):
        pair = f"{by_judge.name}: " if len(between["judged"]) > 1 else ""
        if not by_judge.difference.excludes(0) or by_score.result == by_judge.result:
            continue
        if not by_score.difference.excludes(0):
            found = "not comparable" if by_score.result == "unknown" else "no significant difference"
            notes.append(f"{pair}{found} by score: {by_score.text}")
        else:
            notes.append(
                f"{pair}score and judge prefer different {kind}: a sign that the one with the higher score "
                "exploits the reward model"
            )
    return notes

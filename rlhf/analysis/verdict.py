"""The verdict of a comparison: differences between arms and to the start model, with their intervals, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from statistics import fmean

import numpy as np

from rlhf.analysis.audit import OF_THE_NUMBER, figures
from rlhf.analysis.best_of_n import BestOf, best_of_blocks
from rlhf.analysis.equal_budget import at_equal_kl, result_over
from rlhf.analysis.groups import ALL_PAIRS, compared_pairs, control_of
from rlhf.analysis.models import ModelRef, episodes_of
from rlhf.checkpoints.run_record import RunRecord
from rlhf.data.prompts import FEW_PROMPTS
from rlhf.trainer.evaluation import Evaluation
from rlhf.utils.console import listed, number
from rlhf.utils.paths import path_on_page
from rlhf.utils.statistics import (
    LEVEL,
    OVER_PROMPTS,
    RESULTS,
    Contrast,
    contrast_of,
    interval_of,
    level_of_each,
    per_prompt,
    percent,
    prompts_needed,
)

START = "start model"
LIKE_KL = 0.1  # largest relative difference of KLs that are alike


@dataclass(frozen=True)
class Arm:
    """Runs of several seeds, other models with one name, or a baseline, which is made of the start model's samples."""

    name: str
    measured: list[Evaluation]  # one for each model, or that of the baseline
    models: list[ModelRef] = field(default_factory=list)  # empty: a baseline
    settings: dict[str, str] = field(default_factory=dict)  # those in which the arms differ
    left_out: tuple[str, ...] = ()  # figures that would mislead

    @property
    def trained(self) -> bool:
        return bool(self.models)

    @property
    def runs(self) -> list[RunRecord]:
        return [model.run for model in self.models if model.run is not None]

    @property
    def algorithm(self) -> str:
        """That of its runs; empty for other models and baselines."""
        return self.runs[0].algorithm if self.runs else ""

    @property
    def is_control(self) -> bool:
        return any(control_of(run) != "none" for run in self.runs)

    @property
    def seeds(self) -> list[str]:
        """The seeds of its runs, and the names of models that do not belong to a run."""
        return [f"model {m.short}" if m.run is None else str(m.run.seed) for m in self.models]

    @property
    def unit(self) -> str:
        """What its models are: seeds, or models if at least one does not belong to a run."""
        return "seed" if len(self.runs) == len(self.models) else "model"

    @property
    def episodes(self) -> list[int]:
        """Trained before the evaluated weights were saved, of each run."""
        return [episodes_of(model) for model in self.models if model.run is not None]

    @cached_property
    def figures(self) -> list[dict[str, float | None]]:
        return [figures(completions) | dict.fromkeys(self.left_out) for completions in self.measured]

    def known(self, name: str) -> list[float]:
        """Return one figure of each model that has it."""
        return [found[name] for found in self.figures if found.get(name) is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure over the models; None if a model does not have it."""
        known = self.known(name)
        return fmean(known) if len(known) == len(self.measured) else None


def best_of_arm(samples: Evaluation, n: int, best: BestOf | None) -> Arm:
    """Return best-of-n as an arm: of each block of n samples of a prompt, the one with the highest score. Its KL is
    that of `best`; None: it is not known."""
    index = best_of_blocks(samples.scores, n)
    kl = None if best is None else np.full(index.shape, best.kl[n - 1])
    # all blocks are more than a model's completions
    return Arm(f"best-of-{n}", [replace(samples.select(index), kl=kl)], left_out=OF_THE_NUMBER)


def contrast(arm: Arm, other: Arm, measure: str, seed: int, level: float = LEVEL) -> Contrast:
    """Compares two arms by one of `Evaluation.measures`."""
    one, another = ([results.measures[measure] for results in side.measured] for side in (arm, other))
    trained = arm.trained, other.trained
    return contrast_of(f"{arm.name} - {other.name}", measure, one, another, seed, trained, level)


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    decision: Decision
    headline: str  # the decision in one sentence of at most 30 words
    sentences: list[str]
    caveats: list[str]
    contrasts: list[Contrast]


@dataclass(frozen=True)
class Evidence:
    """What the arms are judged by, besides their completions."""

    judge: str | None  # the judge that decides; None: the score does
    score_name: str = "the training reward"
    independent: bool = True  # False: RL training used the judge, too
    equal: Sequence[dict] = ()  # rows of `at_equal`
    best: BestOf | None = None

    @property
    def by(self) -> str:
        """The measure that decides, in words."""
        return "by score" if self.judge is None else "by the judge"

    @property
    def explained(self) -> str:
        """`by`, with the name of the measure."""
        use = "not used in RL training" if self.independent else "also a reward of RL training"
        return f"{self.by} ({self.score_name if self.judge is None else f'{self.judge}, {use}'})"


def judge_arms(arms: Sequence[Arm], start: Arm, seed: int, evidence: Evidence) -> Verdict:
    """Return the verdict, by the first judge if there is one, otherwise by the score.

    There is one sentence for each pair of arms in `compared_pairs`, then one for each arm against the start model. The
    intervals of the pairs are widened for the number of pairs; those against the start model are not.
    """
    measures = list(start.measured[0].measures)
    decides = measures[min(1, len(measures) - 1)]
    pairs = [(one, other) for one, other in compared_pairs(arms) if one.trained or other.trained]
    level = level_of_each(len(pairs))
    between = {m: [contrast(*pair, m, seed, level) for pair in pairs] for m in measures}
    against_start = {m: [contrast(arm, start, m, seed) for arm in arms] for m in measures}
    by = chain([evidence.explained], repeat(evidence.by))  # the first sentence names the measure
    sentences = [
        *(_between(*pair, found, evidence, next(by)) for pair, found in zip(pairs, between[decides], strict=True)),
        *(
            _against_start(arm, found, start, evidence, next(by))
            for arm, found in zip(arms, against_start[decides], strict=True)
        ),
    ]
    contrasts = [c for m in measures for c in (*against_start[m], *between[m])]
    decision = decide(arms, pairs, between[decides], against_start[decides], evidence)
    first = headline(arms, decision, between[decides], against_start[decides], evidence)
    return Verdict(decision, first, sentences, _caveats(arms, start, between, evidence), contrasts)


# --- in one sentence -------------------------------------------------------------------------------------------------

LISTED = 8  # words of arms' names in the headline; with more, the number of arms stands for them


@dataclass(frozen=True)
class Decision:
    """What a comparison shows by the measure that decides. Arms at unlike KL are better only if they are at equal KL,
    too."""

    best: Arm | None  # is better than each other arm
    winners: tuple[Arm, ...]  # the better arm of each compared pair that has one
    unlike: int  # number of other pairs with a significant difference, which is not shown at equal KL
    better: tuple[Arm, ...]  # than the start model


def decide(
    arms: Sequence[Arm],
    pairs: Sequence[tuple[Arm, Arm]],
    between: Sequence[Contrast],
    against_start: Sequence[Contrast],
    evidence: Evidence,
) -> Decision:
    """Return the decision. `between` has one contrast for each of `pairs`, `against_start` one for each of `arms`."""
    winners = []
    unlike = 0
    for (one, other), found in zip(pairs, between, strict=True):
        if found.result not in ("better", "worse"):
            continue
        if unlike_kl(one, other) and result_over(at_equal_kl(evidence.equal, found.name)) != found.result:
            unlike += 1
        else:
            winners.append(one if found.result == "better" else other)
    best = [arm for arm in arms if 0 < len(arms) - 1 == sum(winner is arm for winner in winners)]
    better = [arm for arm, found in zip(arms, against_start, strict=True) if found.result == "better"]
    return Decision(best[0] if best else None, tuple(winners), unlike, tuple(better))


def headline(
    arms: Sequence[Arm],
    decision: Decision,
    between: Sequence[Contrast],
    against_start: Sequence[Contrast],
    evidence: Evidence,
) -> str:
    """Return the decision in one sentence of at most 30 words. Without a winner, it has the difference that would have
    been seen."""
    by = f"by {path_on_page(evidence.judge or 'score')}"
    if len(arms) == 1:
        found = against_start[0]
        figures = "" if found.difference.low is None else f": {interval_of(asdict(found.difference))}"
        return f"{found.where}{arms[0].name} {_to_start(found)} {by}{figures}."
    count = len(decision.winners)
    unlike = decision.unlike
    with_where = bool(decision.winners) or len(arms) > ALL_PAIRS  # sentences that begin with a difference between arms
    here = next((found.where for found in between if with_where and found.where), "")
    rest = _than_the_start(arms, decision, against_start, not here)
    if decision.best is not None:
        others = [arm for arm in arms if arm is not decision.best]
        names = _names(others, "the other arm" if len(others) == 1 else "all other arms")
        return f"{here}{decision.best.name} is better than {names} {by}; {rest}."
    if len(arms) > ALL_PAIRS:
        none = f"{here}{count} of {len(between)} arms differ from {_names(arms[:1], 'the first one')} {by}"
    elif count:
        none = f"{here}{count} of {len(between)} pairs differ {by}, and no arm is better than all others"
    else:
        none = f"No winner {by} {_among(arms)}"
    if unlike:
        pairs = "the difference is" if len(between) == 1 else f"{unlike} {'more ' if count else ''}differences are"
        none = f"{none}; {pairs} not shown at equal KL"
    visible = [found.power.visible for found in between if found.power.visible is not None]
    if count or unlike:
        return f"{none}; {rest}."
    if not visible:
        return f"No comparison {by} {_among(arms)}; {rest}."
    seen = "no possible difference" if np.isinf(max(visible)) else f"a difference of {number(max(visible))}"
    return f"{none}: {seen} would have been seen; {rest}."


def _names(arms: Sequence[Arm], many: str = "") -> str:
    """Return the names of the arms; `many`, or their number, if these are too many words."""
    names = listed([arm.name for arm in arms])
    return names if len(names.split()) <= LISTED else many or f"the {len(arms)} arms"


def _to_start(found: Contrast) -> str:
    """Return what an arm is to the start model, such as "is better than the start model"."""
    return f"{'has' if found.result == 'equal' else 'is'} {RESULTS[found.result]} the start model"


def _than_the_start(
    arms: Sequence[Arm], decision: Decision, against_start: Sequence[Contrast], with_where: bool
) -> str:
    """Return which arms are better than the start model; `with_where`: and whether this holds for these runs only."""
    better = decision.better
    if not better:
        return "none is better than the start model"
    # a baseline has no runs
    only = any(arm in better and arm.trained and found.where for arm, found in zip(arms, against_start, strict=True))
    which = _names(better, f"{len(better)} of {len(arms)}")
    if len(better) == len(arms):
        which = "all" if len(arms) > 2 else "both"
    verb = "is" if len(better) == 1 else "are"
    return f"{'in these runs ' if with_where and only else ''}{which} {verb} better than the start model"


def _among(arms: Sequence[Arm]) -> str:
    return f"{'between' if len(arms) == 2 else 'among'} {_names(arms)}"


# --- in one sentence for each pair, and each arm ---------------------------------------------------------------------


def _between(one: Arm, other: Arm, found: Contrast, evidence: Evidence, by: str) -> str:
    """The sentence on two arms. Arms at unlike KL are called better only if they are better at equal KL, too."""
    if found.result == "unknown":
        return f"{one.name} cannot be compared with {other.name} {by}: {found.text}."
    figure = f"{found.name} = {found.text}{_budget([one, other])}"
    if found.result == "equal":
        text = f"No significant difference between {one.name} and {other.name} {by}: {figure}"
        return f"{text}. {_enough(found)}"
    first, second = (one, other) if found.result == "better" else (other, one)
    if not unlike_kl(one, other):
        return f"{found.where}{first.name} is better than {second.name} {by}: {figure}."
    there = at_equal_kl(evidence.equal, found.name)
    result = result_over(there)
    word = "is better than" if result == found.result else "has a higher mean than"
    text = f"{found.where}{first.name} {word} {second.name} {by}, at unlike KL: {figure}."
    if result == "unknown":
        return f"{text} They cannot be compared at equal KL."
    outcomes = {"better": f"{one.name} is better", "worse": f"{other.name} is better", "mixed": "it depends on the KL"}
    kls = ", ".join(f"{at['number']:.3g}" for at in there)
    figures = ", ".join(interval_of(at) for at in there)
    outcome = outcomes.get(result, "no significant difference")
    return f"{text} At equal KL ({kls} nats/sequence): {outcome}, {found.name} = {figures}."


def unlike_kl(one: Arm, other: Arm) -> bool:
    """True if the mean KLs of two arms to the start model differ by more than 10%, or one is unknown."""
    kls = one.mean("kl"), other.mean("kl")
    return None in kls or abs(kls[0] - kls[1]) > LIKE_KL * max(kls)


def _enough(found: Contrast) -> str:
    """Return what the comparison could have seen, and how many seeds a decision needs, in words."""
    power = found.power
    if power.visible is None:
        return "The smallest difference that it could have seen is not known."
    text = f"It could have seen {number(power.visible, 3)} (with 80% power)"
    if np.isinf(power.visible):
        text = "It could not have seen any possible difference (with 80% power)"
    if found.over == OVER_PROMPTS:
        return f"{text}."
    if power.seeds is not None:
        return f"{text}; to decide at the observed size, train {power.seeds} seeds of each."
    return f"{text}; at the observed size, more seeds do not decide: evaluate on more prompts."


def _budget(arms: Sequence[Arm]) -> str:
    """The number of episodes as text; empty if an arm has no runs."""
    if not all(arm.episodes for arm in arms):
        return ""
    episodes = [count for arm in arms for count in arm.episodes]
    low = min(episodes)
    high = max(episodes)
    return (
        f", after {low:,} episodes each" if low == high else f", after UNEQUAL budgets ({low:,} to {high:,} episodes)"
    )


def _against_start(arm: Arm, found: Contrast, start: Arm, evidence: Evidence, by: str) -> str:
    """The sentence on an arm and the start model: the difference, KL, perplexity, the means of greedy decoding, and
    for a better arm the best-of-n that it is worth."""
    name = f"Without the signal, {arm.name}" if arm.is_control else arm.name
    where = found.where if arm.trained else ""  # a baseline has no runs
    parts = [f"{where}{name} {_to_start(found)} {by}: {found.text}"]
    kl = arm.mean("kl")
    perplexity = arm.mean("perplexity")
    before = start.mean("perplexity")
    parts += [f"KL {number(kl, small=False)}/sequence"] if kl is not None else []
    bits = [side.mean("bits_per_byte") for side in (arm, start)]
    if arm.trained and None not in bits:
        parts.append("{:.4g} bits per byte after its own prompts, start model {:.4g}".format(*bits))
    elif arm.trained and perplexity and before:
        parts.append(f"perplexity x {number(perplexity / before)}")
    greedy = [side.mean("variant/greedy") for side in (arm, start)]
    if None not in greedy:  # only a model whose values are all 0 or 1 has it
        parts.append("with greedy decoding {}, start model {}".format(*(number(value, 3) for value in greedy)))
    worth = found.result == "better" and arm.trained and not arm.is_control
    return f"{', '.join(parts)}.{_worth(arm, evidence) if worth else ''}"


def _worth(arm: Arm, evidence: Evidence) -> str:
    """Compares an arm with best-of-n of the start model."""
    if evidence.best is None:
        return ""
    measure = "score" if evidence.judge is None else "judge"
    values = np.mean([per_prompt(results.measures[measure]) for results in arm.measured], axis=0)
    worth = evidence.best.worth(measure, values)
    if worth is None:
        return ""
    most = evidence.best.n[-1]
    what = f"is worth best-of-{worth}" if worth <= most else f"is above best-of-n for all n up to {most}"
    return f" It {what} {evidence.by}."


def _caveats(arms: Sequence[Arm], start: Arm, between: dict[str, list[Contrast]], evidence: Evidence) -> list[str]:
    """Return what limits the verdict. `between`: per measure, one contrast for each compared pair."""
    notes = []
    count = len(between["score"])
    if count > 1:
        level = percent(between["score"][0].level)
        what = f"{count} pairs are compared"
        if len(arms) > ALL_PAIRS:
            what = f"each of {count} arms is compared with the first one only, {arms[0].name}"
        notes.append(
            f"{what}, so each pair has a {level} interval (Bonferroni correction): all {count} intervals hold "
            f"together with {percent(LEVEL)} confidence. The {percent(LEVEL)} intervals against the start model are "
            "not corrected"
        )
    trained = [arm for arm in arms if arm.trained]
    alone = [f"{arm.name}: {'seed ' if arm.runs else ''}{arm.seeds[0]}" for arm in trained if len(arm.models) == 1]
    if alone:
        notes.append(
            f"one model ({', '.join(alone)}) does not show how much the result depends on the seed: intervals are "
            "over prompts only and hold for these runs. Train more seeds, for example with --seeds 42 123 777"
        )
    if evidence.judge is None and evidence.score_name != "not the training reward":
        notes.append(
            f"no judge: the score is {evidence.score_name}, which also rises under reward hacking. Give a reward "
            "model that was not used in RL training with --judge-model, or evaluation functions with --eval-func"
        )
    notes += few_prompts(*arms[0].measured[0].scores.shape)
    overtaken = [note for arm in trained for note in _overtaken(arm, start)]
    return [*notes, *_unlike_the_score(between), *overtaken]


def _overtaken(arm: Arm, start: Arm) -> list[str]:
    """Return a note on the smallest k with which the start model solves more prompts than an arm, if there is one
    (Yue et al. 2025, arXiv 2504.13837)."""
    names = [name for name in start.figures[0] if name.startswith("pass@") and start.mean(name) is not None]
    behind = [name for name in names if (mine := arm.mean(name)) is not None and mine < start.mean(name)]
    if not behind:
        return []
    name = behind[0]
    k = behind[0].partition("/")[0]
    return [f"{arm.name}: by {k} the start model is ahead ({start.mean(name):.3f} against {arm.mean(name):.3f})"]


def _unlike_the_score(between: dict[str, list[Contrast]]) -> list[str]:
    """Lists the pairs with a significant difference by the judge, but none or the opposite one by the score."""
    notes = []
    for by_score, by_judge in zip(between["score"], between.get("judge", []), strict=False):
        if not by_judge.difference.excludes(0) or by_score.result == by_judge.result:
            continue
        pair = f"{by_judge.name}: " if len(between["judge"]) > 1 else ""
        if not by_score.difference.excludes(0):
            found = "not comparable" if by_score.result == "unknown" else "no significant difference"
            notes.append(f"{pair}{found} by score: {by_score.text}")
        else:
            notes.append(
                f"{pair}score and judge prefer different arms: a sign that the one with the higher score exploits the "
                "reward model"
            )
    return notes


def few_prompts(prompts: int, samples: int) -> list[str]:
    """Return a note if there are so few evaluation prompts, with `samples` completions each, that results are rough;
    otherwise an empty list."""
    if prompts >= FEW_PROMPTS:
        return []
    return [
        f"only {prompts} prompts: figures and intervals are approximate. To see a difference of 10 points, evaluate "
        f"on {prompts_needed(samples)}: --num-prompts"
    ]

"""`--check reward`: what does the reward pay for? Scores completions that no model wrote: the right answer in several
forms, and hacks, which should be paid less. The start of a run does it for FEW prompts.

The right answer of a row is `chosen` of a pair, or one of the columns ANSWERS.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import decode_completion, encode_completion
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.data.sampler import drawn
from rlhf.rewards.answers import final_answer
from rlhf.rewards.rewards import Rewards
from rlhf.settings.training import Config
from rlhf.utils.console import Screen, counted, number
from rlhf.utils.errors import Problem, RunError

# prompts: of --check reward; of a run
MOST = 16
FEW = 4
MOST_SECONDS = 8.0  # after this time no other prompt is scored
SEARCHED = 256  # prompts in which right answers are searched
ANSWERS = ("answer", "solution", "completion")
SENTENCE = "The answer is {}."
TAGS = "<think>\nThis is my answer.\n</think>\n<answer>\n{}\n</answer>"
RIGHT = {
    "right answer": "{}",
    "right answer in a sentence": SENTENCE,
    "right answer in a box": "\\boxed{{{}}}",
    "right answer in tags": TAGS,
}
CUT_OFF = "right answer cut off"
REPEATED = "repeated word"  # as long as a completion may be
TOTAL = "total"
EQUAL = 1e-6  # scores that differ by less are equal: rounding depends on the other completions of a batch


class Probe(NamedTuple):
    """The arguments of `Rewards.score` for one completion."""

    prompt: Prompt
    text: str
    ids: list[int]
    ended: bool
    cut: bool  # it was longer than a completion may be


@dataclass
class RewardReport:
    """What the probes are paid. `scores`: probe -> function or TOTAL -> one score per prompt.

    A function's score is the one before its weight; the total includes the missing-EOS penalty. None: no function
    applies. NaN: a function fails.
    """

    formula: str  # the weighted sum
    prompts: int = 0
    scores: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    failures: dict[str, Problem] = field(default_factory=dict)  # function -> its first error
    cut: set[str] = field(default_factory=set)  # probes that were shortened for at least one prompt

    def mean(self, probe: str, function: str = TOTAL) -> float | None:
        """Return the mean over the prompts with a score; None if there is none, and NaN if the function fails."""
        known = [score for score in self.scores[probe][function] if score is not None]
        return fmean(known) if known else None

    @property
    def best(self) -> str | None:
        """The form of the right answer with the highest mean; None without one."""
        means = {name: mean for name in RIGHT if name in self.scores and (mean := self.mean(name)) is not None}
        return max((name for name in means if means[name] == means[name]), key=means.get, default=None)

    def hacks(self, every: bool = False) -> list[str]:
        """Return the probes that are paid at least as much as the best form of the right answer: on average over the
        prompts, or with `every` for each prompt."""
        found = []
        right = self.scores[self.best][TOTAL] if self.best else []
        for probe in (name for name in self.scores if right and name not in RIGHT):
            pairs = zip(self.scores[probe][TOTAL], right, strict=True)
            apart = [paid - best for paid, best in pairs if paid is not None and best is not None]
            if apart and all(by >= -EQUAL for by in (apart if every else [fmean(apart)])):  # False for NaN
                found.append(probe)
        return found

    def problems(self, every: bool = False) -> list[Problem]:
        """Return one line per function that fails, and one with the hacks."""
        hacks = ", ".join(self.hacks(every))
        found = f"hacks are paid at least as much as the right answer ({hacks})"
        return [*self.failures.values(), *([Problem(found, self.formula, "Change the reward")] if hacks else [])]


def right_answer(example: Example) -> str | None:
    """Return the right answer of a row, 72 of "... #### 72"; None if it has none."""
    columns = [value for value in map(example.columns.get, ANSWERS) if isinstance(value, str | int | float)]
    texts = [example.chosen, *(final_answer(str(value)) for value in columns if value == value)]  # not NaN
    return next((text.strip() for text in texts if text and text.strip()), None)


def texts_of(question: str, right: str | None, others: Sequence[str], most: int) -> dict[str, str]:
    """Return the texts of the probes by name. `others`: answers of other rows; `most`: tokens of a completion."""
    hacks = {"empty": "", "prompt copied": question, REPEATED: "answer " * most, "markup only": TAGS.format("")}
    if right is None:
        return hacks
    other = others[0] if others else ""
    hacks |= {"another row's answer": other, "another row's in a sentence": SENTENCE.format(other)}
    hacks |= {CUT_OFF: right[: len(right) // 2], "over-long list of answers": "\n".join([right, *others])}
    return {name: form.format(right) for name, form in RIGHT.items()} | hacks


def probes_of(config: Config, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Probe]]:
    """Return the probes of MOST prompts with a right answer that fits in --max-new-tokens; without such prompts, the
    probes that need none. Longer texts are shortened."""
    most = config.sampling.max_new_tokens
    order = [prompts[i] for i in drawn(prompts, config.run.seed)[:SEARCHED]]
    known = [(prompt, right) for prompt in order if (right := right_answer(prompt.example)) is not None]
    known = [(prompt, right) for prompt, right in known if len(encode_completion(tokenizer, right)) <= most]
    found = []
    for prompt, right in (known or [(prompt, None) for prompt in order])[:MOST]:
        others = [answer for _, answer in known if answer != right]
        probes = {}
        for name, text in texts_of(prompt.example.messages[-1]["content"], right, others, most).items():
            # a completion has at least one token
            ids = encode_completion(tokenizer, text, name != CUT_OFF) or [tokenizer.eos_token_id]
            ended = name != CUT_OFF
            is_longer = len(ids) > most
            if is_longer:
                ids = [*ids[: most - 1], tokenizer.eos_token_id]
                text = decode_completion(tokenizer, ids)
            probes[name] = Probe(prompt, text, ids, ended, is_longer and name != REPEATED)
        found.append(probes)
    return found


def probe_rewards(
    config: Config, rewards: Rewards, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, most: int = MOST
) -> RewardReport:
    """Score the probes of at most `most` prompts, one prompt after the other, until MOST_SECONDS are over."""
    report = RewardReport(str(rewards))
    end = time.monotonic() + MOST_SECONDS
    functions = zip(rewards.names, rewards.functions, rewards.limits_s, strict=True)
    each = [Rewards([function], None, tokenizer, limit, [name]) for name, function, limit in functions]
    for probes in probes_of(config, prompts, tokenizer)[:most]:
        report.cut |= {name for name, probe in probes.items() if probe.cut}
        given = {one.names[0]: scores_of(one, list(probes.values()), report, end) for one in each}
        penalties = [0.0 if probe.ended else config.reward.missing_eos_penalty for probe in probes.values()]
        totals = zip(rewards.weighted(given), penalties, strict=True)
        given[TOTAL] = [None if total is None else total - penalty for total, penalty in totals]
        for function, scores in given.items():
            for name, score in zip(probes, scores, strict=True):
                report.scores.setdefault(name, {}).setdefault(function, []).append(score)
        report.prompts += 1
        if time.monotonic() > end:
            break
    return report


def scores_of(one: Rewards, probes: Sequence[Probe], report: RewardReport, end: float) -> list[float | None]:
    """Return the scores of one function; NaN for probes with which it fails. After `end`, no call is repeated to find
    these, and all scores of the call are NaN. None if it reads log-probs: no model wrote the probes."""
    if one.reads_logprobs:
        return [None] * len(probes)
    try:
        prompts, texts, ids, ended, _ = zip(*probes, strict=True)
        return one.score(prompts, texts, ids, ended, len(probes)).total
    except RunError as error:
        if len(probes) == 1 or time.monotonic() > end:
            report.failures.setdefault(one.names[0], error.problems[0])
            return [math.nan] * len(probes)
    return [score for probe in probes for score in scores_of(one, [probe], report, end)]


def show_reward_report(report: RewardReport, most: int, screen: Screen) -> None:
    """Print the table, and what the marks of its last column mean. `most`: tokens of a completion."""
    screen.say(f"mean scores of the probes of {counted(report.prompts, 'training prompt')}:")
    hacks = report.hacks()
    rows = []
    for name, scores in report.scores.items():
        means = [report.mean(name, function) for function in scores]
        cells = ["-" if mean is None else "fails" if mean != mean else number(mean) for mean in means]
        marks = {"best": name == report.best, "hack": name in hacks, "cut": name in report.cut}
        rows.append([name, *cells, ", ".join(mark for mark, is_given in marks.items() if is_given)])
    screen.columns([["probe", *next(iter(report.scores.values())), ""], *rows])
    if report.cut:
        screen.say(f"cut: longer than a completion may be, so scored without its end: --max-new-tokens {most}")
    if not RIGHT.keys() & report.scores.keys():
        screen.say(
            "no right answer of at most --max-new-tokens was found, so no hack is named: --prompts. Use pairs, or the "
            f"column {' or '.join(ANSWERS)}"
        )
    elif report.best is not None and not report.problems():
        screen.say("no probe is paid like the right answer")

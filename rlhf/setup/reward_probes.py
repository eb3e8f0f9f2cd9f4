"""`--check-reward`: what does the reward pay for? Scores completions that no model wrote: the right answer in several
forms, and hacks, which should be paid less. `--check` and the start of a run do it for FEW prompts.

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

from rlhf.callbacks.base import Callback
from rlhf.data.chat_template import decode_completion, encode_completion
from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt, Selection
from rlhf.distributed.group import from_first
from rlhf.models.device import start_device
from rlhf.rewards.answers import final_answer
from rlhf.rewards.build import make_rewards
from rlhf.rewards.rewards import Rewards
from rlhf.settings.training import Config
from rlhf.setup.build import prepare_demo_components
from rlhf.setup.load_inputs import load_inputs
from rlhf.setup.preflight import Check
from rlhf.setup.start_samples import drawn
from rlhf.utils.console import Screen, counted, number
from rlhf.utils.errors import Problem, RunError, raise_if
from rlhf.utils.processes import alone

# prompts: of --check-reward; of --check and of a run
MOST = 16
FEW = 4
MOST_SECONDS = 8.0  # after this time no other prompt is scored
SECONDS_IN_A_RUN = 2.0  # a run skips the probes if they may take longer
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
TOTAL = "total"
EQUAL = 1e-6  # scores that differ by less are equal: rounding depends on the other completions of a batch


class Probe(NamedTuple):
    """The arguments of `Rewards.score` for one completion."""

    prompt: Prompt
    text: str
    ids: list[int]
    ended: bool


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
    hacks = {"empty": "", "prompt copied": question, "repeated word": "answer " * most, "markup only": TAGS.format("")}
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
            ids = encode_completion(tokenizer, text, name != CUT_OFF)
            ended = name != CUT_OFF
            if len(ids) > most:
                ids = [*ids[: most - 1], tokenizer.eos_token_id]
                text = decode_completion(tokenizer, ids)
            probes[name] = Probe(prompt, text, ids, ended)
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
    these, and all scores of the call are NaN."""
    try:
        return one.score(*zip(*probes, strict=True)).total
    except RunError as error:
        if len(probes) == 1 or time.monotonic() > end:
            report.failures.setdefault(one.names[0], error.problems[0])
            return [math.nan] * len(probes)
    return [score for probe in probes for score in scores_of(one, [probe], report, end)]


def check_reward(config: Config, screen: Screen, selection: Selection | None) -> RewardReport:
    """Load the rewards of a run, but no policy, and score the probes."""
    device = start_device(screen, config.run.deterministic, config.run.ddp_timeout)
    prepare_demo_components(config, screen, device)
    inputs = load_inputs(config, screen, selection=selection)
    rewards, _ = make_rewards(config, inputs.rewards, inputs.start.tokenizer, device, inputs.start.date)
    return from_first(lambda: probe_rewards(config, rewards, inputs.prompts.train, inputs.start.tokenizer))


def show_reward_report(report: RewardReport, screen: Screen) -> None:
    """Print the table. Raises UserError if a function fails, or if a hack is paid as much as the right answer."""
    screen.say(f"mean scores of the probes of {counted(report.prompts, 'training prompt')}:")
    marks = dict.fromkeys(report.hacks(), "hack") | {report.best: "best"}
    rows = []
    for name, scores in report.scores.items():
        means = [report.mean(name, function) for function in scores]
        cells = ["-" if mean is None else "fails" if mean != mean else number(mean) for mean in means]
        rows.append([name, *cells, marks.get(name, "")])
    screen.columns([["probe", *next(iter(report.scores.values())), ""], *rows])
    if not RIGHT.keys() & report.scores.keys():
        screen.say(
            "no right answer of at most --max-new-tokens was found, so no hack is named: --prompts. Use pairs, or the "
            f"column {' or '.join(ANSWERS)}"
        )
    raise_if(report.problems())


def reward_is_checked(
    config: Config, rewards: Rewards, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> Check:
    """Check that no function fails with a probe. Hacks are named, but are no failure: a reward may be intended so."""
    report = probe_rewards(config, rewards, prompts, tokenizer, FEW)
    fine = f"no function fails with the probes of {counted(report.prompts, 'prompt')}"
    found = "; ".join(map(str, report.problems(every=True))) or fine + (", no hack found" if report.best else "")
    return Check("reward", found, not report.failures, "Fix it; --check-reward prints the scores")


class RewardWarning(Callback):
    """Prints one line before the first update if a function fails with a probe, or if a hack is paid at least as much
    as the right answer for each of FEW prompts.

    The evaluation of the start model has measured the functions. If the probes may take longer than SECONDS_IN_A_RUN,
    no function is called: it may be slow, or remote.
    """

    def __init__(self, trainer, screen: Screen):
        self.trainer = trainer
        self.screen = screen

    def on_evaluation(self, evaluation):
        trainer, (seconds, completions) = self.trainer, self.trainer.rewards.last_call
        if evaluation.update or FEW * seconds * max(1, (len(RIGHT) + 8) / completions) > SECONDS_IN_A_RUN:
            return
        given = trainer.rewards, trainer.train_prompts, trainer.processing_class, FEW
        with alone():  # only the first process has this callback
            report = probe_rewards(trainer.config, *given)
        for problem in report.problems(every=True)[:1]:
            self.screen.say(f"warning: {problem}. --check-reward prints a table")

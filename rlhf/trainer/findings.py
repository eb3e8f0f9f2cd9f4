"""Findings: reasons why little can be learned from sampled completions. `--check prompts`, the progress line and the
end of a run use the same function and the same limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rlhf.algorithms.kl_control import KL_BAND
from rlhf.data.chat_template import removed_tags
from rlhf.settings.training import Config, SamplingSettings
from rlhf.settings.types import KL_METRICS, kl_text
from rlhf.trainer.evaluation import flat, shown_prompts
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen, counted, one_line

CUT_OFF = 0.2  # share of completions without EOS above which the length limit is a finding
FEWEST_IN_REACH = 0.25  # share of the prompts in reach below which they are too few to train on them alone
EQUAL_GROUPS = 0.5  # share of groups with equal scores above which they are a finding; docs/metrics.md has the range
SAME_TEXTS = 0.5  # share of prompts with equal completions from which a low temperature is a cause
FAILED = (0.0, -1.0)  # values that a checker gives to a wrong answer
LAST_UPDATES = 10  # findings of a run are about these
HARDLY = 0.05  # KL to the start model, in nats per sequence, below which the policy has hardly changed
MOST_EVALUATION = 0.2  # share of a run's time above which its evaluations are a finding, from a minute on
EXAMPLES = 3  # completions printed with their scores

Range = Sequence[float]  # lowest and highest value


@dataclass(frozen=True)
class SampleFigures:
    """Figures of sampled completions. Shares are in [0, 1]. None: not known, or not defined."""

    of: str  # what was sampled, for the messages: "128 prompts"
    where: str  # the setting or the rewards that an error line names
    truncated: float  # share of the completions without EOS
    equal_groups: float | None = None  # share of the groups with equal scores; None without groups
    scores: Range | None = None  # of all completions that have one, over the whole run or check
    functions: dict[str, Range] = field(default_factory=dict)  # values of each reward function before its weight
    removed: Sequence[str] = field(default=(), kw_only=True)  # `removed_tags` of the tokenizer
    # only in a check of the prompts
    signal: float | None = None  # mean variance of the score within a prompt
    same_texts: float = 0.0  # share of the prompts whose completions are all equal
    in_reach: float | None = None  # share of the prompts with a pass rate of 20% to 80%
    pass_rate: float | None = None


@dataclass(frozen=True)
class Finding:
    """One reason why little can be learned, or why a run takes long."""

    # cut_off, never_fires, equal_groups, out_of_reach, hardly_changed, equal_evaluations, slow_evaluations or nothing
    name: str
    text: str  # one line with the fix
    short: str = ""  # field of the progress line


def findings_of(figures: SampleFigures, sampling: SamplingSettings) -> list[Finding]:
    """Return the findings, the first cause first. If nothing can be learned, `nothing` is the last one."""
    failing = [name for name, values in figures.functions.items() if set(values) <= set(FAILED) and is_equal(values)]
    # without the range of the scores, the figures are of one update, which is no proof
    nothing = figures.scores and (is_equal(figures.scores) or figures.signal == 0)
    found = [*truncated(figures, sampling), *(never_fires(figures, name) for name in failing)]
    if nothing:
        return [*found, Finding("nothing", why_nothing(figures, sampling, failing))]
    return [*found, *equal_groups(figures), *out_of_reach(figures)]


def is_equal(values: Range | None) -> bool:
    """True if there are values and all are equal."""
    return bool(values) and min(values) == max(values)


def truncated(figures: SampleFigures, sampling: SamplingSettings) -> list[Finding]:
    if figures.truncated <= CUT_OFF:
        return []
    share = f"{figures.truncated:.0%}"
    tokens = sampling.max_new_tokens
    text = (
        f"{share} of the completions are cut off at {tokens} tokens and scored unfinished ({figures.of}): "
        "--max-new-tokens. Use a larger value first, unless training makes the completions shorter"
    )
    return [Finding("cut_off", text, f"cut off {share}")]


def never_fires(figures: SampleFigures, name: str) -> Finding:
    whole = "If it compares the whole completion with an answer, use one that finds it in the text: last_number. "
    text = (
        f"the reward function {name!r} gives {min(figures.functions[name]):g} to all completions ({figures.of}): "
        f"--reward-func. Check that this is right. {'' if name.startswith('last_number') else whole}If the answer "
        "comes too late, raise --max-new-tokens"
    )
    if figures.removed:
        text += (
            f"; if it looks for {' '.join(figures.removed)}, which the tokenizer removes from completions, use a "
            "tokenizer in which these are no special tokens"
        )
    return Finding("never_fires", text)


def equal_groups(figures: SampleFigures) -> list[Finding]:
    if figures.equal_groups is None or figures.equal_groups <= EQUAL_GROUPS:
        return []
    share = f"{figures.equal_groups:.0%}"
    text = (
        f"{share} of the groups have equal scores and teach nothing ({figures.of}): --K. Use prompts that the model "
        "sometimes solves, a larger --K, or --dynamic-sampling"
    )
    return [Finding("equal_groups", text, f"equal groups {share}")]


def out_of_reach(figures: SampleFigures) -> list[Finding]:
    if figures.in_reach is None or figures.pass_rate is None or figures.in_reach >= FEWEST_IN_REACH:
        return []
    fix = "harder prompts"
    if figures.pass_rate < 0.5:
        fix = "easier prompts, a larger --max-new-tokens, or a reward function that also scores parts of an answer"
    text = (
        f"only {figures.in_reach:.0%} of the prompts have a pass rate of 20% to 80%, too few to train on these alone "
        f"({figures.of}): --prompts. Use {fix}"
    )
    return [Finding("out_of_reach", text)]


def why_nothing(figures: SampleFigures, sampling: SamplingSettings, failing: Sequence[str]) -> str:
    """Return the error line for completions whose scores do not differ, with the causes that apply."""
    fixes = ["use a larger --max-new-tokens"] if figures.truncated > CUT_OFF else []
    fixes += ["use another reward function"] if failing else []
    if figures.same_texts >= SAME_TEXTS:
        fixes.append(
            f"all completions are equal for {figures.same_texts:.0%} of the prompts: raise --temperature (now "
            f"{sampling.temperature:g})"
        )
    lowest = min(figures.scores)
    highest = max(figures.scores)
    if lowest == highest == 1:
        fixes.append("every completion is solved: use harder prompts")
    elif lowest == highest == 0:
        fixes.append("use easier prompts, or a start model that solves some of them (--actor-model)")
    elif not fixes:
        fixes.append("use prompts that the model solves in some of its attempts")
    every = f"every score is {lowest:g}" if lowest == highest else "the completions of each prompt have equal scores"
    return f"nothing can be learned, {every} ({figures.of}): {figures.where}. Fix: {'; '.join(fixes)}"


# --- of a run --------------------------------------------------------------------------------------------------------

Examples = Sequence[tuple[str, float | None]]  # completions and their scores


def short_fields(metrics: dict[str, float], sampling: SamplingSettings) -> list[str]:
    """Return the fields of the progress line for an update's metrics: only those above their limits."""
    figures = SampleFigures(
        "this update", "", 1 - metrics["completions/eos_rate"], metrics.get("rewards/equal_groups")
    )
    return [found.short for found in findings_of(figures, sampling) if found.short]


def run_figures(trainer: OnPolicyLoop) -> SampleFigures | None:
    """Return the figures of a run: shares over its last updates, and scores over all. None if none was logged."""
    rows = [entry for entry in trainer.host.state.log_history if "completions/eos_rate" in entry][-LAST_UPDATES:]
    if not rows:
        return None
    is_control = trainer.config.reward.control != "none"  # its groups have other completions' scores
    equal = [entry["rewards/equal_groups"] for entry in rows if "rewards/equal_groups" in entry and not is_control]
    return SampleFigures(
        of=f"last {counted(len(rows), 'update')}",
        where=str(trainer.rewards),
        truncated=1 - fmean(entry["completions/eos_rate"] for entry in rows),
        equal_groups=fmean(equal) if equal else None,
        scores=trainer.progress.scores,
        functions=trainer.progress.functions,
        removed=removed_tags(trainer.processing_class),
    )


def hardly_changed(history: Sequence[dict], config: Config) -> list[Finding]:
    """Return a finding if the policy has hardly changed at the end of a run of at least 10 updates.

    By Pinsker's inequality, a mean score in [0, 1] cannot have changed by more than sqrt(KL / 2): 16 points at a KL of
    0.05. The KL of small changes grows with the square of the learning rate, so the recommended one would give a KL of
    about 1; it is at most 10 times the present one. A KL at its target is as it should be.
    """
    target = config.kl.targets[-1]
    rows = [entry for entry in history if target.metric in entry][-LAST_UPDATES:]
    if len(rows) < LAST_UPDATES:
        return []
    kl = fmean(row[KL_METRICS["sequence"]] for row in rows)
    aimed = fmean(row[target.metric] for row in rows) / target.nats
    if kl >= HARDLY or (config.kl.steered and aimed >= KL_BAND[0]):
        return []
    rate = config.optimizer.learning_rate * min(10, max(kl, 1e-4) ** -0.5)
    return [
        Finding(
            "hardly_changed",
            f"the policy has hardly changed (KL {kl_text(kl, 'sequence')} to the start model in the last "
            f"{LAST_UPDATES} updates): --learning-rate {config.optimizer.learning_rate:g}. Try --learning-rate "
            f"{rate:.1g} (LoRA usually needs ten times the rate of full training)",
        )
    ]


def equal_evaluations(trainer: OnPolicyLoop) -> list[Finding]:
    """Return a finding if the scores of all evaluations are equal, and those of training are not."""
    scores = [score for one in trainer.evaluations for score in flat(one.scores) if score is not None]
    if len(trainer.evaluation_prompts) < 2 or not is_equal(scores) or len({*trainer.progress.scores}) < 2:
        return []
    text = (
        f"every evaluation score is {scores[0]:g}, but training has different scores: --reward-func. If the reward "
        "compares the completions of a group, use an --eval-func, or --eval-samples "
        f"{max(2, trainer.config.group_size)}"
    )
    return [Finding("equal_evaluations", text)]


def show_run_findings(trainer: OnPolicyLoop, screen: Screen, ended: bool = True) -> None:
    """Print the findings of a run as warnings, with completions of the last evaluation if a reward function never
    fires. `ended`: whether the policy should have changed by now."""
    figures = run_figures(trainer)
    found = [] if figures is None else findings_of(figures, trainer.config.sampling)
    if ended and all(finding.name != "nothing" for finding in found):
        found += hardly_changed(trainer.host.state.log_history, trainer.config)
    found += equal_evaluations(trainer)
    seconds = trainer.progress.seconds
    spent = sum(seconds.get("evaluations", []))
    whole = sum(map(sum, seconds.values()))
    if ended and spent > max(60, MOST_EVALUATION * whole):
        text = f"evaluations took {spent / whole:.0%} of the time: --eval-prompts. Use fewer, or a larger --eval-every"
        found.append(Finding("slow_evaluations", text))
    examples = []
    for last in trainer.evaluations[-1:]:
        scores = flat(last.scores[:, :1])
        drawn = shown_prompts(len(scores), trainer.config.run.seed, EXAMPLES)
        examples = [(last.texts[i][0], scores[i]) for i in drawn]
    show_findings(found, examples, screen)


def show_findings(found: Sequence[Finding], examples: Examples, screen: Screen) -> None:
    """Print one warning per finding. If a reward function never fires, some completions with their scores follow."""
    for finding in found:
        screen.say(f"warning: {finding.text}")
    if any(finding.name == "never_fires" for finding in found):
        for text, score in examples[:EXAMPLES]:
            screen.say(f"  {'no score' if score is None else f'score {score:.2f}'}: {one_line(text)!r}")

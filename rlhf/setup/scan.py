"""`--check prompts`: what can be learned from the training prompts? Samples the start model, prints figures and
recommends settings.

The figures are in `scan_figures.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import usual_config
from rlhf.data.chat_template import removed_tags
from rlhf.data.sampler import drawn, shorten
from rlhf.settings.fields import settings_of, unmet, values_in
from rlhf.settings.next_commands import changed_command, in_a_program
from rlhf.settings.training import Config
from rlhf.setup.build import Components
from rlhf.setup.scan_figures import (
    FEWEST,
    Figures,
    Recommendation,
    group_figures,
    recommend,
)
from rlhf.setup.start_samples import Sampled, sample_and_score
from rlhf.trainer.findings import EXAMPLES, Examples, Finding, SampleFigures, findings_of, show_findings
from rlhf.utils.console import Screen, clock, counted
from rlhf.utils.errors import RunError
from rlhf.utils.statistics import A_SHARE, Estimate, over_prompts

PROMPTS = 128  # the most training prompts that are sampled, the same number of each topic
SAMPLES = 8  # completions per prompt, at least K
MOST_SECONDS = 20.0  # of sampling: fewer prompts are sampled on a slow machine


@dataclass(frozen=True)
class Part:
    """The results of one topic, or of all prompts."""

    figures: Figures
    interval: Estimate  # of the mean score, over prompts
    truncated: float  # share of the completions without EOS


@dataclass(frozen=True)
class Scan:
    """The results of a scan."""

    overall: Part
    topics: dict[str, Part]  # empty without at least two topics
    group_size: int  # completions per group of the shares; 1 without groups: all completions of a prompt
    samples: int  # completions per prompt
    recommendation: Recommendation | None  # None: nothing can be learned
    findings: list[Finding]  # why little can be learned, and what to do
    examples: Examples  # some completions with their scores

    @property
    def nothing(self) -> str | None:
        """Why nothing can be learned, and what to do; None: something can."""
        return next((finding.text for finding in self.findings if finding.name == "nothing"), None)


def scan_prompts(config: Config, components: Components, screen: Screen) -> Scan:
    """Sample and score completions of some training prompts with the start model. Raises RunError if too few of them
    have a score.

    A part of them after the other is sampled: the first has one prompt, which measures the time, and none has more
    completions than an update, so that they need no more memory. No part starts that would end after MOST_SECONDS.
    """
    samples = max(SAMPLES, config.group_size)
    indices = drawn(components.prompts.train, config.run.seed)[:PROMPTS]
    most = max(1, config.episodes_per_update // samples)
    sampled: list[Sampled] = []
    size = 1
    began = time.monotonic()
    while indices[len(sampled) :] and size > 0:
        start = time.monotonic()
        part = indices[len(sampled) :][:size]
        sampled += sample_and_score(config, components, part, samples)
        end = time.monotonic()
        per_prompt = (end - start) / len(part)
        left = MOST_SECONDS - (end - began)
        size = min(2 * size, most, int(left / per_prompt))
        missing = len(indices) - len(sampled)
        seconds = max(0.0, min(left, per_prompt * missing))
        screen.progress(
            f"prompts: {len(sampled):,} of {len(indices):,} sampled, {clock(seconds)} left",
            last=missing == 0 or size < 1,
        )
    if len(sampled) < len(indices):
        screen.say(
            f"note: {len(sampled):,} instead of {len(indices):,} prompts, because sampling them takes more than "
            f"{clock(MOST_SECONDS)}, so the intervals are wider"
        )
    return scan_results(config, sampled, samples, removed_tags(components.tokenizer))


def scan_results(config: Config, sampled: Sequence[Sampled], samples: int, removed: Sequence[str] = ()) -> Scan:
    """Return the results of a scan with `samples` completions per prompt. `removed` as in SampleFigures."""
    size = config.compared if config.compared > 1 else FEWEST
    complete = [one for one in sampled if len(one.shaped) >= size]  # without those whose completions have no score
    if not complete:
        raise RunError(
            f"no prompt has {size} completions with a score",
            "--check prompts",
            "Use prompts to which a reward function applies, or another function",
        )
    group = config.compared if config.compared > 1 else min(len(one.shaped) for one in complete)
    topics: dict[str, list[Sampled]] = {}
    for one in complete:
        topics.setdefault(one.prompt.example.topic or "no topic", []).append(one)
    parts = {name: scan_part(config, topics[name], group) for name in sorted(topics)} if len(topics) > 1 else {}
    overall = scan_part(config, complete, group)
    findings = findings_of(replace(sample_figures(config, complete, overall), removed=removed), config.sampling)
    names = {finding.name for finding in findings}
    scores = [one.shaped for one in complete]
    found = recommend(scores, config.compared, config.batch.batch_size)
    return Scan(
        overall, parts, config.compared, samples, None if "nothing" in names else found, findings,
        [(one.texts[0], one.raw[0]) for one in complete[:EXAMPLES]],
    )  # fmt: skip


def scan_part(config: Config, rows: Sequence[Sampled], group: int) -> Part:
    """Return the results of some prompts, with groups of `group` completions."""
    scores = [one.shaped for one in rows]
    figures = group_figures(scores, group)
    limits = A_SHARE if figures.binary else None
    interval = over_prompts([fmean(one) for one in scores], config.run.seed, limits=limits)
    truncated = 1 - fmean(ended for one in rows for ended in one.ended)
    return Part(figures, interval, truncated)


def sample_figures(config: Config, rows: Sequence[Sampled], overall: Part) -> SampleFigures:
    """Return the figures for `findings_of`."""
    figures = overall.figures
    values = {}
    for one in rows:
        for name, found in one.by_function.items():
            values.setdefault(name, []).extend(found)
    return SampleFigures(
        of=counted(len(rows), "prompt"),
        where="--check prompts",
        truncated=overall.truncated,
        equal_groups=figures.no_difference if config.compared > 1 else None,
        scores=[score for one in rows for score in one.shaped],
        functions=values,
        signal=figures.signal,
        same_texts=fmean(one.distinct == 1 for one in rows),
        in_reach=figures.in_reach,
        pass_rate=figures.mean,
    )


# --- printing --------------------------------------------------------------------------------------------------------


def show_scan(config: Config, scan: Scan, screen: Screen) -> None:
    """Print the table, and the recommended command with its reasons."""
    parts = {**scan.topics, "all": scan.overall}
    rows = [["topic", *columns_of(scan)], *([shorten(name), *cells_of(scan, part)] for name, part in parts.items())]
    groups = f", groups of {scan.group_size}" if scan.group_size > 1 else ""
    screen.say(
        f"samples of the start model: {scan.overall.figures.prompts:,} training prompts x {scan.samples} completions"
        f"{groups} (columns: docs/before_a_run.md)"
    )
    screen.columns(rows)
    show_findings([finding for finding in scan.findings if finding.name != "nothing"], scan.examples, screen)
    if scan.recommendation is not None:
        show_recommendation(config, scan, scan.recommendation, screen)


def show_recommendation(config: Config, scan: Scan, found: Recommendation, screen: Screen) -> None:
    """Print the recommended command with its reasons; first another scan if the completions are cut off."""
    if any(finding.name == "cut_off" for finding in scan.findings):
        longer = {"max_new_tokens": 2 * config.sampling.max_new_tokens, "check": ("prompts",)}
        screen.say("recommended: first check the prompts again with more tokens:")
        screen.say(f"  {command_with(config, longer)}")
    if found.reasons:
        screen.say("recommended:")
        for reason in found.reasons:
            screen.say(f"  {reason}")
    elif not scan.findings:
        screen.say("recommended: the settings as they are")
    changed = {"K": found.K, "batch_size": found.batch_size}
    if found.reasons or not config.in_python:
        screen.say("train with:")
        screen.say(f"  {command_with(config, changed)}")


def columns_of(scan: Scan) -> list[str]:
    """Return the titles of the columns after the first."""
    shares = ["no difference", *(["never", "always"] if scan.overall.figures.binary else [])]
    reach = ["in reach"] if scan.overall.figures.in_reach is not None else []
    return [
        "prompts",
        "pass rate (95%)" if scan.overall.figures.binary else "score (95%)",
        *shares,
        *reach,
        "signal",
        "no EOS",
    ]


def cells_of(scan: Scan, part: Part) -> list[str]:
    """Return the cells of a row after the first, in the order of `columns_of`."""
    f = part.figures
    i = part.interval
    ends = "" if i.low is None else f" ({i.low:.2f} to {i.high:.2f})"
    shares = [f.no_difference, *([f.never, f.always] if scan.overall.figures.binary else [])]
    reach = [f"{f.in_reach:.0%}"] if scan.overall.figures.in_reach is not None else []
    return [
        f"{f.prompts:,}", f"{i.value:.2f}{ends}", *(f"{share:.0%}" for share in shares), *reach,
        f"{f.signal:.3g}", f"{part.truncated:.0%}",
    ]  # fmt: skip


def command_with(config: Config, recommended: dict[str, Any]) -> str:
    """Return the command that trains with the run's settings and the recommended ones that are not None. For a
    program, the change of its configuration."""
    recommended = {name: value for name, value in recommended.items() if value is not None}
    if config.in_python:
        return in_a_program(recommended)
    foreign = ALGORITHMS[config.algorithm].foreign
    values = values_in(config) | {"check": ()} | recommended
    wanted = {"recipe": config.recipe}
    for name, one in settings_of(Config).items():
        if name not in foreign and not unmet(one, values):
            wanted[name] = values[name]
    return changed_command(config.algorithm, wanted, usual_config(config.recipe, config.user_file, config.algorithm))

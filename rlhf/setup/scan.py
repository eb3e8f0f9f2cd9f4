"""`--scan`: what can be learned from the training prompts? Samples the start model, prints figures and recommends
settings.

The figures are in `scan_figures.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import usual_config
from rlhf.data.sampler import shorten
from rlhf.settings.fields import settings_of
from rlhf.settings.next_commands import flag_words
from rlhf.settings.recipes import DEFAULT_RECIPE
from rlhf.settings.training import Config
from rlhf.setup.build import Components
from rlhf.setup.scan_figures import (
    FEWEST,
    IN_REACH,
    Figures,
    Recommendation,
    figures_of,
    in_unit_range,
    is_binary,
    recommend,
)
from rlhf.setup.start_samples import Sampled, drawn, sample_and_score
from rlhf.utils.command_lines import command, script_words
from rlhf.utils.console import Screen, clock
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.intervals import Estimate, over_prompts

OF_A_LOOK = ("scan", "scan_prompts", "dry_run", "check")  # not in the recommended command
MANY = 0.5  # share of completions (or prompts) from which a cause of equal scores is reported


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
    group_size: int  # completions per group of the shares; without groups, all completions of a prompt
    samples: int  # completions per prompt
    binary: bool  # all scores are 0 or 1, so that the mean is a pass rate
    recommendation: Recommendation | None  # None: nothing can be learned
    nothing: str | None  # why nothing can be learned, and what to do; None: something can


def scan_run(config: Config, components: Components, screen: Screen) -> None:
    """Scan, and print the figures and the recommended command. Raises UserError (exit status 2) if nothing can be
    learned. Writes no file."""
    with screen:
        found = scan_prompts(config, components, screen)
    show_scan(config, found, screen)
    if found.nothing is not None:
        raise UserError(found.nothing)


def scan_prompts(config: Config, components: Components, screen: Screen) -> Scan:
    """Sample and score completions of some training prompts with the start model. Raises RunError if too few of them
    have a score."""
    samples = max(config.run.scan_samples, config.group_size)
    indices = drawn(components.prompts.train, config.run.seed, by_topic=True)[: config.run.scan_prompts]
    began, sampled = time.monotonic(), []
    for part in sample_and_score(config, components, indices, samples):
        sampled += part
        left = (time.monotonic() - began) / len(sampled) * (len(indices) - len(sampled))
        screen.progress(
            f"scan: {len(sampled):,} of {len(indices):,} prompts, {clock(left)} left",
            last=len(sampled) == len(indices),
        )
    return results_of(config, sampled, len(components.prompts.train), samples)


def results_of(config: Config, sampled: Sequence[Sampled], available: int, samples: int) -> Scan:
    """Return the results of a scan. `available`: number of training prompts; `samples`: completions per prompt."""
    size = config.group_size if config.group_size > 1 else FEWEST
    complete = [one for one in sampled if len(one.shaped) >= size]  # without those whose completions have no score
    if not complete:
        raise RunError(
            f"no prompt has {size} completions with a score: --scan. Use prompts to which a reward function applies, "
            "or another function"
        )
    group = config.group_size if config.group_size > 1 else min(len(one.shaped) for one in complete)
    topics: dict[str, list[Sampled]] = {}
    for one in complete:
        topics.setdefault(one.prompt.example.topic or "no topic", []).append(one)
    parts = {name: part_of(config, topics[name], group) for name in sorted(topics)} if len(topics) > 1 else {}
    overall, nothing = part_of(config, complete, group), None
    if overall.figures.signal == 0:
        nothing = why_nothing(config, complete)
    scores, raw = [one.shaped for one in complete], [one.raw for one in complete]
    limits = config.data.keep_pass_rate or IN_REACH
    found = recommend(
        scores, raw if in_unit_range(raw) else None, config.group_size, config.batch.batch_size, available, limits
    )
    return Scan(overall, parts, group, samples, is_binary(scores), None if nothing else found, nothing)


def part_of(config: Config, rows: Sequence[Sampled], group: int) -> Part:
    """Return the results of some prompts, with groups of `group` completions."""
    scores = [one.shaped for one in rows]
    limits, null = ((0.0, 1.0), 0.5) if is_binary(scores) else (None, 0.0)
    interval = over_prompts([fmean(one) for one in scores], config.run.seed, null, limits)
    truncated = 1 - fmean(ended for one in rows for ended in one.ended)
    return Part(figures_of(scores, group), interval, truncated)


def why_nothing(config: Config, rows: Sequence[Sampled]) -> str:
    """Return the error line for a scan in which the completions of each prompt have equal scores, with the causes that
    apply."""
    scores = {score for one in rows for score in one.shaped}
    truncated = 1 - fmean(ended for one in rows for ended in one.ended)
    same = fmean(one.distinct == 1 for one in rows)
    fixes = []
    if truncated >= MANY:
        tokens = config.sampling.max_new_tokens
        fixes.append(
            f"{truncated:.0%} of the completions reach {tokens} tokens without EOS: raise --max-new-tokens, or use a "
            "start model that ends its completions"
        )
    if same >= MANY:
        fixes.append(
            f"all completions are equal for {same:.0%} of the prompts: raise --temperature (now "
            f"{config.sampling.temperature:g})"
        )
    if scores == {1.0}:
        fixes.append("every completion is solved: use harder prompts")
    elif not fixes or scores == {0.0}:
        fixes.append("use easier prompts, or a start model that solves some of them (--actor-model)")
    every = (
        f"every score is {min(scores):g}" if len(scores) == 1 else "the completions of each prompt have equal scores"
    )
    return f"nothing can be learned, {every} ({len(rows)} prompts): --scan. Fix: {'; '.join(fixes)}"


# --- printing --------------------------------------------------------------------------------------------------------


def show_scan(config: Config, scan: Scan, screen: Screen) -> None:
    """Print the table, and the recommended command with its reasons."""
    parts = {**scan.topics, "all": scan.overall}
    rows = [["topic", *columns_of(scan)], *([shorten(name), *cells_of(scan, part)] for name, part in parts.items())]
    screen.say(
        f"scan of the start model: {scan.overall.figures.prompts:,} training prompts x {scan.samples} completions, "
        f"groups of {scan.group_size}"
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:  # a grid would wrap its cells if the output is a file
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        screen.say("  ".join([f"  {name.ljust(widths[0])}", *right]))
    if scan.recommendation is None:
        return
    if not scan.recommendation.reasons:
        screen.say("recommended: the settings as they are. Train with:")
    else:
        screen.say("recommended:")
        for reason in scan.recommendation.reasons:
            screen.say(f"  {reason}")
        screen.say("train with:")
    screen.say(f"  {recommended_command(config, scan.recommendation)}")


def columns_of(scan: Scan) -> list[str]:
    """Return the titles of the columns after the first."""
    shares = ["no difference", *(["never", "always"] if scan.binary else [])]
    reach = ["in reach"] if scan.overall.figures.in_reach is not None else []
    spread = [] if scan.binary else ["sd within/between"]
    return [
        "prompts",
        "pass rate (95%)" if scan.binary else "score (95%)",
        *shares,
        *reach,
        *spread,
        "signal",
        "no EOS",
    ]


def cells_of(scan: Scan, part: Part) -> list[str]:
    """Return the cells of a row after the first, in the order of `columns_of`."""
    f, i = part.figures, part.interval
    ends = "" if i.low is None else f" ({i.low:.2f} to {i.high:.2f})"
    shares = [f.no_difference, *([f.never, f.always] if scan.binary else [])]
    reach = [f"{f.in_reach:.0%}"] if scan.overall.figures.in_reach is not None else []
    spread = [] if scan.binary else [f"{f.signal**0.5:.3g}/{f.between:.3g}"]
    return [
        f"{f.prompts:,}", f"{i.value:.2f}{ends}", *(f"{share:.0%}" for share in shares), *reach, *spread,
        f"{f.signal:.3g}", f"{part.truncated:.0%}",
    ]  # fmt: skip


def recommended_command(config: Config, found: Recommendation) -> str:
    """Return the training command with the run's settings and the recommended ones."""
    usual, words = usual_config(config.recipe, config.user_file, config.algorithm), []
    if config.recipe != DEFAULT_RECIPE:
        words += ["--recipe", config.recipe]
    changed = {"K": found.K, "batch_size": found.batch_size, "keep_pass_rate": found.keep_pass_rate}
    changed = {name: value for name, value in changed.items() if value is not None}
    foreign = ALGORITHMS[config.algorithm].foreign
    for name, one in settings_of(Config).items():
        now, default = (getattr(getattr(c, one.group), name) for c in (config, usual))
        value = changed.get(name, now)
        if value != default and name not in OF_A_LOOK and one.group not in foreign:
            words += flag_words(name, value)
    return command(*script_words(config.algorithm), *words)

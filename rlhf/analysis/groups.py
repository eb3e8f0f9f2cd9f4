"""Groups runs by settings: runs that differ only in the seed form a group. Names the groups. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeVar

from rlhf.algorithms.kl_control import with_horizon
from rlhf.algorithms.table import ALGORITHMS, in_order, label_of
from rlhf.checkpoints.run_record import OF_EVALUATIONS, SEEDS_MAY_DIFFER, RunRecord, differences
from rlhf.config import config_of_run
from rlhf.settings.fields import as_text, settings_of
from rlhf.settings.training import Config, name_with_control
from rlhf.settings.translate import LENGTHS
from rlhf.settings.types import IN_PYTHON
from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.paths import same_value

T = TypeVar("T")

MAY_DIFFER = (*SEEDS_MAY_DIFFER, *OF_EVALUATIONS, "algorithm")  # settings that do not separate runs of an algorithm
# settings of evaluations, speed and memory: named only if nothing else tells the groups apart
MINOR = (
    *("eval_every", "eval_prompts", "eval_dataset", "eval_text", "best_rule", "perplexity_gate", "reward_timeout"),
    *("rollout_engine", "rollout_slots", "packed", "fused_head", "fit", "micro_batch_size", "gradient_checkpointing"),
    "bf16",
)
ALL_PAIRS = 4  # groups of which each pair is compared; with more, each is compared with the first one
NAMED = 3  # settings in a label, if they are enough to tell the groups apart
LONGEST_VALUE = 32  # characters of a setting's value in a label
RESERVED = ("start", "start model")  # labels that would be confused with the start model
HORIZON = "kl_horizon"
CONTROL = "control"  # it is in the name of each group of control runs, whatever else differs


@dataclass(frozen=True)
class SettingsGroup:
    """Runs of one algorithm with the same settings."""

    algorithm: str
    label: str
    members: tuple[int, ...]  # positions of its runs among the given ones
    settings: dict[str, str]  # the settings in which the groups differ, as text; without those that it does not read


def title_of(run: RunRecord) -> str:
    """Return the name of a run's algorithm, with its control: `GRPO control (scores shuffled)`."""
    return name_with_control(label_of(run.algorithm), control_of(run))


def control_of(run: RunRecord) -> str:
    """Return a run's --control. Runs of versions without it were trained with their true scores."""
    return run.flat_settings.get(CONTROL, "none")


def control_notes(groups: Sequence[tuple[str, RunRecord]]) -> list[str]:
    """Return the note on the controls among groups that are given as (name, one of its runs); empty without one."""
    names = [name for name, run in groups if control_of(run) != "none"]
    meaning = (
        "in training, scores were exchanged between completions. A difference of a control to the start model is the "
        "part of a result that the signal did not cause"
    )
    return [f"controls ({'; '.join(names)}): {meaning}"] if names else []


def group_runs(runs: Sequence[tuple[str, RunRecord]], labels: Sequence[str] = ()) -> list[SettingsGroup]:
    """Return the groups of runs that are given as (algorithm, record).

    The name of a group of control runs contains the word control, also if a label is given. The groups are in the
    order of their first runs, or in the order of the table of algorithms if they have their algorithms' names. Raises
    UserError if there are `labels`, but not one for each group.
    """
    spelled = in_one_spelling([run for _, run in runs])
    runs = [(algorithm, run) for (algorithm, _), run in zip(runs, spelled, strict=True)]
    found = _members(runs)
    algorithms = [runs[members[0]][0] for members in found]
    flat = [_settings_of([runs[i][1] for i in members]) for members in found]
    titles = [name_with_control(label_of(a), of[CONTROL]) for a, of in zip(algorithms, flat, strict=True)]
    differ = [name for name in differing_settings(algorithms, flat) if name != CONTROL]
    for considered in (_without_consequences(differ, algorithms, flat, found, runs), differ):
        texts = [
            {name: _text(values.get(name, "unknown")) for name in considered if name not in unread(algorithm)}
            for algorithm, values in zip(algorithms, flat, strict=True)
        ]
        names = _default_labels(titles, texts)
        if len(set(names)) == len(names):
            break
    if labels:
        _check_labels(labels, names, found)
        labels = [name_with_control(one, of[CONTROL]) for one, of in zip(labels, flat, strict=True)]
    groups = [
        SettingsGroup(algorithm, label, tuple(members), values)
        for algorithm, label, members, values in zip(algorithms, labels or names, found, texts, strict=True)
    ]
    if labels or names != titles:
        return groups
    order = in_order(algorithms)
    return sorted(groups, key=lambda group: (order.index(group.algorithm), group.label))  # a control after its arm


def in_one_spelling(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with their planned episodes as length, if all have the same, or if they were set with different
    settings (--epochs, --num-iterations, --episodes): otherwise, equal lengths would be different settings."""
    lengths = [{name for name in LENGTHS if run.flat_settings.get(name) is not None} for run in runs]
    if all(one == lengths[0] for one in lengths) and len({run.plan.episodes for run in runs}) > 1:
        return list(runs)
    return [
        replace(run, settings=run.settings | {"run": {**run.settings.get("run", {}), **_planned(run)}}) for run in runs
    ]


def _planned(run: RunRecord) -> dict[str, Any]:
    return {**dict.fromkeys(LENGTHS), "episodes": run.plan.episodes}


def _members(runs: Sequence[tuple[str, RunRecord]]) -> list[list[int]]:
    """Return the positions of the runs of each group. A run must have the settings of all others of its group, because
    settings that only one of two runs has are no difference."""
    groups: list[list[int]] = []
    for position, (algorithm, run) in enumerate(runs):
        aside = {*MAY_DIFFER, *unread(algorithm), "recipe"}  # the name of a recipe with equal settings
        for members in groups:
            others = [runs[i] for i in members]
            if all(a == algorithm and not differences(_compared(r), _compared(run), aside) for a, r in others):
                members.append(position)
                break
        else:
            groups.append([position])
    return groups


def _settings_of(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the settings of a group: name -> value."""
    merged: dict[str, Any] = {}
    for run in reversed(runs):
        merged |= _compared(run)
    return merged


def _compared(run: RunRecord) -> dict[str, Any]:
    """Return the settings of a run: name -> value. Prompts that were given in Python have a hash of them instead of a
    name. With --keep-pass-rate it is that of the evaluation prompts, because the seeds keep different ones. A run of a
    version without --control is no control."""
    settings = run.flat_settings | {CONTROL: control_of(run)}
    if settings.get("prompts") != IN_PYTHON:
        return settings
    names = ("evaluation_sha256",) if settings.get("keep_pass_rate") else ("train_sha256", "evaluation_sha256")
    text = " ".join(str(run.data.get(name)) for name in names)
    return settings | {"prompts": f"{IN_PYTHON} {hashlib.sha256(text.encode()).hexdigest()[:8]}"}


def unread(algorithm: str) -> set[str]:
    """Return the settings that only other algorithms use."""
    row = ALGORITHMS.get(algorithm)
    groups = row.foreign if row else {group for row in ALGORITHMS.values() for group in row.reads}
    return {name for name, setting in settings_of(Config).items() if setting.group in groups}


def differing_settings(algorithms: Sequence[str], settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the settings in which groups differ, if both algorithms of a pair use them.

    Args:
        algorithms: the algorithm of each group.
        settings: the settings of each group, by name.
    """
    names: set[str] = set()
    for (one, here), (other, there) in combinations(list(zip(algorithms, settings, strict=True)), 2):
        aside = {*MAY_DIFFER, *unread(one), *unread(other)}
        names |= {n for n in here.keys() & there.keys() if n not in aside and not same_value(here[n], there[n])}
    return sorted(names)


def _without_consequences(
    names: Sequence[str],
    algorithms: Sequence[str],
    settings: Sequence[dict[str, Any]],
    members: Sequence[Sequence[int]],
    runs: Sequence[tuple[str, RunRecord]],
) -> list[str]:
    """Return the names without those in MINOR and those that follow from other settings: batch_size and kl_horizon of
    different algorithms that are the same per update, and a kl_horizon that was not set by the user."""
    left = [name for name in names if name not in MINOR and not _same_per_update(name, algorithms, settings)]
    rest = [name for name in left if name != HORIZON]
    if not rest or HORIZON not in left:
        return left
    return rest if all(_derived_horizon(runs[found[0]][1]) for found in members) else left


def _same_per_update(name: str, algorithms: Sequence[str], settings: Sequence[dict[str, Any]]) -> bool:
    """True if the setting differs between algorithms only, and has the same meaning in an update of each: a batch of
    prompts with K completions each, or a number of episodes."""
    if name not in ("batch_size", HORIZON):
        return False
    values, of_algorithm = set(), set()
    for algorithm, found in zip(algorithms, settings, strict=True):
        episodes = (found.get("batch_size") or 0) * (found.get("K") or 1)
        values.add(episodes if name == "batch_size" else episodes and (found.get(name) or 0) / episodes)
        of_algorithm.add((algorithm, found.get(name)))
    return len(values) == 1 and len(of_algorithm) == len(set(algorithms))


def _derived_horizon(run: RunRecord) -> bool:
    """True if a run's kl_horizon is the one that follows from its length."""
    try:
        config = config_of_run(run, kl_horizon=None)
    except UserError:  # an algorithm that this version does not have
        return False
    return with_horizon(config, run.plan.updates).kl.kl_horizon == run.flat_settings.get(HORIZON)


def _default_labels(names: Sequence[str], settings: Sequence[dict[str, str]]) -> list[str]:
    """Return the title of each group, with its settings if they are needed. The labels are distinct."""
    if not any(settings):
        return list(names)
    short = [_label(name, values, NAMED) for name, values in zip(names, settings, strict=True)]
    if len(set(short)) == len(short):
        return short
    return [_label(name, values, len(values)) for name, values in zip(names, settings, strict=True)]


def _label(name: str, settings: dict[str, str], most: int) -> str:
    words = [f"{setting} {value}" for setting, value in list(settings.items())[:most]]
    more = [f"{len(settings) - most} more settings"] if len(settings) > most else []
    return " ".join([name, ", ".join([*words, *more])]).strip()


def short_label(label: str, title: str, settings: dict[str, str]) -> str:
    """Return a group's label; only its title if the label is the title with its settings."""
    return title if label in [_label(title, settings, most) for most in (NAMED, len(settings))] else label


def _text(value: Any) -> str:
    """Return a setting's value as short text. The end of a path or of a list is the part that differs."""
    text = as_text(value, " ")
    return text if len(text) <= LONGEST_VALUE else f"...{text[3 - LONGEST_VALUE :]}"


def _check_labels(labels: Sequence[str], names: Sequence[str], members: Sequence[Collection[int]]) -> None:
    """Raise UserError if the labels do not name each group once."""
    of = [
        f"{name} ({len(found)} run{'s' if len(found) > 1 else ''})" for name, found in zip(names, members, strict=True)
    ]
    if len(labels) != len(names):
        raise UserError(
            f"{len(labels)} label(s) for {len(names)} group(s) of runs: --label {' '.join(labels)}. Give one for each "
            f"group, after the run folders; the groups are, in this order: {'; '.join(of)}"
        )
    twice = sorted({label for label in labels if labels.count(label) > 1})
    problems = [f"two groups have the label {label!r}: --label. Give each group another one" for label in twice]
    raise_if(
        [*problems, *(f"{w!r} names the start model: --label. Give another one" for w in labels if w in RESERVED)]
    )


def short_pair(name: str, groups: Collection[str]) -> str:
    """Return the name of a pair, "ONE - OTHER", without the name of the first group if all pairs have it."""
    first = next(iter(groups))
    return f"{name.removesuffix(f' - {first}')} - the first one" if len(groups) > ALL_PAIRS else name


def compared_pairs(groups: Sequence[T]) -> list[tuple[T, T]]:
    """Return the pairs of groups that a verdict compares: each pair of up to 4 groups; of more, each with the first.

    With many groups, each of all pairs would have a very wide interval. The first one is chosen before the results are
    known, so only the comparisons with it need to be corrected for. The best one is chosen because of the results.
    """
    if len(groups) <= ALL_PAIRS:
        return list(combinations(groups, 2))
    return [(other, groups[0]) for other in groups[1:]]

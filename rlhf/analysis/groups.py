"""Groups runs by settings: runs that differ only in the seed form a group. Names the groups. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeVar

from rlhf.algorithms.table import ALGORITHMS, in_order, label_of
from rlhf.checkpoints.run_record import OF_EVALUATIONS, SEEDS_MAY_DIFFER, RunRecord, differences
from rlhf.settings.fields import as_text
from rlhf.settings.training import DataSettings, function_name, name_with_control
from rlhf.settings.translate import LENGTHS
from rlhf.utils.errors import Problem, raise_if
from rlhf.utils.paths import same_value

T = TypeVar("T")

MAY_DIFFER = (*SEEDS_MAY_DIFFER, *OF_EVALUATIONS, "algorithm")  # settings that do not separate runs of an algorithm
ALL_PAIRS = 4  # groups of which each pair is compared; with more, each is compared with the first one
NAMED = 3  # settings in a label
LONGEST_VALUE = 32  # characters of a setting's value in a label
HASHES_OF_IDS = ("train_sha256", "evaluation_sha256")
# identities of models and prompts in a run's data -> the settings that explain a difference
OF_PROMPTS = frozenset({"actor_model", *vars(DataSettings())})
IDENTITIES = {
    **dict.fromkeys(("start_model_gguf", "start_model_files"), frozenset({"actor_model"})),
    **dict.fromkeys((*HASHES_OF_IDS, "topics_sha256"), OF_PROMPTS),
    "reward_model_files": frozenset({"rm_model"}),
    "teacher_files": frozenset({"teacher"}),
    "few_shot": frozenset(),
    "algorithm_sha256": frozenset(),
}
CONTROL = "control"  # it is in the name of each group of control runs, whatever else differs


@dataclass(frozen=True)
class SettingsGroup:
    """Runs of one algorithm with the same settings, or models to which the user gave one name."""

    algorithm: str  # empty for models that do not belong to a run
    label: str
    members: tuple[int, ...]  # positions of its runs among the given ones
    settings: dict[str, str]  # the settings in which the groups differ, as text; without those that it does not read


def title_of(run: RunRecord) -> str:
    """Return the name of a run's algorithm, with its control: `GRPO control (scores shuffled)`."""
    return name_with_control(label_of(run.algorithm), control_of(run))


def control_of(run: RunRecord) -> str:
    """Return a run's --control. Runs of versions without it were trained with their true scores."""
    return run.flat_settings.get(CONTROL, "none")


def group_runs(runs: Sequence[RunRecord | None], names: Sequence[str | None] = ()) -> list[SettingsGroup]:
    """Return the groups of runs. None is a model that does not belong to a run.

    `names` has the name that the user gave each model, or None; models with one name are a group. Runs without a name
    are grouped by their settings; their group has the algorithm's name, with the settings in which it differs from the
    other groups of that name. The name of a group of control runs contains the word control. The groups are in the
    order of their first runs, or in the order of the table of algorithms if they have their algorithms' names. Raises
    UserError if two groups have one name.
    """
    names = names or [None] * len(runs)
    spelled = iter(in_one_spelling([run for run in runs if run is not None]))
    runs = [None if run is None else next(spelled) for run in runs]
    found = _members(runs, names)
    algorithms = [getattr(runs[members[0]], "algorithm", "") for members in found]
    flat = [_settings_of([run for i in members if (run := runs[i]) is not None]) for members in found]
    texts = _texts(algorithms, flat)
    titles = [
        name_with_control(names[members[0]] or label_of(algorithm), of.get(CONTROL, "none"))
        for members, algorithm, of in zip(found, algorithms, flat, strict=True)
    ]
    labels = list(titles)
    for title in titles:
        same = [i for i, other in enumerate(titles) if other == title and names[found[i][0]] is None]
        if len(same) > 1:
            of_title = _texts([algorithms[i] for i in same], [flat[i] for i in same])
            for i, label in zip(same, _labels(title, of_title), strict=True):
                labels[i] = label
    twice = sorted({label for label in labels if labels.count(label) > 1})
    raise_if([Problem(f"two groups of runs have the name {label!r}", "--arm", "Give another name") for label in twice])
    groups = [
        SettingsGroup(algorithm, label, tuple(members), values)
        for algorithm, label, members, values in zip(algorithms, labels, found, texts, strict=True)
    ]
    if any(names) or labels != titles:
        return groups
    order = in_order(algorithms)
    return sorted(groups, key=lambda group: (order.index(group.algorithm), group.label))  # a control after its arm


def mixed(group: SettingsGroup, runs: Sequence[RunRecord]) -> list[str]:
    """Return a sentence if the runs of a group are not seeds of one arm: the user gave them one name."""
    runs = in_one_spelling(runs)
    compared = [settings_compared(run) | {"the algorithm": run.algorithm} for run in runs]
    names = [name for name in differing_settings([run.algorithm for run in runs], compared) if name != "recipe"]
    return [f"{group.label} is the mean of runs that differ in {', '.join(names)}"] if names else []


def _texts(algorithms: Sequence[str], flat: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the settings in which groups differ, as text, of each group; without those that it does not read. Models
    and prompts are told apart by their settings, not also by their hashes."""
    found = differing_settings(algorithms, flat)
    differ = [name for name in found if name != CONTROL and IDENTITIES.get(name, frozenset()).isdisjoint(found)]
    return [
        {name: _text(of.get(name, "unknown")) for name in differ if of and name not in unread(algorithm)}
        for algorithm, of in zip(algorithms, flat, strict=True)
    ]


def _labels(title: str, settings: Sequence[dict[str, str]]) -> list[str]:
    """Return the title with the settings of each group: up to three. Of more settings, the fewest first ones that tell
    the groups apart, because sentences repeat the names."""
    many = max(map(len, settings)) > NAMED
    for most in (*range(1, NAMED if many else 1), NAMED, None):
        labels = []
        for values in settings:
            words = [f"{setting} {value}" for setting, value in list(values.items())[:most]]
            words += [f"{len(values) - most} more settings"] if most and len(values) > most else []
            labels.append(f"{title} {', '.join(words)}".strip())
        if len(set(labels)) == len(labels):
            break
    return labels


def in_one_spelling(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with their planned episodes as length, if all have the same, or if they were set with different
    settings (--epochs, --num-iterations, --episodes): otherwise, equal lengths would be different settings."""
    lengths = [{name for name in LENGTHS if run.flat_settings.get(name) is not None} for run in runs]
    if all(one == lengths[0] for one in lengths) and len({run.plan.episodes for run in runs}) > 1:
        return list(runs)
    unset = dict.fromkeys(LENGTHS)
    planned = [{**run.settings.get("run", {}), **unset, "episodes": run.plan.episodes} for run in runs]
    return [replace(run, settings=run.settings | {"run": of}) for run, of in zip(runs, planned, strict=True)]


def _members(runs: Sequence[RunRecord | None], names: Sequence[str | None]) -> list[list[int]]:
    """Return the positions of the runs of each group. A run without a name must have the settings of all others of its
    group, because settings that only one of two runs has are no difference."""
    groups: list[list[int]] = []
    for position, (run, name) in enumerate(zip(runs, names, strict=True)):
        for members in groups:
            if name == names[members[0]] and (name or all(_same_group(runs[i], run) for i in members)):
                members.append(position)
                break
        else:
            groups.append([position])
    return groups


def _same_group(one: RunRecord, other: RunRecord) -> bool:
    aside = {*MAY_DIFFER, *unread(one.algorithm), "recipe"}  # the name of a recipe with equal settings
    return one.algorithm == other.algorithm and not differences(
        settings_compared(one), settings_compared(other), aside
    )


def _settings_of(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the settings of a group: name -> value."""
    merged: dict[str, Any] = {}
    for run in reversed(runs):
        merged |= settings_compared(run)
    return merged


def settings_compared(run: RunRecord) -> dict[str, Any]:
    """Return the settings of a run: name -> value, and hashes of its models and data, if it recorded them: one path
    can have had two contents. A reward function in a file has the hash of its code instead of its path. Weights that
    are all 1 are unset. A run of a version without --control is no control."""
    aside = () if "date" in run.data else HASHES_OF_IDS  # of older versions: they can depend on the day of the run
    hashes = {n: _short_hash(str(run.data[n])) for n in IDENTITIES if run.data.get(n) and n not in aside}
    settings = run.flat_settings | {CONTROL: control_of(run)} | hashes
    if settings.get("keep_pass_rate"):  # of older versions: the seeds kept different prompts
        settings.pop("train_sha256", None)
    codes = run.data.get("rules", {})
    rules = [
        f"{function_name(rule)} {codes[rule][:8]}" if codes.get(rule) else rule
        for rule in settings.get("reward_func") or ()
    ]
    weights = settings.get("reward_weights") or ()
    return settings | {"reward_func": rules, "reward_weights": weights if set(weights) - {1} else None}


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def unread(algorithm: str) -> set[str]:
    """Return the settings that only other algorithms use."""
    row = ALGORITHMS.get(algorithm)
    return {*row.foreign} if row else set().union(*(row.reads for row in ALGORITHMS.values()))


def differing_settings(algorithms: Sequence[str], settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the settings (name -> value) in which groups differ, if both algorithms of a pair use
    them."""
    names: set[str] = set()
    for (one, here), (other, there) in combinations(list(zip(algorithms, settings, strict=True)), 2):
        aside = {*MAY_DIFFER, *unread(one), *unread(other)}
        names |= {n for n in here.keys() & there.keys() if n not in aside and not same_value(here[n], there[n])}
    return sorted(names)


def _text(value: Any) -> str:
    """Return a setting's value as short text. The end of a path or of a list is the part that differs."""
    text = as_text(value, " ")
    return text if len(text) <= LONGEST_VALUE else f"...{text[3 - LONGEST_VALUE :]}"


def compared_pairs(groups: Sequence[T]) -> list[tuple[T, T]]:
    """Return the pairs of groups that a verdict compares: each pair of up to 4 groups; of more, each with the first.

    With many groups, each of all pairs would have a very wide interval. The first one is chosen before the results are
    known, so only the comparisons with it need to be corrected for. The best one is chosen because of the results.
    """
    if len(groups) <= ALL_PAIRS:
        return list(combinations(groups, 2))
    return [(other, groups[0]) for other in groups[1:]]

"""The runs that a comparison is given: their groups, and errors in them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf.analysis.groups import SettingsGroup, group_runs
from rlhf.analysis.models import ModelRef
from rlhf.utils.command_lines import short_name
from rlhf.utils.console import listed
from rlhf.utils.errors import raise_if
from rlhf.utils.paths import missing_path


def check_named(names: Sequence[str]) -> None:
    """Raises UserError for names that are not folders, so that a mistyped run is not looked up on the hub."""
    problems = [str(missing_path(name, "run", "Give run folders")) for name in names if not Path(name).is_dir()]
    raise_if(problems)


def check_groups(models: Sequence[ModelRef], labels: Sequence[str] = ()) -> None:
    """Raises UserError if a model is not a run, a group has a seed twice, or the `labels` do not name each group."""
    raise_if([f"not a run: {m.name}. {short_name('compare')} takes run folders" for m in models if m.run is None])
    problems = []
    for group in groups_of(models, labels):
        seeds: dict[int, list[str]] = {}
        for i in group.members:
            seeds.setdefault(models[i].run.seed, []).append(models[i].name)
        problems += [
            f"two runs of {group.label} have the seed {seed}: {listed(names)}. Give each seed once"
            for seed, names in sorted(seeds.items())
            if len(names) > 1
        ]
    raise_if(problems)


def groups_of(models: Sequence[ModelRef], labels: Sequence[str] = ()) -> list[SettingsGroup]:
    """Returns the groups of runs with the same settings except for the seed."""
    return group_runs([(m.run.algorithm, m.run) for m in models], labels)

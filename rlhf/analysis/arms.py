"""The arms of a comparison: groups of runs, other models, and baselines. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf.analysis.groups import SettingsGroup, group_runs
from rlhf.analysis.models import ModelRef, find_models, has_start
from rlhf.settings.evaluation import ComparisonSettings, MeasureSettings
from rlhf.utils.console import listed
from rlhf.utils.errors import Problem, raise_if
from rlhf.utils.paths import missing_path


def find_arms(asked: ComparisonSettings, measure: MeasureSettings) -> tuple[list[ModelRef], list[SettingsGroup]]:
    """Return all models of a comparison, and the groups that they form. Raises UserError with all problems: a name
    that is no folder (so that a mistyped run is not looked up on the hub), a model that is no run and has no name, a
    seed twice in a group, or no start model."""
    named = [arm for arm in asked.arm if arm.model]
    missing = [missing_path(name, "run", "Give run folders") for name in asked.runs if not Path(name).is_dir()]
    raise_if([problem for error in missing for problem in error.problems])
    models = find_models([*asked.runs, *(arm.model for arm in named)], measure, "RUN")
    names = [*(None for _ in asked.runs), *(arm.name for arm in named)]
    problems = [
        Problem("not a run", model.name, f"Give it a name with --arm NAME={model.name}")
        for model, name in zip(models, names, strict=True)
        if model.run is None and name is None
    ]
    if not has_start(models, measure):
        problems.append(
            Problem("no start model", "--arm", "No model is a run or an adapter, so give the start model: --baseline")
        )
    raise_if(problems)
    groups = group_runs([model.run for model in models], names)
    raise_if([problem for group in groups for problem in _seeds_given_twice(models, group)])
    return models, groups


def _seeds_given_twice(models: Sequence[ModelRef], group: SettingsGroup) -> list[Problem]:
    seeds: dict[int, list[str]] = {}
    for i in group.members:
        if (run := models[i].run) is not None:
            seeds.setdefault(run.seed, []).append(models[i].name)
    return [
        Problem(f"two runs of {group.label} have the seed {seed}", listed(names), "Give each seed once")
        for seed, names in sorted(seeds.items())
        if len(names) > 1
    ]

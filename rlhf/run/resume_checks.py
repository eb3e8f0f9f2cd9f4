"""Checks that a resumed run is the same run. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhf.algorithms.kl_control import with_horizon
from rlhf.checkpoints.run_record import (
    RESUME_MAY_CHANGE,
    RunRecord,
    differences,
    environment,
    flat_settings,
    read_json,
)
from rlhf.settings.fields import replaced, to_dict
from rlhf.settings.training import FITTED, FROM_FREE_MEMORY, Config
from rlhf.settings.translate import removed_from
from rlhf.utils.console import Screen
from rlhf.utils.errors import Problem, UserError, raise_if
from rlhf.utils.system import threads_variable


def check_resume(config: Config) -> None:
    """Raise UserError if there is no run to resume, or its algorithm, settings or versions differ."""
    run = RunRecord.require(Path(config.run.output), "--resume, --output")
    if config.speed.fit != run.flat_settings.get("fit"):
        raise UserError(
            "--fit chooses settings when a run starts",
            f"--resume, --fit {config.speed.fit}",
            "Give the settings themselves, such as --micro-batch-size 1",
        )
    run.require_algorithm(config.algorithm, config.run.output)
    if run.status == "finished" and not is_extended(config, run):
        return
    if not config.run.resume_anyway:
        raise_if_changed(changes(run, to_dict(config), environment()))


def with_choices_of(config: Config, run: RunRecord) -> Config:
    """Return the configuration with the settings that `settle` gave the run when it started: the precision if --bf16
    is unset, tokens per micro-batch and slots that are 0, with --fit those of --fit, and the default kl_horizon. A
    resumed run reads them from run.json like all its settings; several seeds have no common run.json."""
    given = flat_settings(to_dict(config))
    unset = [name for name in FROM_FREE_MEMORY if not given[name]] + ["bf16"] * (config.model.bf16 is None)
    names = (*unset, *(FITTED if config.speed.fit is not None else ()))
    chosen = {name: run.flat_settings[name] for name in names if name in run.flat_settings}
    return with_horizon(replaced(config, **chosen), run.plan.updates)


def as_other_seeds(config: Config, folders: Iterable[Path]) -> Config:
    """Return the configuration of a new run with the precision and the number of threads of a run of the same start
    model in these folders, which was started before, if the user sets none. They are the folders of the command's
    seeds."""
    if config.run.resume or config.run.overwrite:
        return config
    for run in filter(None, map(read_json, folders)):
        stored = flat_settings(run.get("settings", {}))
        if stored.get("actor_model") != config.model.actor_model:
            continue
        if config.model.bf16 is None:
            config = replaced(config, bf16=stored.get("bf16"))
        if config.speed.threads is None and not threads_variable():
            config = replaced(config, threads=run.get("threads"))
    return config


def is_extended(config: Config, run: RunRecord) -> bool:
    """Return True if a finished run should continue with changed settings. Raises UserError if settings differ without
    --resume-anyway."""
    changed = setting_changes(run, to_dict(config))
    if changed and not config.run.resume_anyway:
        raise UserError(
            [
                Problem(
                    "this run is finished and its settings differ",
                    f"--resume, {line}",
                    (
                        "Restore the setting, or add --resume-anyway to continue from its last checkpoint "
                        "with the new settings"
                    ),
                )
                for line in changed
            ]
        )
    return bool(changed)


def setting_changes(run: RunRecord, settings: dict[str, Any]) -> list[str]:
    """Return the settings that differ between a run and its resumption, one line each."""
    before = run.flat_settings
    after = flat_settings(settings)
    changed = differences(run.settings, settings, RESUME_MAY_CHANGE)
    return [f"{name} was {before[name]} in this run and is {after[name]} now" for name in changed]


def changes(run: RunRecord, settings: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the settings and package versions that differ between a run and its resumption, one line each."""
    changed = setting_changes(run, settings) + removed_from(run.flat_settings)
    versions = {**run.versions, "python": run.python}, {**now["versions"], "python": now["python"]}
    changed += [
        f"{name} was {versions[0][name]} in this run and is {versions[1][name]} now"
        for name in versions[0]
        if versions[0][name] != versions[1].get(name)
    ]
    return changed


def raise_if_changed(changed: list[str]) -> None:
    """Raise UserError with these changes, if there are any."""
    raise_if([Problem("cannot resume", line, "Restore it, or add --resume-anyway") for line in changed])


def check_same_run(config: Config, changed: list[str], screen: Screen) -> None:
    """Raise UserError if something has `changed`. With --resume-anyway print warnings instead."""
    if not config.run.resume_anyway:
        raise_if_changed(changed)
    for line in changed:
        screen.say(f"warning: resuming although {line} (--resume-anyway)")

"""Going on with a run: what is there, whether it is the same run, and from which checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from rlhf.checkpoints.manifest import CheckpointScan, find_checkpoints
from rlhf.checkpoints.replacing import check_inputs_outside
from rlhf.checkpoints.run_folder import BEST_FOLDER, move_aside
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.run_record import RESUME_MAY_CHANGE, RunRecord, differences, environment, flat_settings
from rlhf.run.export import check_export, export_run
from rlhf.settings.fields import to_dict
from rlhf.settings.training import Config
from rlhf.setup.inputs import inputs_of
from rlhf.setup.plan import budget
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.state import load_trainer_state
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.files import hardlink_dir, update_dir_atomically


def prepare_resume(config: Config, screen: Screen) -> Config | None:
    """Decide what --resume does, before models are loaded. Return the configuration to train with; None for a finished
    run.

    A finished run exports what the settings ask for (merged adapter, card, upload). The files of a run that saved no
    checkpoint are moved aside, and it starts again. Raises UserError if there is no run, if its settings or data are
    others, or if none of its checkpoints is valid.
    """
    output = config.run.output
    run = RunRecord.require(Path(output), "--resume, --output")
    run.require_algorithm(config.algorithm, output)
    if run.status == "finished" and not is_extended(config, run):
        screen.say(f"finished already: {output}. There is nothing to train")
        if not (config.run.dry_run or config.run.check):
            check_export(config, run)
            export_run(config, screen)
        return None
    found = checkpoints_of(config, run)
    if found.newest is None and found.skipped:
        raise UserError(
            [
                f"no valid checkpoint: --output {output}, {line}. Add --overwrite to start again"
                for line in found.skipped
            ]
        )
    for line in found.skipped:
        screen.say(f"warning: skipped an invalid checkpoint: {line}; {found.newest.name} is used")
    check_same_run(config, changes(run, to_dict(config), environment()), screen)
    return start_again(config, screen) if found.newest is None else config


def start_again(config: Config, screen: Screen) -> Config:
    """Move the files of a run without checkpoints aside. Return the configuration that trains it from the start."""
    screen.say(f"nothing was saved before it stopped: {config.run.output}. Starting over")
    if not (config.run.dry_run or config.run.check):
        check_inputs_outside(config.run.output, inputs_of(config), "--output")
        screen.say(move_aside(Path(config.run.output)))
    return dataclasses.replace(config, run=dataclasses.replace(config.run, resume=False, overwrite=True))


def is_extended(config: Config, run: RunRecord) -> bool:
    """Whether a finished run is to be trained on with other settings. Raises UserError if they differ without
    --resume-anyway."""
    changed = setting_changes(run, to_dict(config))
    if changed and not config.run.resume_anyway:
        raise UserError(
            [
                f"a finished run with other settings: --resume, {line}. Add --resume-anyway to train on from its last "
                "checkpoint with the new settings, or leave that out"
                for line in changed
            ]
        )
    return bool(changed)


def checkpoints_of(config: Config, run: RunRecord) -> CheckpointScan:
    return find_checkpoints(Path(config.run.output), run.id)


def setting_changes(run: RunRecord, settings: dict[str, Any]) -> list[str]:
    """In which settings a run differs from those that it is to resume with, each in words."""
    before, after = run.flat_settings, flat_settings(settings)
    changed = differences(run.settings, settings, RESUME_MAY_CHANGE)
    return [f"{name} was {before[name]}, is {after[name]}" for name in changed]


def changes(run: RunRecord, settings: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In which settings and versions a run differs from what it is to resume with, each in words."""
    changed = setting_changes(run, settings)
    versions = {**run.versions, "python": run.python}, {**now["versions"], "python": now["python"]}
    changed += [
        f"{name} was {versions[0][name]}, is {versions[1][name]}"
        for name in versions[0]
        if versions[0][name] != versions[1].get(name)
    ]
    return changed


def check_same_run(config: Config, changed: list[str], screen: Screen) -> None:
    """Raises UserError where something has `changed`, unless that was asked for."""
    if changed and not config.run.resume_anyway:
        raise UserError(
            [
                f"not the run that was begun: --resume, {line}. Take that back, or add --resume-anyway"
                for line in changed
            ]
        )
    for line in changed:
        screen.say(f"warning: going on although {line}: not the run that was begun")


def restore_best(output: Path, checkpoint: Path) -> None:
    """best/ as it was then: what was kept there later is of updates that will be done again, perhaps otherwise."""
    if (checkpoint / BEST_FOLDER).is_dir():
        update_dir_atomically(output / BEST_FOLDER, lambda staging: hardlink_dir(checkpoint / BEST_FOLDER, staging))


def resume_run(trainer: OnPolicyLoop, config: Config, log: RunLog, screen: Screen) -> None:
    """With --resume, bring the trainer, its callbacks attached, to the newest valid checkpoint."""
    if config.run.resume:
        found = checkpoints_of(config, log.record)
        newest = load_newest(trainer, found, screen)
        if trainer.state.global_step > trainer.updates:
            raise UserError(
                f"the run has {trainer.state.global_step} updates already: --resume, a run of {trainer.updates}. Name "
                "a larger number"
            )
        restore_best(Path(config.run.output), newest)
        run = dataclasses.replace(config.run, resume=False, resume_anyway=False)
        settings = to_dict(dataclasses.replace(config, run=run))
        log.add(settings=settings, plan=budget(config, trainer.updates))  # with --resume-anyway they may be new
        screen.say(f"resuming after update {trainer.state.global_step} of {trainer.updates}, from {newest}")


def load_newest(trainer: OnPolicyLoop, found: CheckpointScan, screen: Screen) -> Path:
    """Load the newest checkpoint that can be loaded; returns its folder. Raises UserError if there is none."""
    problems = []
    for update in sorted(found.valid, reverse=True):
        folder = found.valid[update]
        try:
            load_trainer_state(trainer, folder)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # its files are as they were written, but what they hold may be anything
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            problems.append(f"{folder.name} cannot be loaded ({type(error).__name__}: {reason:.120})")
            continue
        for fault in problems:
            screen.say(f"warning: skipped a checkpoint: {fault}; {folder.name} is used")
        return folder
    raise UserError([f"no valid checkpoint: --resume, {fault}. Add --overwrite to begin anew" for fault in problems])

"""Resumes a run: checks that it is the same run, and loads its newest valid checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf.checkpoints.manifest import CheckpointScan, find_checkpoints
from rlhf.checkpoints.run_folder import BEST_FOLDER
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.run_record import RunRecord, environment
from rlhf.run.export import export_run
from rlhf.run.resume_checks import changes, check_same_run, is_extended
from rlhf.settings.fields import replaced, to_dict
from rlhf.settings.training import Config
from rlhf.setup.inputs import check_export, check_run_folder
from rlhf.setup.plan import budget
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.state import load_trainer_state
from rlhf.utils.console import Screen
from rlhf.utils.errors import Problem, UserError, first_line
from rlhf.utils.files import hardlink_dir, update_dir_atomically
from rlhf.utils.processes import is_first


def prepare_resume(config: Config, screen: Screen) -> Config | None:
    """Decide what --resume does, before models are loaded. Return the configuration to train with; None for a finished
    run.

    A finished run is exported as the settings request (merged adapter, model card, upload). A run without a checkpoint
    starts again. Raises UserError if there is no run, if its settings or versions differ, or if none of its
    checkpoints is valid.
    """
    output = config.run.output
    run = RunRecord.require(Path(output), "--resume, --output")
    run.require_algorithm(config.algorithm, output)
    if run.status == "finished" and not is_extended(config, run):
        screen.say(f"this run is already finished: {output}. There is nothing to train")
        if not config.run.only_looks:
            check_export(config, run)
            export_run(config, screen)
        return None
    found = find_checkpoints(Path(output), run.id)
    if found.forbidden is not None:  # an older checkpoint would train its updates again
        raise found.forbidden
    if found.newest is None and found.skipped:
        raise UserError(
            [
                Problem(
                    "no valid checkpoint",
                    f"--output {output}, {line}",
                    "To start from the beginning, replace --resume by --overwrite",
                )
                for line in found.skipped
            ]
        )
    for line in found.skipped:
        screen.say(f"warning: skipped an invalid checkpoint: {line}. Using {found.newest.name}")
    check_same_run(config, changes(run, to_dict(config), environment()), screen)
    return start_again(config, screen) if found.newest is None else config


def start_again(config: Config, screen: Screen) -> Config:
    """Return the configuration that trains a run without checkpoints from the start."""
    screen.say(
        f"this run stopped before its first checkpoint: {config.run.output}. Training starts from the beginning"
    )
    config = replaced(config, resume=False, overwrite=True)
    check_run_folder(config)
    return config


def resume_run(trainer: OnPolicyLoop, config: Config, log: RunLog, screen: Screen) -> None:
    """With --resume, load the newest valid checkpoint into the trainer and its callbacks."""
    if config.run.resume:
        found = find_checkpoints(log.folder, log.record.id)
        newest = load_newest(trainer, found, screen)
        planned = trainer.sampler.updates
        if trainer.host.state.global_step > planned:
            raise UserError(
                (f"the run already has {trainer.host.state.global_step} updates, more than the {planned} requested"),
                "--resume",
                "Use a larger number",
            )
        best = newest / BEST_FOLDER
        if is_first() and best.is_dir():  # a later best/ belongs to updates that will be trained again
            update_dir_atomically(log.folder / BEST_FOLDER, lambda new: hardlink_dir(best, new), log.check_place)
        settings = to_dict(replaced(config, resume=False, resume_anyway=False))
        log.add(settings=settings, plan=budget(config, planned))  # --resume-anyway may have changed them
        screen.say(f"resuming after update {trainer.host.state.global_step} of {trainer.updates}, from {newest}")


def load_newest(trainer: OnPolicyLoop, found: CheckpointScan, screen: Screen) -> Path:
    """Load the newest checkpoint that can be loaded, and return its folder. Raises UserError if there is none."""
    problems = []
    for update in sorted(found.valid, reverse=True):
        folder = found.valid[update]
        try:
            load_trainer_state(trainer, folder)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the hashes are right, but another version may have written other content
            problems.append(f"{folder.name} cannot be loaded ({type(error).__name__}: {first_line(error):.120})")
            continue
        for problem in problems:
            screen.say(f"warning: skipped a checkpoint: {problem}. Using {folder.name}")
        return folder
    raise UserError(
        [
            Problem(
                "no valid checkpoint",
                f"--resume, {problem}",
                "To start from the beginning, replace --resume by --overwrite",
            )
            for problem in problems
        ]
    )

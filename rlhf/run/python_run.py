"""A run that a Python program or a notebook starts: its settings, its trainer, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.checkpoints.run_record import RunRecord, flat_settings
from rlhf.distributed.group import from_first
from rlhf.environments.find import environment_in_settings
from rlhf.models.device import start_device
from rlhf.rewards.find import as_list, name_in_settings
from rlhf.run.given_models import stored_start_model
from rlhf.run.resume import prepare_resume
from rlhf.run.resume_checks import is_extended, with_choices_of
from rlhf.run.session import RunSession
from rlhf.settings.fields import replaced, to_dict
from rlhf.settings.training import Config
from rlhf.settings.types import IN_PYTHON
from rlhf.setup.build import load_models
from rlhf.setup.fit import settle
from rlhf.setup.inputs import check_export, check_run_folder
from rlhf.setup.load_inputs import given_weights, load_inputs
from rlhf.trainer.events import check_callback
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen
from rlhf.utils.errors import Problem, UserError, raise_if

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhf.rewards.find import Functions

OF_THE_SCRIPTS = ("dry_run", "memory", "seeds", "write_parts")
OF_A_FOLDER = ("resume", "overwrite", "rollback_on_kl", "record_tokens", "merge_lora", "push_to_hub")


# --- the settings of a run with a folder -----------------------------------------------------------------------------


def recorded(
    config: Config,
    output: Path,
    rewards: Functions | None,
    reward_weights: Sequence[float] | None,
    eval_functions: Functions | None,
    environment: Any,
) -> Config:
    """Return the settings that run.json stores: with the output folder, and the names of what was given in Python
    instead of the settings that it replaces. Raises UserError."""
    settings: dict[str, Any] = {"output": str(output), "prompts": IN_PYTHON, "split": None, "seeds": None}
    if rewards is not None:
        if config.critic_from_reward_model:
            raise UserError(
                "the critic starts from the reward model, which rewards= replaces",
                "critic='reward-model', output=",
                "Use critic='separate', or the reward model of the configuration",
            )
        settings |= {"rm_model": None, "reward_func": tuple(map(name_in_settings, as_list(rewards)))}
        settings["reward_weights"] = given_weights(reward_weights)
    if eval_functions is not None:
        settings["eval_func"] = tuple(map(name_in_settings, as_list(eval_functions)))
    if environment is not None:
        settings["environment"] = environment_in_settings(environment)
    return replace(replaced(config, **settings), in_python=True)


def check_given(config: Config, callbacks: Sequence = (), without_folder: bool = False, trains: bool = True) -> None:
    """Raise UserError for settings that would be ignored: those that only the scripts use, in a trainer also `check`,
    and in a trainer `without_folder` those about the files of a run. Also raises it for what is not a list of
    callbacks."""
    if not isinstance(config, Config):
        raise UserError("not a configuration", f"config, {config!r:.60}", "Make it with make_config()")
    values = flat_settings(to_dict(config))
    problems = [
        Problem(f"only the scripts use {name}", f"make_config({name}=)", "Remove it, or use the script")
        for name in OF_THE_SCRIPTS
        if values[name]
    ]
    if trains and values["check"]:
        problems.append(Problem("a trainer does not use check", "make_config(check=)", "Remove it, or use check()"))
    problems += [
        Problem(
            f"only a trainer with a run folder uses {name}",
            f"make_config({name}=)",
            "Add output='./folder' to make_trainer()",
        )
        for name in OF_A_FOLDER
        if without_folder and values[name]
    ]
    raise_if(problems)
    if not isinstance(callbacks, Sequence):
        raise UserError("not a list", f"callbacks, {callbacks!r:.60}", "Give a list of objects")
    for callback in callbacks:
        check_callback(callback)


def prepared(config: Config, screen: Screen) -> Config:
    """Check the output folder before anything is loaded. With `resume`, return the settings with which the run
    continues. Raises UserError if the folder cannot be used, or if the run is finished or has other settings."""
    check_run_folder(config)
    check_export(config)
    if not config.run.resume:
        return config
    output = config.run.output
    run = RunRecord.require(Path(output), "output")
    config = with_choices_of(config, run)
    if run.status == "finished" and not is_extended(config, run):
        raise UserError(
            "this run is already finished",
            f"make_config(resume=True), {output}",
            (
                f"Load its model with load_model({output!r}), or train further with resume_anyway=True "
                "and a larger num_iterations"
            ),
        )
    return prepare_resume(config, screen)


# --- the trainer -----------------------------------------------------------------------------------------------------


def trainer_of(
    config: Config,
    folder: Path | None,
    progress: bool,
    model: PreTrainedModel | str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **given: Any,
) -> OnPolicyLoop:
    """Return the trainer of a program, without its callbacks. Raises UserError.

    Args:
        config: the program's settings.
        folder: the run's folder; None: nothing is written.
        progress: print the lines of updates, evaluations and results.
        model: the start model, a name or an object; None: that of the settings.
        tokenizer: the tokenizer; None: that of the start model.
        given: what the program gives in place of settings, as `load_inputs` takes it.
    """
    screen = Screen()
    device = start_device(screen, config.run.deterministic, config.run.ddp_timeout)
    config = replaced(config, actor_model=stored_start_model(model, tokenizer, config.model.actor_model, folder))
    if folder is not None:
        instead = {name: given[name] for name in ("rewards", "reward_weights", "eval_functions", "environment")}
        config = recorded(config, folder, **instead)
        config = from_first(partial(prepared, config, screen))
    inputs = load_inputs(config, screen, **given)
    config = settle(config, inputs, device, screen)
    components = load_models(config, inputs, device, screen)
    return RunSession(config, components, screen, folder, progress).build_trainer()

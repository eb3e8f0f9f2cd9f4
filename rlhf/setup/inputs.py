"""Checks what flags, paths, JSON files and data files tell about a run, before torch is imported."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.model_folder import policy_problems, reward_model_problems
from rlhf.checkpoints.replacing import check_inputs_outside
from rlhf.checkpoints.run_folder import check_output, check_place, require_unused
from rlhf.data.examples import load_pairs
from rlhf.data.prompts import select_examples
from rlhf.environments.find import find_environment
from rlhf.rewards.find import check_rules
from rlhf.settings.next_commands import names_code, reward_model_line
from rlhf.settings.recipes import DEMOS, find_recipe
from rlhf.settings.types import CriticName
from rlhf.utils.errors import Problem, Say, UserError, raise_if
from rlhf.utils.files import check_folder
from rlhf.utils.paths import exists, is_on_hub, is_path, missing_path
from rlhf.utils.processes import is_first

if TYPE_CHECKING:
    from rlhf.checkpoints.run_record import RunRecord
    from rlhf.settings.reward_model import RewardModelConfig
    from rlhf.settings.training import Config


PUSH = "--push-to-hub"
MAY_BE_ON_HUB = ("--actor-model", "--rm-model", "--teacher", "--prompts", "--eval-dataset")


def check_inputs(config: Config, say: Say) -> None:
    """Raise UserError if an input of a training run is missing or wrong, or its output folder cannot be used.

    Hub names, and the parts that a demo builds, are checked later. `say` prints notes about the data.
    """
    built = {find_recipe(config.recipe).training[name][0] for name in DEMOS.get(config.recipe, ())}
    _check_missing(config, built)
    m = config.model
    targets = config.model.lora_targets if config.model.use_lora else ()
    problems = policy_problems(m.actor_model, "--actor-model", targets) if _is_there(m.actor_model, built) else []
    if m.teacher is not None and _is_there(m.teacher, built):
        problems += policy_problems(m.teacher, "--teacher")
    if m.rm_model is not None and _is_there(m.rm_model, built):
        problems += reward_model_problems(m.rm_model, "--rm-model")
    raise_if(problems)
    if config.run.num_iterations is not None and not config.run.only_reward:
        check_warmup(config, config.run.num_iterations)
    check_rules(config.reward.reward_func, "--reward-func")
    check_rules(config.reward.eval_func, "--eval-func")
    if config.environment.environment is not None:
        find_environment(config.environment.environment)
    data = (config.data.prompts, config.data.eval_dataset)
    if all(_is_there(name, built) for name in data if name is not None):
        selection = select_examples(config.data, say)
        if not config.run.only_reward:
            check_fills_a_batch(config, selection.distinct)


def _is_there(name: str, built: Container[str]) -> bool:
    """True for an existing local path that the recipe of a demo does not build."""
    return name not in built and not is_on_hub(name)


def check_fills_a_batch(config: Config, prompts: int) -> None:
    """Raise UserError if there are fewer training prompts than a batch needs: it would repeat prompts."""
    if prompts < config.batch.batch_size:
        largest = max(n for n in range(prompts + 1) if n * config.group_size % config.batch.minibatches == 0)
        smaller = f"--batch-size {largest or prompts}{'' if largest else ' --minibatches 1'}"
        raise UserError(
            f"the number of training prompts ({prompts}) is below the batch size ({config.batch.batch_size})",
            f"--prompts {config.data.prompts}",
            f"Use more prompts (--prompts, --split, --max-prompts), or add {smaller}",
        )


def check_warmup(config: Config, updates: int) -> None:
    """Raise UserError if the run has no update after --critic-warmup: its policy would be the start model."""
    warmup = config.critic.critic_warmup
    if warmup >= updates:
        raise UserError(
            f"only the critic is trained in all {updates} updates of the run",
            f"--critic-warmup {warmup}",
            "Give a smaller number, or train longer",
        )


def check_run_folder(config: Config) -> None:
    """Raise UserError, before anything is loaded, if the output folder is in use or must not be replaced. Only the
    first process checks: it may already have started the run."""
    folder = Path(config.run.output)
    parts = set(config.run.check)
    if not is_first() or (parts and not parts & {"plan", "update"}):
        return
    if config.run.resume:
        if not config.run.dry_run:
            check_folder(config.run.output)
            require_unused(folder)
        return
    if config.run.only_looks:  # the plan of a run may be printed while another one is in the folder
        check_place(folder, overwrite=config.run.overwrite)
    else:
        check_output(folder, **placing(config))
    check_inputs_outside(config.run.output, inputs_of(config), "--output")


def placing(config: Config) -> dict[str, bool]:
    """Return how the output folder may be used, as arguments of `check_output` and `claim_output`."""
    is_default = Path(config.run.output) == Path(f"./{config.algorithm}_training_output")
    return {"overwrite": config.run.overwrite, "is_default": is_default}


def _check_missing(config: Config, built: Container[str]) -> None:
    """Raise UserError that lists every missing local input of a training run."""
    problems = []
    for flag, name in inputs_of(config):
        on_hub = flag in MAY_BE_ON_HUB and not is_path(name)
        if name in built or on_hub or exists(name):
            continue
        if flag != "--rm-model":
            problems += _missing(flag, name)
        else:
            problems.append(
                Problem(
                    "no reward model",
                    f"{flag} {name}",
                    f"Train one with: {reward_model_line(config)}, or use only reward functions: "
                    "--rm-model none --reward-func ...",
                )
            )
    raise_if(problems)


def check_reward_inputs(config: RewardModelConfig, say: Say) -> None:
    """Raise UserError if an input of `python -m reward_model.train` is missing or wrong. Pairs on the hub are checked
    later."""
    models = {"--base-model": config.training.base_model, "--actor-model": config.calibration.actor_model}
    named = {flag: name for flag, name in {"--pairs": config.data.pairs, **models}.items() if name and is_path(name)}
    raise_if([line for flag, name in named.items() if not exists(name) for line in _missing(flag, name)])
    models = {flag: name for flag, name in models.items() if name and not is_on_hub(name)}
    raise_if([line for flag, name in models.items() for line in policy_problems(name, flag)])
    if not is_on_hub(config.data.pairs):
        load_pairs(config.data, say)


def _missing(flag: str, name: str) -> list[Problem]:
    """Return the error line for a missing input."""
    if flag in ("--actor-model", "--base-model", "--teacher"):
        what = "model"
        takes = "a Hugging Face model folder, a GGUF file or a hub name"
    elif flag in ("--prompts", "--eval-dataset", "--pairs"):
        what = "data file"
        takes = "one data file, a folder with several, or the name of a hub dataset"
    elif flag == "--critic":
        what = "run folder"
        takes = CriticName.expects
    else:
        what = "file"
        takes = "a file"
    return missing_path(name, what, f"{flag} takes {takes}").problems


def check_export(config: Config, run: RunRecord | None = None) -> None:
    """Check before training that the requested export will be possible. Raises UserError.

    The record of a finished `run` lists which of its inputs came from the hub.
    """
    model = config.model
    name = config.export.push_to_hub
    if name is None:
        return
    from rlhf.utils.hub import require_push  # slow to import

    known = is_on_hub(model.actor_model) if run is None else model.actor_model in run.on_hub
    if model.use_lora and not config.export.merge_lora and not known:
        raise UserError(
            "other users could not load this adapter, because its base model is not on the hub",
            f"{PUSH} {name}, --actor-model {model.actor_model}",
            "Add --merge-lora",
        )
    require_push(name, PUSH)


def inputs_of(config: Config) -> list[tuple[str, str]]:
    """Return what a run reads, as (flag, path or hub name)."""
    named = [
        ("--actor-model", config.model.actor_model), ("--rm-model", config.model.rm_model),
        ("--teacher", config.model.teacher), ("--prompts", config.data.prompts),
        ("--eval-dataset", config.data.eval_dataset),
        ("--eval-text", config.data.eval_text), ("--critic", config.critic.run),
    ]  # fmt: skip
    rules = {"--reward-func": config.reward.reward_func, "--eval-func": config.reward.eval_func}
    rules |= {"--algorithm": (ALGORITHMS[config.algorithm].source,)}
    rules |= {"--environment": filter(None, [config.environment.environment])}
    named += [(flag, rule.rpartition(":")[0]) for flag, found in rules.items() for rule in names_code(found)]
    return [(flag, name) for flag, name in named if name]

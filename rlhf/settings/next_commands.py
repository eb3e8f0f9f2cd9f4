"""The commands that are printed as the user's next step. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf.settings.fields import changed_words, setting_words, values_in
from rlhf.settings.merge import merged
from rlhf.settings.recipes import DEFAULT_RECIPE, find_recipe
from rlhf.settings.reward_model import OF_THE_DATA, RewardModelConfig, may_have_pairs, usual_reward_config
from rlhf.settings.training import Config
from rlhf.settings.types import FROM_PYTHON, FROM_TRL
from rlhf.utils.command_lines import script_command


def names_code(rules: Iterable[str]) -> list[str]:
    """Return the reward functions that are defined in a file of the user, FILE.py:NAME."""
    return [rule for rule in rules if ":" in rule and not rule.startswith((FROM_TRL, FROM_PYTHON))]


CODE = ("reward_func", "eval_func", "environment")  # settings that may name Python files


def code_in(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return each of CODE -> the functions, or the class, that it names in these settings."""
    found = {name: settings.get(name) or [] for name in CODE}
    return {name: [value] if isinstance(value, str) else list(value) for name, value in found.items()}


def code_words(settings: Mapping[str, Any]) -> list[str]:
    """Return the arguments of CODE in these settings, each if something that it names is the user's code. Such code
    must be on the command line: a run folder alone never makes it run. For what was defined in Python, the argument is
    the form that the user must complete."""
    typed = {name: tuple(map(in_a_file, found)) for name, found in code_in(settings).items()}
    return setting_words({name: found for name, found in typed.items() if names_code(found)})


def in_a_file(rule: str) -> str:
    """Return a reward function; for one that was defined in Python, the form that the user must complete. A lambda has
    no name that a file could define."""
    name = rule.removeprefix(FROM_PYTHON)
    return rule if name == rule else f"FILE.py:{name if name.isidentifier() else 'NAME'}"


def changed_command(script: str, wanted: dict[str, Any], usual: Any) -> str:
    """Return the command line of a script with the `wanted` settings, and the recipe, that differ from those of the
    configuration `usual`, which the script uses without flags except --recipe."""
    return script_command(script, *changed_words(wanted, {"recipe": DEFAULT_RECIPE, **values_in(usual)}))


def in_a_program(changed: dict[str, Any]) -> str:
    """Return the change of a program's configuration."""
    return f"make_config(..., {', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def resume_command(config: Any, **changed: Any) -> str:
    """Return the command that resumes a run, or the runs of several seeds, with `changed` settings. All others are in
    run.json. A run that was started in Python is resumed there."""
    if config.in_python:
        return f"{in_a_program({'resume': True, **changed})} and the same make_trainer(...)"
    run = config.run
    code = code_words(values_in(config))
    return resume_line(config.algorithm, run.output, run.seeds, code, **changed)


def resume_line(
    algorithm: str, output: str, seeds: tuple[int, ...] | None, words: Sequence[str], **changed: Any
) -> str:
    """Return the command of `resume_command` from separate settings. `words` are more arguments."""
    settings = {"resume": True, **({} if seeds is None else {"seeds": seeds}), **changed}
    return script_command(algorithm, *setting_words(settings), *words, "--output", output)


def reward_model_line(config: Config) -> str:
    """Return the command that trains the reward model of a training run."""
    usual = usual_reward_config(config.recipe, config.user_file)
    data = config.data
    start = config.model.actor_model
    layer = config.user_file if config.recipe == DEFAULT_RECIPE else find_recipe(config.recipe).training
    policy = merged(Config, [layer])
    wanted = {"recipe": config.recipe, "rm_output": config.model.rm_model}
    if start != policy["actor_model"][0]:
        wanted |= {"base_model": start, "actor_model": start}
    if data.prompts not in (policy["prompts"][0], usual.data.pairs) and may_have_pairs(data.prompts, data.columns):
        wanted |= {"pairs": data.prompts, **_of_the_data(data)}
    wanted |= {"split": data.split, "plain_prompts": data.plain_prompts}
    wanted["chat_template_kwargs"] = data.chat_template_kwargs
    return changed_command("reward-model", wanted, usual)


def training_command(made: RewardModelConfig, usual: Config) -> str:
    """Return the command that trains a policy with a new reward model.

    Args:
        made: the configuration with which the reward model was trained.
        usual: the configuration that the training script uses without flags.
    """
    data = made.data
    wanted = {
        "recipe": made.recipe,
        "rm_model": made.training.rm_output,
        "actor_model": made.calibration.actor_model or made.training.base_model,
    }
    of_recipe = usual_reward_config(made.recipe, made.user_file).data.pairs
    if data.pairs not in (usual.data.prompts, of_recipe):
        wanted |= {"prompts": data.pairs, **_of_the_data(data)}
    if data.split is None or (data.split.rl > 0 and data.split.evaluation > 0):  # otherwise training refuses it
        wanted["split"] = data.split
    wanted["plain_prompts"] = data.plain_prompts
    wanted["chat_template_kwargs"] = data.chat_template_kwargs
    return changed_command(usual.algorithm, wanted, usual)


def _of_the_data(data: Any) -> dict[str, Any]:
    """Return the settings that describe how data is read."""
    return {name: getattr(data, name) for name in OF_THE_DATA}

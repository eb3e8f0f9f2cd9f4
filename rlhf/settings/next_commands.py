"""The commands that are printed as the user's next step. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlhf.settings.fields import flag_words
from rlhf.settings.merge import merged
from rlhf.settings.recipes import DEFAULT_RECIPE, find_recipe
from rlhf.settings.reward_model import OF_THE_DATA, RewardModelConfig, may_have_pairs, usual_reward_config
from rlhf.settings.training import Config
from rlhf.settings.types import FROM_PYTHON, FROM_TRL
from rlhf.utils.command_lines import command, script_words


def names_code(rules: Iterable[str]) -> list[str]:
    """Return the reward functions that are defined in a file of the user, FILE.py:NAME."""
    return [rule for rule in rules if ":" in rule and not rule.startswith((FROM_TRL, FROM_PYTHON))]


def code_words(rules: Iterable[str], evaluation: Iterable[str] = ()) -> list[str]:
    """Return the --reward-func and the --eval-func arguments, each if one of its functions is the user's code. Such
    code must be on the command line: a run folder alone never makes it run. For a function that was defined in Python,
    the argument is the form that the user must complete.

    Args:
        rules: the reward functions.
        evaluation: the evaluation functions.
    """
    named = {"--reward-func": rules, "--eval-func": evaluation}
    flags = {flag: [in_a_file(rule) for rule in found] for flag, found in named.items()}
    return [word for flag, words in flags.items() if names_code(words) for word in (flag, *words)]


def in_a_file(rule: str) -> str:
    """Return a reward function; for one that was defined in Python, the form that the user must complete. A lambda has
    no name that a file could define."""
    name = rule.removeprefix(FROM_PYTHON)
    return rule if name == rule else f"FILE.py:{name if name.isidentifier() else 'NAME'}"


def resume_command(config: Any, *more: str) -> str:
    """Return the command that resumes a run, or the runs of several seeds. All other settings are in run.json. `more`
    are additional arguments. A run that was started in Python is resumed there."""
    if config.in_python:
        return python_resume(*more)
    run = config.run
    code = code_words(config.reward.reward_func, config.reward.eval_func)
    return resume_line(config.algorithm, run.output, run.seeds, code, *more)


def python_resume(*more: str) -> str:
    """Return how to resume a run that was started in Python. `more` as in `resume_command`."""
    given = {"resume": "True"}
    values = (*more[1:], "--")
    for word, value in zip(more, values, strict=False):
        if word.startswith("--"):
            given[word[2:].replace("-", "_")] = "True" if value.startswith("--") else value
    keywords = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"make_config(..., {keywords}) and the same make_trainer(...)"


def resume_line(algorithm: str, output: str, seeds: Iterable[int] | None, code: Sequence[str], *more: str) -> str:
    """Return the command of `resume_command` from separate settings. `code` are the arguments of `code_words`."""
    each = [] if seeds is None else ["--seeds", *map(str, seeds)]
    words = ["--resume", *each, *more, *code, "--output", output]
    return command(*script_words(algorithm), *words)


def reward_model_command(config: Config) -> str:
    """Return the command that trains the reward model of a training run."""
    usual = usual_reward_config(config.recipe, config.user_file)
    m = config.model
    data = config.data
    layer = config.user_file if config.recipe == DEFAULT_RECIPE else find_recipe(config.recipe).training
    policy = merged(Config, [layer])
    words = _recipe_words(config.recipe)
    if m.rm_model != usual.training.rm_output:
        words += ["--rm-output", m.rm_model]
    if m.actor_model != policy["actor_model"][0]:
        words += ["--base-model", m.actor_model, "--actor-model", m.actor_model]
    if data.prompts not in (policy["prompts"][0], usual.data.pairs) and may_have_pairs(data.prompts, data.columns):
        words += ["--pairs", data.prompts, *_reading_words(data, usual.data)]
    if data.split != usual.data.split:
        words += flag_words("split", data.split)
    if data.plain_prompts != usual.data.plain_prompts:
        words += flag_words("plain_prompts", data.plain_prompts)
    return command(*script_words("reward-model"), *words)


def training_command(made: RewardModelConfig, usual: Config) -> str:
    """Return the command that trains a policy with a new reward model.

    Args:
        made: the configuration with which the reward model was trained.
        usual: the configuration that the training script uses without flags.
    """
    return command(*script_words(usual.algorithm), *training_words(made, usual))


def training_words(made: RewardModelConfig, usual: Config) -> list[str]:
    """Return the arguments of `training_command`."""
    data = made.data
    words = _recipe_words(made.recipe)
    if made.training.rm_output != usual.model.rm_model:
        words += ["--rm-model", made.training.rm_output]
    start = made.calibration.actor_model or made.training.base_model
    if start != usual.model.actor_model:
        words += ["--actor-model", start]
    if data.pairs != usual.data.prompts and data.pairs != usual_reward_config(made.recipe, made.user_file).data.pairs:
        words += ["--prompts", data.pairs, *_reading_words(data, usual.data)]
    usable = data.split is not None and data.split.rl > 0 and data.split.evaluation > 0  # for training
    if data.split != usual.data.split and (usable or data.split is None):
        words += flag_words("split", data.split)
    if data.plain_prompts != usual.data.plain_prompts:
        words += flag_words("plain_prompts", data.plain_prompts)
    return words


def _reading_words(data: Any, usual: Any) -> list[str]:
    """Return the arguments that describe how data is read, if they differ from those that a command uses without
    flags."""
    changed = [name for name in OF_THE_DATA if getattr(data, name) != getattr(usual, name)]
    return [word for name in changed for word in flag_words(name, getattr(data, name))]


def _recipe_words(recipe: str) -> list[str]:
    return [] if recipe == DEFAULT_RECIPE else ["--recipe", recipe]

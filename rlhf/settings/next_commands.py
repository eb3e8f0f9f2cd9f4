"""The commands that are printed for the user to type next. Imports no torch.

`config` is a training run's Config, or in `training_command` a RewardModelConfig.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhf.settings.fields import settings_of
from rlhf.settings.recipes import DEFAULT_RECIPE, find_recipe
from rlhf.settings.reward_model import RewardModelConfig, may_have_pairs, usual_reward_config
from rlhf.settings.training import Config
from rlhf.utils.system import command


def names_code(rules: Iterable[str]) -> list[str]:
    """Return those reward functions that are code in a file of the user, FILE.py:NAME."""
    return [rule for rule in rules if ":" in rule]


def code_words(rules: Iterable[str]) -> list[str]:
    """Return the words that name reward functions on a command line, if any of them is the user's code: code comes
    from the command line alone, never from a run's folder."""
    rules = list(rules)
    return ["--reward-func", *rules] if names_code(rules) else []


def resume_command(config: Any, *more: str) -> str:
    """Return the command that resumes a run, or several seeds. The other settings are in run.json. `more` are further
    words."""
    seeds = [] if config.run.seeds is None else ["--seeds", *map(str, config.run.seeds)]
    words = ["--resume", *seeds, *more, *code_words(config.reward.reward_func), "--output", config.run.output]
    return command("python", f"train_{config.algorithm}.py", *words)


def replay_command(algorithm: str, folder: str, rules: Iterable[str]) -> str:
    """Return the command that repeats a skipped update from its incident's folder."""
    return command("python", f"train_{algorithm}.py", "--replay", folder, *code_words(rules))


def reward_model_command(config: Config) -> str:
    """Return the command that makes the reward model which a training run asks for."""
    usual, m, data = usual_reward_config(config.recipe, config.user_file), config.model, config.data
    words = _recipe_words(config.recipe)
    if m.rm_model != usual.training.rm_output:
        words += ["--rm-output", m.rm_model]
    if m.actor_model != usual.training.base_model:
        words += ["--base-model", m.actor_model]
    if m.actor_model != usual.calibration.actor_model or m.actor_model != usual.training.base_model:
        words += ["--actor-model", m.actor_model]
    if data.prompts not in (_usual_prompts(config), usual.data.pairs) and may_have_pairs(data.prompts):
        words += ["--pairs", data.prompts]
    if data.split is not None and data.split != usual.data.split:
        words += ["--split", str(data.split)]
    if data.plain_prompts and not usual.data.plain_prompts:
        words += ["--plain-prompts"]
    return command("python", "-m", "reward_model.train", *words)


def _usual_prompts(config: Config) -> str:
    """The prompts of the recipe, to which its reward model's pairs belong."""
    return find_recipe(config.recipe).training.get("prompts", (settings_of(Config)["prompts"].default, ""))[0]


def training_command(made: RewardModelConfig, usual: Config) -> str:
    """Return the command that trains a policy with the reward model that was `made`; `usual` is what its script uses
    without further flags."""
    return command("python", f"train_{usual.algorithm}.py", *training_words(made, usual))


def training_words(made: RewardModelConfig, usual: Config) -> list[str]:
    """Return that command's arguments."""
    data, words = made.data, _recipe_words(made.recipe)
    if made.training.rm_output != usual.model.rm_model:
        words += ["--rm-model", made.training.rm_output]
    start = made.calibration.actor_model or made.training.base_model
    if start != usual.model.actor_model:
        words += ["--actor-model", start]
    if data.pairs != usual.data.prompts and data.pairs != usual_reward_config(made.recipe, made.user_file).data.pairs:
        words += ["--prompts", data.pairs]
    usable = data.split is not None and data.split.rl > 0 and data.split.evaluation > 0  # for training
    if usable and data.split != usual.data.split:
        words += ["--split", str(data.split)]
    if data.plain_prompts and not usual.data.plain_prompts:
        words += ["--plain-prompts"]
    return words


def _recipe_words(recipe: str) -> list[str]:
    return [] if recipe == DEFAULT_RECIPE else ["--recipe", recipe]


def flag_words(name: str, value: Any) -> list[str]:
    """Return the words that set one setting on a command line."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, tuple):
        return [flag, *map(str, value)]
    return [flag, "none" if value is None else str(value)]

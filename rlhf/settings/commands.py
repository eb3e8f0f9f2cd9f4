"""The commands that are printed for the user to type next. Imports no torch.

`config` is a config.Config, or in `training_command` a config.RewardModelConfig: config.py imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhf.settings.recipes import RECIPES
from rlhf.utils.system import command

DEFAULT = "smollm2-orca"


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


def reward_model_command(config: Any) -> str:
    """Return the command that makes the reward model which a training run asks for."""
    usual, m = RECIPES[config.recipe]["reward_model"], config.model
    words = _recipe_words(config.recipe)
    if m.rm_model != RECIPES[config.recipe]["training"]["rm_model"]:
        words += ["--rm-output", m.rm_model]
    if m.actor_model != usual["base_model"]:
        words += ["--base-model", m.actor_model, "--actor-model", m.actor_model]
    if config.data.prompts != RECIPES[config.recipe]["training"]["prompts"] and _may_have_pairs(config.data.prompts):
        words += ["--pairs", config.data.prompts]
    if config.data.split is not None and str(config.data.split) != usual.get("split"):
        words += ["--split", str(config.data.split)]
    if config.data.plain_prompts and not usual.get("plain_prompts"):
        words += ["--plain-prompts"]
    return command("python", "-m", "reward_model.train", *words)


def _may_have_pairs(source: str) -> bool:
    """Whether data can train a reward model, as far as its first row shows it; a hub dataset can."""
    file = Path(source).expanduser()
    if not file.is_file():
        return True
    with file.open(encoding="utf-8", errors="replace") as stream:
        return '"chosen"' in stream.readline()


def training_command(config: Any, script: str) -> str:
    """Return the command that trains a policy with the reward model that was just made."""
    return command("python", script, *training_words(config))


def training_words(config: Any) -> list[str]:
    """Return that command's arguments."""
    usual, data, made = RECIPES[config.recipe]["training"], config.data, config.training
    words = _recipe_words(config.recipe)
    if made.rm_output != usual["rm_model"]:
        words += ["--rm-model", made.rm_output]
    start = config.calibration.actor_model or made.base_model
    if start != usual["actor_model"]:
        words += ["--actor-model", start]
    if data.pairs != RECIPES[config.recipe]["reward_model"].get("pairs", RECIPES[DEFAULT]["reward_model"]["pairs"]):
        words += ["--prompts", data.pairs]
    usable = data.split is not None and data.split.rl > 0 and data.split.evaluation > 0  # for training
    if usable and str(data.split) != usual.get("split"):
        words += ["--split", str(data.split)]
    if data.plain_prompts and not usual.get("plain_prompts"):
        words += ["--plain-prompts"]
    return words


def _recipe_words(recipe: str) -> list[str]:
    return [] if recipe == DEFAULT else ["--recipe", recipe]


def flag_words(name: str, value: Any) -> list[str]:
    """Return the words that set one setting on a command line."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, tuple):
        return [flag, *map(str, value)]
    return [flag, "none" if value is None else str(value)]

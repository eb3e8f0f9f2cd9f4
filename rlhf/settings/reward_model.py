"""The settings of `python -m reward_model.train`. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.settings.fields import UNREADABLE, Layer, name_table, setting, settings_of
from rlhf.settings.flags import CommandLine
from rlhf.settings.merge import Command, build, read_given, show_help, values_of
from rlhf.settings.recipes import DEFAULT_RECIPE, find_recipe, shipped_recipes
from rlhf.settings.training import LARGEST_SEED, Config, SamplingSettings
from rlhf.settings.translate import translate
from rlhf.settings.types import Split
from rlhf.settings.user_file import edits_line, read_user_file


@dataclass(frozen=True)
class RewardDataSettings:
    """Where the pairs come from."""

    pairs: str = setting(
        "Intel/orca_dpo_pairs",
        "a JSONL file or a hub dataset",
        aliases=("prompts", "dataset"),
        brief="preference pairs: a JSONL file or a hub dataset",
    )
    split: Split | None = setting(
        None, "percent of questions for reward model / RL / evaluation; unset: 45/45/10", brief=True
    )
    plain_prompts: bool = setting(False, "read prompts as plain text, although the base model has a chat template")
    pair_length: int = setting(
        1024,
        "tokens; pairs with a longer side are left out and counted",
        ge=2,
        brief="tokens of prompt and completion at most",
    )


@dataclass(frozen=True)
class RewardTrainingSettings:
    """Bradley-Terry training of the reward model."""

    base_model: str = setting(
        "HuggingFaceTB/smollm2-135M-SFT-Only",
        "model that gets a score head: folder or hub name",
        brief="model that gets a score head: a folder or a hub name",
    )
    rm_output: str = setting(
        "./reward_model_output", "folder of the reward model", aliases=("output", "output_dir"), brief=True
    )
    rm_overwrite: bool = setting(
        False,
        "replace the reward model in the output folder",
        aliases=("overwrite",),
        brief="replace the reward model in that folder",
    )
    rm_learning_rate: float = setting(
        2e-5,
        "AdamW's learning rate at the start",
        gt=0,
        aliases=("learning_rate",),
        brief="learning rate at the start",
    )
    rm_epochs: float = setting(
        1.0, "passes over the pairs", gt=0, le=100_000, aliases=("epochs", "num_train_epochs"), brief=True
    )
    rm_batch_size: int = setting(8, "pairs per optimizer step", ge=1, aliases=("batch_size",), brief=True)
    rm_bf16: bool | None = setting(
        None, "bfloat16 autocast; unset: on a CUDA card that really has it", aliases=("bf16",)
    )
    rm_seed: int = setting(
        42, "order of the pairs and the new head", ge=0, le=LARGEST_SEED, aliases=("seed",), brief=True
    )


@dataclass(frozen=True)
class CalibrationSettings:
    """Replies on which the scores are brought to mean 0, variance 1."""

    actor_model: str | None = setting(
        "HuggingFaceTB/smollm2-135M-SFT-Only",
        "start model that writes the replies; none: the chosen replies",
        brief="start model whose completions calibrate the scores",
    )
    calibration_prompts: int = setting(128, "replies used at most", ge=2)
    calibration_prompt_length: int = setting(256, "tokens of a prompt at most", ge=1, aliases=("prompt_length",))


@dataclass(frozen=True)
class RewardModelConfig(Command):
    """All settings of `python -m reward_model.train`."""

    recipe: str = DEFAULT_RECIPE
    user_file: Layer = field(default_factory=dict, compare=False, repr=False)  # what config.py sets, used or not
    data: RewardDataSettings = field(default_factory=RewardDataSettings)
    training: RewardTrainingSettings = field(default_factory=RewardTrainingSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)


SHARED = settings_of(RewardModelConfig).keys() & settings_of(Config).keys()  # settings of training, too


LINE = CommandLine(
    RewardModelConfig,
    "python -m reward_model.train",
    "Trains a Bradley-Terry reward model from preference pairs.",
    (
        ("", "on the pairs of the default recipe"),
        ("--pairs FILE.jsonl --base-model MODEL", "on your pairs"),
        ("--recipe qwen3-tldr", "as another recipe trains it"),
    ),
    recipes=shipped_recipes(),
)


def parse_reward_cli(argv: Sequence[str] | None = None, user_file: Path | None = None) -> RewardModelConfig:
    """Return the configuration of `python -m reward_model.train`. Under the default recipe, the settings of
    `user_file` (config.py) that this command shares with training count, too. Raises UserError with all errors."""
    argv = sys.argv[1:] if argv is None else argv
    user = read_user_file(user_file, name_table(settings_of(Config)))

    show_help(LINE, argv, lambda recipe: (reward_layers(recipe, user), reward_file_line(user, recipe)))
    given = read_given(LINE, argv)
    layers = [*reward_layers(given.recipe, user, given.recipe_place), *given.layers]
    values = values_of(RewardModelConfig, layers, given.problems)
    return build(RewardModelConfig, values, recipe=given.recipe, user_file=user)


def reward_layers(recipe: str, user: Layer, where: str = "--recipe") -> list[Layer]:
    """Return the layers beneath a command line: the recipe's, or under the default recipe those settings of config.py
    that this command has, too. The policy's start model is then the reward model's, and its prompts are the pairs if
    they hold any."""
    if recipe != DEFAULT_RECIPE:
        return [find_recipe(recipe, where=where).reward_model_training]
    if UNREADABLE in user:
        return [user]
    known, _ = translate(user, settings_of(Config))
    shared = {name: found for name, found in known.items() if name in SHARED}
    if "actor_model" in known:
        shared["base_model"] = known["actor_model"]
    if "prompts" in known and may_have_pairs(str(known["prompts"][0])):
        shared["pairs"] = known["prompts"]
    return [shared]


def reward_file_line(user: Layer, recipe: str) -> str | None:
    """Return what config.py changes for this command, or that it is edited and not used because of the recipe."""
    layers = [reward_layers(DEFAULT_RECIPE, layer) for layer in ({}, user)]
    return edits_line(RewardModelConfig, *layers, None if recipe == DEFAULT_RECIPE else f"--recipe {recipe}")


def may_have_pairs(source: str) -> bool:
    """Whether data can train a reward model, as far as its first row shows it; a hub dataset can."""
    file = Path(source).expanduser()
    if not file.is_file():
        return True
    with file.open(encoding="utf-8", errors="replace") as stream:
        return '"chosen"' in stream.readline()


def usual_reward_config(recipe: str, user: Layer) -> RewardModelConfig:
    """Return what the command would use without flags."""
    return build(RewardModelConfig, values_of(RewardModelConfig, reward_layers(recipe, user)), recipe=recipe)

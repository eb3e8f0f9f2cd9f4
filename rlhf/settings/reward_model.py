"""The settings of `python -m reward_model.train`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rlhf.settings.fields import UNREADABLE, Layer, name_table, same_as, setting, settings_of
from rlhf.settings.flags import CommandLine
from rlhf.settings.merge import Command, build, read_command
from rlhf.settings.recipes import DEFAULT_RECIPE, find_recipe, shipped_recipes
from rlhf.settings.training import LARGEST_SEED, Config, DataSettings, SamplingSettings
from rlhf.settings.translate import translate
from rlhf.settings.types import JsonObject, PathName, Renaming, Split
from rlhf.settings.user_file import edits_line, read_user_file
from rlhf.settings.validate import renaming_problems
from rlhf.utils.errors import Problem
from rlhf.utils.paths import local_path


@dataclass(frozen=True)
class RewardDataSettings:
    """Data"""

    pairs: PathName = setting(
        "Intel/orca_dpo_pairs",
        "preference pairs: a file (JSONL, JSON, CSV, TSV, Parquet), a folder or a hub dataset",
        aliases=("prompts", "dataset", "dataset_name"),
        brief="preference pairs: a data file, a folder or a hub dataset",
    )
    split: Split | None = setting(
        None, "percent of the questions for reward model / RL / evaluation", unset="45/45/10", brief=True
    )
    dataset_config: str | None = same_as(DataSettings, "dataset_config")
    dataset_split: str | None = same_as(DataSettings, "dataset_split")
    columns: tuple[Renaming, ...] = same_as(DataSettings, "columns")
    skip_bad_rows: float | None = same_as(DataSettings, "skip_bad_rows")
    plain_prompts: bool = setting(False, "do not apply the base model's chat template to the prompts")
    chat_template_kwargs: JsonObject | None = same_as(DataSettings, "chat_template_kwargs")
    pair_length: int = setting(
        1024,
        "largest length of prompt and completion together, in tokens; longer pairs are skipped and counted",
        ge=2,
        brief="largest length of prompt and completion, in tokens",
    )


@dataclass(frozen=True)
class RewardTrainingSettings:
    """Training of the reward model (Bradley-Terry loss)"""

    base_model: PathName = setting(
        "HuggingFaceTB/smollm2-135M-SFT-Only",
        "model to start from, which gets a score head: a folder or a hub name",
        brief="model to start from: a folder or a hub name",
    )
    rm_output: PathName = setting(
        "./reward_model_output", "output folder of the reward model", aliases=("output", "output_dir"), brief=True
    )
    rm_overwrite: bool = setting(
        False,
        "use the output folder also if it has a reward model; the old one is moved to RM_OUTPUT_1 and so on",
        aliases=("overwrite",),
        brief="use that folder also if it has a reward model, which is moved",
    )
    rm_learning_rate: float = setting(
        2e-5,
        "largest learning rate of AdamW: it rises from 0 in the first 5% of the steps and then falls to 0 (cosine)",
        gt=0,
        aliases=("learning_rate",),
        brief="largest learning rate, after a short warm-up",
    )
    rm_epochs: float = setting(
        1.0, "passes over the pairs", gt=0, le=100_000, aliases=("epochs", "num_train_epochs"), brief=True
    )
    rm_batch_size: int = setting(8, "pairs per optimizer step", ge=1, aliases=("batch_size",), brief=True)
    rm_bf16: bool | None = setting(
        None, "bfloat16 autocast; unset: on for a GPU that computes in bfloat16, otherwise float32", aliases=("bf16",)
    )
    rm_seed: int = setting(
        42,
        "random seed of the order of the pairs and of the new head",
        ge=0,
        le=LARGEST_SEED,
        aliases=("seed",),
        brief=True,
    )


@dataclass(frozen=True)
class CalibrationSettings:
    """Calibration: scores get mean 0 and variance 1 on completions of the start model"""

    actor_model: PathName | None = setting(
        "HuggingFaceTB/smollm2-135M-SFT-Only",
        "start model that generates the completions for the calibration; none: the chosen completions are used",
        brief="start model, for the calibration of the scores",
    )
    calibration_prompts: int = setting(128, "largest number of completions for the calibration", ge=2)
    calibration_prompt_length: int = setting(
        256,
        "largest length of a prompt in the calibration, in tokens",
        ge=1,
        aliases=("prompt_length",),
        needs="actor_model",
    )


@dataclass(frozen=True)
class CalibrationSampling(SamplingSettings):
    """Sampling of the completions for the calibration"""

    OF_ALL: ClassVar = {"needs": "actor_model"}


@dataclass(frozen=True)
class RewardModelConfig(Command):
    """All settings of `python -m reward_model.train`."""

    recipe: str = DEFAULT_RECIPE
    user_file: Layer = field(default_factory=dict, compare=False, repr=False)  # settings in config.py, used or not
    data: RewardDataSettings = field(default_factory=RewardDataSettings)
    training: RewardTrainingSettings = field(default_factory=RewardTrainingSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    sampling: CalibrationSampling = field(default_factory=CalibrationSampling)

    def validate(self) -> list[Problem]:
        return renaming_problems(self.data.columns)


# settings that the training scripts have, too
LONGEST_FIRST_ROW = 2**16  # characters of a JSON array in which the column "chosen" is looked for
OF_THE_DATA = ("dataset_config", "dataset_split", "columns", "skip_bad_rows")  # they belong to one data source
SHARED = settings_of(RewardModelConfig).keys() & settings_of(Config).keys()


LINE = CommandLine(
    RewardModelConfig,
    "reward-model",
    "Trains a Bradley-Terry reward model from preference pairs.",
    (
        ("", "on the pairs of the default recipe"),
        ("--pairs FILE.jsonl --base-model MODEL", "on your pairs"),
        ("--recipe qwen3-tldr", "for another recipe"),
    ),
    recipes=shipped_recipes(),
)


def parse_reward_cli(argv: Sequence[str] | None = None, user_file: Path | None = None) -> RewardModelConfig:
    """Return the configuration of `python -m reward_model.train`. With the default recipe, settings in `user_file`
    (config.py) that this command shares with training are used, too. Raises UserError that lists all errors."""
    user = read_user_file(user_file, name_table(settings_of(Config)))

    def lower(recipe: str, place: str) -> list[Layer]:
        return reward_layers(recipe, user, place)

    given = read_command(LINE, argv, lower, partial(reward_file_line, user))
    layers = [*given.layers, given.file, given.flags]
    checks = (RewardModelConfig.validate,)
    top = {"recipe": given.recipe, "user_file": user}
    return build(RewardModelConfig, layers, given.problems, checks=checks, **top)


def reward_layers(recipe: str, user: Layer, where: str = "--recipe") -> list[Layer]:
    """Return the layers below the command line: the recipe's settings, or with the default recipe those settings of
    config.py that this command has, too. In the second case the policy's start model is also the reward model's base
    model, and the policy's prompts are used as pairs if they can be."""
    if recipe != DEFAULT_RECIPE:
        return [find_recipe(recipe, where).reward_model_training]
    if UNREADABLE in user:
        return [user]
    known, _ = translate(user, settings_of(Config))
    shared = {name: found for name, found in known.items() if name in SHARED}
    if "actor_model" in known:
        shared["base_model"] = known["actor_model"]
    if "prompts" in known and may_have_pairs(str(known["prompts"][0]), known.get("columns", ((), ""))[0]):
        shared["pairs"] = known["prompts"]
    else:  # these settings describe the prompts
        shared = {name: found for name, found in shared.items() if name not in OF_THE_DATA}
    return [shared]


def reward_file_line(user: Layer, recipe: str) -> str | None:
    """Return one line on what config.py changes for this command, or that the recipe makes config.py unused; None if
    config.py changes nothing."""
    unused_because = None if recipe == DEFAULT_RECIPE else f"--recipe {recipe}"
    return edits_line(RewardModelConfig, partial(reward_layers, DEFAULT_RECIPE), user, unused_because)


def may_have_pairs(source: str, columns: Any = ()) -> bool:
    """True if data may contain preference pairs: the beginning of a JSON or CSV file has the column "chosen", or the
    one that `columns` (the setting, as written) renames to it. Always True for data of other kinds."""
    file = Path(local_path(source))
    if not file.is_file() or file.suffix.lower() == ".parquet":
        return True
    words = [f"{new}={old}" for new, old in columns.items()] if isinstance(columns, dict) else columns
    words = words.split(",") if isinstance(words, str) else words
    name = dict(str(word).split("=", 1) for word in words if "=" in str(word)).get("chosen", "chosen")
    with file.open(encoding="utf-8", errors="replace") as stream:
        start = stream.readline()
        if start.lstrip("\ufeff \t").startswith("["):  # a JSON array: its first element may have several lines
            start += stream.read(LONGEST_FIRST_ROW)
    return (name if file.suffix.lower() in (".csv", ".tsv") else f'"{name}"') in start


def usual_reward_config(recipe: str, user: Layer) -> RewardModelConfig:
    """Return the configuration that the command uses without flags."""
    return build(RewardModelConfig, reward_layers(recipe, user), recipe=recipe)

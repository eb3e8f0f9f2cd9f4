"""The settings of `python -m reward_model.train`. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from rlhf.settings.fields import knob
from rlhf.settings.merge import resolve
from rlhf.settings.recipes import RECIPES
from rlhf.settings.training import LARGEST_SEED, Command, SamplingSettings
from rlhf.settings.types import Split


@dataclass(frozen=True)
class RewardDataSettings:
    """Where the pairs come from."""

    pairs: str = knob("Intel/orca_dpo_pairs", "a JSONL file or a hub dataset", aliases=("prompts", "dataset"))
    split: Split | None = knob(None, "percent of questions for reward model / RL / evaluation; unset: 45/45/10")
    plain_prompts: bool = knob(False, "read prompts as plain text, although the base model has a chat template")
    pair_length: int = knob(1024, "tokens; pairs with a longer side are left out and counted", low=2)


@dataclass(frozen=True)
class RewardTrainingSettings:
    """Bradley-Terry training of the reward model."""

    base_model: str = knob("HuggingFaceTB/smollm2-135M-SFT-Only", "model that gets a score head: folder or hub name")
    rm_output: str = knob("./reward_model_output", "folder of the reward model", aliases=("output", "output_dir"))
    rm_overwrite: bool = knob(False, "replace the reward model in the output folder", aliases=("overwrite",))
    rm_learning_rate: float = knob(2e-5, "AdamW's learning rate at the start", above=0, aliases=("learning_rate",))
    rm_epochs: float = knob(
        1.0, "passes over the pairs", above=0, high=100_000, aliases=("epochs", "num_train_epochs")
    )
    rm_batch_size: int = knob(8, "pairs per optimizer step", low=1, aliases=("batch_size",))
    rm_bf16: bool | None = knob(None, "bfloat16 autocast; unset: on a CUDA card that really has it", aliases=("bf16",))
    rm_seed: int = knob(42, "order of the pairs and the new head", low=0, high=LARGEST_SEED, aliases=("seed",))


@dataclass(frozen=True)
class CalibrationSettings:
    """Replies on which the scores are brought to mean 0, variance 1."""

    actor_model: str | None = knob(
        "HuggingFaceTB/smollm2-135M-SFT-Only", "start model that writes the replies; none: the chosen replies"
    )
    calibration_prompts: int = knob(128, "replies used at most", low=2)
    calibration_prompt_length: int = knob(256, "tokens of a prompt at most", low=1, aliases=("prompt_length",))


@dataclass(frozen=True)
class RewardModelConfig(Command):
    """Everything `python -m reward_model.train` can be told."""

    recipe: str = "smollm2-orca"
    data: RewardDataSettings = field(default_factory=RewardDataSettings)
    training: RewardTrainingSettings = field(default_factory=RewardTrainingSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)


def parse_reward_cli(argv: list[str] | None = None) -> RewardModelConfig:
    """The configuration of `python -m reward_model.train`. Raises UserError with all faults of the command line."""
    recipes = {name: recipe["reward_model"] for name, recipe in RECIPES.items()}
    argv = sys.argv[1:] if argv is None else argv
    return resolve(
        RewardModelConfig, recipes, argv, "python -m reward_model.train", "A Bradley-Terry reward model from pairs."
    )

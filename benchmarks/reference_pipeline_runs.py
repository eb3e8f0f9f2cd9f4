"""The training commands of benchmarks/reference_pipeline.py: RL with the recipe of the pipeline, and short runs of the
other reference recipes."""

from __future__ import annotations

import argparse
import os

from benchmarks.constants import ROOT, SEEDS
from benchmarks.real_smollm2 import Training
from benchmarks.reference_pipeline_data import MODEL, SPLIT, pairs_file

RECIPE = os.path.relpath(ROOT / "benchmarks" / "reference_pipeline.yaml")  # relative: JSON files have the command
ALL_WEIGHTS = ("--no-use-lora", "--learning-rate", "3e-5")
# kind -> algorithm, flags
KINDS = {
    "grpo": ("grpo", ()),
    "ppo": ("ppo", ()),
    "rloo": ("rloo", ()),
    "grpo_all_weights": ("grpo", ALL_WEIGHTS),
}
# kind -> name in the comparison
ARMS = {"grpo": "GRPO", "ppo": "PPO", "rloo": "RLOO", "grpo_all_weights": "GRPO all weights", "dpo": "DPO"}
# recipe -> algorithms, settings that are replaced in addition to those of all recipes
RECIPES = {
    "phased-kl": (("ppo", "grpo"), ()),
    "rank1-voice": (("ppo",), ("--steps-per-topic", "3")),
    "qwen3-tldr": (("ppo",), ("--no-plain-prompts", "--record-tokens")),
    "smollm2-orca": (("ppo",), ("--use-lora",)),
}
SHORT = (
    *("--actor-model", MODEL, "--allow-weak-reward-model", "--split", str(SPLIT), "--prompt-length", "64"),
    *("--max-new-tokens", "32", "--num-iterations", "6", "--eval-prompts", "32", "--eval-every", "3"),
)


def inputs(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the flags of the prompts, the reward model and the precision."""
    prompts = pairs_file(arguments.runs, "reward")
    model = arguments.runs / "reward_model"
    return "--prompts", str(prompts), "--rm-model", str(model), arguments.precision


def trainings(arguments: argparse.Namespace) -> list[Training]:
    """Return the RL runs, all kinds of the first seed first."""
    return [
        Training(f"{kind}_{seed}", kind, algorithm, seed, (*inputs(arguments), *flags))
        for seed in arguments.seeds
        for kind, (algorithm, flags) in KINDS.items()
        if kind != "grpo_all_weights" or seed == arguments.seeds[0]
    ]


def recipe_trainings(arguments: argparse.Namespace) -> list[tuple[str, Training]]:
    """Return one short run per reference recipe and algorithm, with the recipe's name."""
    common = (*SHORT, *inputs(arguments))
    return [
        (recipe, Training(f"recipe_{recipe}_{algorithm}", "recipe", algorithm, SEEDS[0], (*common, *flags)))
        for recipe, (algorithms, flags) in RECIPES.items()
        for algorithm in algorithms
    ]

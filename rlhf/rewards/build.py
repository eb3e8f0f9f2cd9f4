"""Builds the reward functions of a run from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.checkpoints.model_folder import find_model
from rlhf.data.prompts import PromptSets
from rlhf.models.device import autocast_dtype
from rlhf.rewards.checks import check_leaks, check_reward_context, check_reward_model, check_tokenizers
from rlhf.rewards.find import find_rule
from rlhf.rewards.functions import LearnedReward, RewardFunction
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards, name_of
from rlhf.settings.training import Config, function_name
from rlhf.settings.validate import name_problems
from rlhf.utils.console import Screen
from rlhf.utils.errors import raise_if


@dataclass
class RewardSources:
    """The reward model's folder and the reward functions of a run. The reward model is not loaded yet."""

    folder: str | None  # the reward model's folder; None: no reward model
    rules: list[RewardFunction | nn.Module]  # reward functions, from the settings or given in Python
    weights: Sequence[float] | None = None  # the reward model's first, if there is one; None: all 1


def find_rewards(config: Config) -> RewardSources:
    """Find the reward model and the reward functions of the settings. Raises UserError if one does not exist."""
    name, longest = config.model.rm_model, config.sampling.max_new_tokens
    return RewardSources(
        folder=find_model(name, "--rm-model") if name is not None else None,
        rules=[find_rule(rule, config.reward.keywords, longest=longest) for rule in config.reward.reward_func],
        weights=config.reward.reward_weights,
    )


def given_rewards(
    functions: Sequence[RewardFunction | nn.Module] | RewardFunction | nn.Module, weights: Sequence[float] | None
) -> RewardSources:
    """Return the sources for reward functions given in Python. They replace those of the settings."""
    return RewardSources(folder=None, rules=[functions] if callable(functions) else list(functions), weights=weights)


def find_eval_functions(config: Config) -> dict[str, RewardFunction | nn.Module]:
    """Find the evaluation functions of the settings, by their names in metrics. Raises UserError if one does not
    exist. Executes their files."""
    keywords, longest = config.reward.keywords, config.sampling.max_new_tokens
    return {function_name(rule): find_rule(rule, keywords, "--eval-func", longest) for rule in config.reward.eval_func}


def given_eval_functions(
    functions: Sequence[RewardFunction | nn.Module] | RewardFunction | nn.Module,
) -> dict[str, RewardFunction | nn.Module]:
    """Return evaluation functions given in Python, by their names in metrics. Raises UserError for a name that cannot
    be used."""
    given = [functions] if callable(functions) else list(functions)
    names = [name_of(f) for f in given]
    raise_if(name_problems(names, "eval_functions"))
    return dict(zip(names, given, strict=True))


def make_eval_functions(
    config: Config, functions: dict[str, RewardFunction | nn.Module], tokenizer: PreTrainedTokenizerBase
) -> Rewards | None:
    """Return evaluation functions with the time limit of reward functions; None if there are none."""
    if not functions:
        return None
    limit_s, names = config.reward.reward_timeout, list(functions)
    return Rewards(list(functions.values()), None, tokenizer, limit_s, names, kind="evaluation function")


def load_rewards(
    config: Config,
    sources: RewardSources,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptSets,
    device: torch.device,
    screen: Screen,
) -> tuple[Rewards, RewardModel | None]:
    """Load the rewards and check the reward model: context, accuracy, training questions, tokenizer.

    Returns the weighted rewards and the reward model (None without one).
    """
    m = config.model
    if sources.folder is not None:
        examples = [p.example for p in (*prompts.train, *prompts.evaluation)]
        check_reward_context(sources.folder, examples, config.sampling.max_new_tokens, f"--rm-model {m.rm_model}")
    rewards, model = make_rewards(config, sources, tokenizer, device)
    if model is not None:
        pairs = [p.example for p in prompts.evaluation]
        check_reward_model(model, m.rm_model, pairs, m.allow_weak_reward_model, screen)
        check_leaks(model, prompts, screen)
        check_tokenizers(model, m.rm_model, tokenizer, screen)
    return rewards, model


def make_rewards(
    config: Config, sources: RewardSources, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[Rewards, RewardModel | None]:
    """Load the rewards without checks. Returns the weighted rewards and the reward model (None without one)."""
    model = None
    if sources.folder is not None:
        model = RewardModel.load(sources.folder, device, autocast_dtype(config.model.bf16, device))
    learned = [LearnedReward(model)] if model is not None else []
    return Rewards([*learned, *sources.rules], sources.weights, tokenizer, config.reward.reward_timeout), model

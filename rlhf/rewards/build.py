"""Loads the reward model of a run, and combines it with the reward functions."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.data.prompts import PromptSets
from rlhf.models.device import autocast_dtype
from rlhf.rewards.checks import check_unrecorded
from rlhf.rewards.find import RewardSources
from rlhf.rewards.functions import LearnedReward, RewardFunction
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards
from rlhf.settings.training import Config
from rlhf.utils.console import Screen


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
    """Load the rewards, and check a reward model without a record on the held-out pairs.

    Returns the weighted rewards and the reward model (None without one).
    """
    m = config.model
    rewards, model = make_rewards(config, sources, tokenizer, device)
    if model is not None:
        pairs = [p.example for p in prompts.evaluation]
        check_unrecorded(model, m.rm_model, pairs, m.allow_weak_reward_model, screen)
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

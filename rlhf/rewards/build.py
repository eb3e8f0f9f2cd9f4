"""Loads the reward model of a run, and combines it with the reward functions. Imports TRL only for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.models.budget import budget_of
from rlhf.models.device import autocast_dtype
from rlhf.rewards.find import RewardSources
from rlhf.rewards.functions import LearnedReward
from rlhf.rewards.rewards import Rewards
from rlhf.settings.training import Config
from rlhf.utils.errors import UserError

if TYPE_CHECKING:
    from rlhf.rewards.reward_model import RewardModel


def make_rewards(
    config: Config,
    sources: RewardSources,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    date: str | None = None,
) -> tuple[Rewards, RewardModel | None]:
    """Load the rewards without checks. Returns the weighted rewards and the reward model (None without one). `date`:
    as in `load_tokenizer`. Raises UserError if nothing gives scores."""
    if sources.is_empty and config.model.teacher is None:
        raise UserError("no reward", "rewards", "Give a function or a reward model: --reward-func, --rm-model")
    model = None
    if sources.folder is not None:
        from rlhf.rewards.reward_model import RewardModel

        dtype = autocast_dtype(config.model.bf16, device)
        how = config.model.rm_text, date, config.data.chat_template_kwargs
        model = RewardModel.load(sources.folder, device, dtype, "--rm-model", *how)
        model.budget = budget_of(device, config)
    learned = [LearnedReward(model)] if model is not None else []
    return Rewards([*learned, *sources.rules], sources.weights, tokenizer, config.reward.reward_timeout), model

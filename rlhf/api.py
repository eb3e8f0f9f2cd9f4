"""From Python: a trainer from a configuration and a list of prompts, with one's own rewards and callbacks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rlhf.algorithms.kl_control import kl_controller
from rlhf.callbacks.kl import KLControl
from rlhf.data.examples import GivenPrompt
from rlhf.models.device import start_device
from rlhf.rewards.functions import RewardFunction
from rlhf.settings.training import Config
from rlhf.setup.build import build_trainer, load_components
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen

Prompts = Sequence[GivenPrompt]


def make_trainer(
    config: Config,
    prompts: Prompts,
    rewards: Sequence[RewardFunction | nn.Module] | None = None,
    reward_weights: Sequence[float] | None = None,
    callbacks: Sequence = (),
    evaluation_prompts: Prompts | None = None,
) -> OnPolicyLoop:
    """Return a trainer of `config.algorithm`, ready to `train()`, `evaluate()`, `save_model(folder)`,
    `load_model(folder)`. Length and seed are the settings'. Nothing is written before `save_model`. Raises UserError.

    Args:
        prompts: texts, chats of {"role", "content"}, or rows as in a data file (`topic` among their columns).
        rewards: replace the reward model and the rules of the settings.
        reward_weights: one for each of `rewards`; None: all 1.
        callbacks: objects with some methods of rlhf.callbacks.base.Callback, or functions of (epoch, metrics).
        evaluation_prompts: None: a tenth of the prompts is held out, by the hash of the question. Of fewer than 20
            prompts none is held out, and the training prompts serve.
    """
    screen = Screen()
    device = start_device(screen, config.run.deterministic)
    components = load_components(config, device, screen, prompts, evaluation_prompts, rewards, reward_weights)
    trainer = build_trainer(config, components)
    if config.kl.steered:
        controller = kl_controller(config, trainer.updates)
        trainer.add_callback(KLControl(controller, trainer.set_kl_coef, config.episodes_per_update))
    for callback in callbacks:  # after control: what they set is what the next update has
        trainer.add_callback(callback)
    return trainer

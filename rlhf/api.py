"""Python API: builds a trainer from a configuration, prompts, and custom rewards and callbacks."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.distributed.join import use_own_gpu

use_own_gpu()  # before bitsandbytes is imported, which initializes CUDA

from torch import nn

from rlhf.algorithms.kl_control import kl_controller
from rlhf.callbacks.kl import KLControl
from rlhf.callbacks.trackers import Trackers
from rlhf.data.examples import GivenPrompt
from rlhf.models.device import start_device
from rlhf.rewards.functions import RewardFunction
from rlhf.run.figures import results_of
from rlhf.settings.training import Config
from rlhf.setup.build import build_trainer, load_models
from rlhf.setup.fit import fit
from rlhf.setup.load_inputs import load_inputs
from rlhf.setup.pass_rates import keep_by_pass_rate
from rlhf.setup.scan import Scan, scan_prompts
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen
from rlhf.utils.requirements import check_trackers

Prompts = Sequence[GivenPrompt]


def make_trainer(
    config: Config,
    prompts: Prompts,
    rewards: Sequence[RewardFunction | nn.Module] | None = None,
    reward_weights: Sequence[float] | None = None,
    callbacks: Sequence = (),
    evaluation_prompts: Prompts | None = None,
    eval_functions: Sequence[RewardFunction | nn.Module] | None = None,
) -> OnPolicyLoop:
    """Return a trainer of `config.algorithm`, with the methods `train()`, `evaluate()`, `save_model(folder)` and
    `load_model(folder)`. The run length and the seed come from `config`. Only `save_model` writes files. Raises
    UserError.

    Args:
        prompts: texts, chats (lists of {"role", "content"}), or rows as in a data file.
        rewards: reward functions or modules, used instead of the reward model and reward functions in `config`.
        reward_weights: one weight for each of `rewards`; None: all 1.
        callbacks: objects with methods of rlhf.callbacks.base.Callback, or functions of (epoch, metrics).
        evaluation_prompts: None: 10% of the prompts are held out, selected by the hash of the question; if there are
            fewer than 20 prompts, the training prompts are also used for evaluation.
        eval_functions: functions with the signature of reward functions, used instead of --eval-func in `config`:
            metrics eval/NAME of every evaluation, which training never sees.
    """
    check_trackers(config.record.report_to or ())
    screen = Screen()
    device = start_device(screen, config.run.deterministic)
    inputs = load_inputs(config, screen, prompts, evaluation_prompts, rewards, reward_weights, eval_functions)
    config = fit(config, inputs, device, screen)
    components = load_models(config, inputs, device, screen)
    components, _ = keep_by_pass_rate(config, components, screen)
    trainer = build_trainer(config, components)
    if config.kl.steered:
        controller = kl_controller(config, trainer.updates)
        held = config.critic.critic_warmup
        trainer.add_callback(KLControl(controller, trainer.set_kl_coef, config.episodes_per_update, held))
    if config.record.report_to is not None:
        trainer.add_callback(Trackers(config, screen, results=lambda: results_of(trainer)))
    for callback in callbacks:  # after KLControl, so that a beta which they set is not overwritten
        trainer.add_callback(callback)
    return trainer


def scan(
    config: Config,
    prompts: Prompts,
    rewards: Sequence[RewardFunction | nn.Module] | None = None,
    reward_weights: Sequence[float] | None = None,
) -> Scan:
    """Return what can be learned from the training prompts, as --scan prints it: figures of all prompts and of each
    topic, and recommended settings. Trains and writes nothing. Raises UserError. The arguments are those of
    `make_trainer`."""
    screen = Screen()
    device = start_device(screen, config.run.deterministic)
    inputs = load_inputs(config, screen, prompts, None, rewards, reward_weights)
    config = fit(config, inputs, device, screen)
    components = load_models(config, inputs, device, screen)
    return scan_prompts(config, components, screen)

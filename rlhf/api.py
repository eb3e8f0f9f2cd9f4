"""From Python: a trainer from a configuration and a list of prompts, with one's own rewards and callbacks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from config import Config
from rlhf.algorithms.kl_control import kl_controller
from rlhf.callbacks.kl import KLControl
from rlhf.data.examples import GivenPrompt, examples_of
from rlhf.data.prompts import FEW_PROMPTS, render_sets
from rlhf.data.splits import split_examples
from rlhf.models.device import start_device
from rlhf.rewards.build import find_rewards, load_rewards
from rlhf.rewards.functions import RewardFunction
from rlhf.rewards.rewards import Rewards, check_columns
from rlhf.settings.types import Split
from rlhf.setup.build import find_start_model, load_start_policy
from rlhf.setup.input_checks import check_overlap, check_prompts, check_topics
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError

Prompts = Sequence[GivenPrompt]


def make_trainer(
    config: Config,
    prompts: Prompts,
    rewards: Sequence[RewardFunction | nn.Module] | None = None,
    reward_weights: Sequence[float] | None = None,
    callbacks: Sequence = (),
    evaluation_prompts: Prompts | None = None,
) -> OnPolicyLoop:
    """A trainer of `config.algorithm`, ready to `train()`, `evaluate()`, `save_model(folder)`, `load_model(folder)`.

    Prompts are texts, chats of {"role", "content"}, or rows as in a data file (`topic` among their columns).
    `rewards`, with a weight for each, take the place of the
    configuration's reward model and rules. Length and seed are the configuration's; nothing is written before
    `save_model`. `callbacks` are objects with some methods of rlhf.callbacks.base.Callback, or functions of (epoch,
    metrics). Without `evaluation_prompts` a tenth of the prompts is held out, by the hash of the question; of fewer
    than 20 none is, and the training prompts serve. Raises UserError.
    """
    screen = Screen()
    device = start_device(screen, config.run.deterministic)
    start = find_start_model(config, "actor_model")
    tokenizer = start.tokenizer
    topics = config.data.steps_per_topic is not None
    train = examples_of(prompts, topics)
    if not train:
        raise UserError("an empty list: prompts. Give texts, or chats")
    if evaluation_prompts is None:
        parts = split_examples(train, Split(0, 90, 10))
        split = len(train) >= FEW_PROMPTS and parts["rl"] and parts["evaluation"]
        train, evaluation = (parts["rl"], parts["evaluation"]) if split else (train, train)
    else:
        evaluation = examples_of(evaluation_prompts)
    sets = render_sets(tokenizer, train, evaluation, config.data.prompt_length, topics)
    if not sets.train or not sets.evaluation:
        raise UserError(f"no prompt of at most {config.data.prompt_length} tokens: prompts. Raise prompt_length")
    check_prompts(sets, start, config.sampling.reply_length, "prompts", screen, config.data.plain_prompts)
    check_overlap(sets, screen)
    check_topics(config, sets.train, screen)
    used = [p.example for p in (*sets.train, *sets.evaluation)]
    if rewards is None:
        sources = find_rewards(config)
        check_columns(sources.rules, used, "prompts")
        chosen, _ = load_rewards(config, sources, tokenizer, sets, device, screen)
    else:
        functions = [rewards] if callable(rewards) else rewards
        check_columns(functions, used, "prompts")
        chosen = Rewards(functions, reward_weights, tokenizer, config.reward.reward_timeout)
    trainer = OnPolicyLoop(
        config,
        load_start_policy(config, start.folder, tokenizer, device),
        tokenizer,
        sets.train,
        sets.evaluation[: config.data.eval_prompts],
        chosen,
    )
    if config.kl.steered:
        controller = kl_controller(config, trainer.updates)
        trainer.add_callback(KLControl(controller, trainer.set_kl_coef, config.episodes_per_update))
    for callback in callbacks:  # after control: what they set is what the next update has
        trainer.add_callback(callback)
    return trainer

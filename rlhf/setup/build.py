"""Builds a trainer from the settings: `load_components` loads data, models and rewards, `build_trainer` the trainer.

The scripts, the Python API, the benchmarks and the tests build their trainers here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.checkpoints.model_folder import find_model
from rlhf.data.examples import GivenPrompt
from rlhf.data.prompts import FEW_PROMPTS, PromptSets, Selection, given_prompts, load_prompts
from rlhf.data.sampler import PromptSampler
from rlhf.demo.checker_parts import prepare_checker
from rlhf.demo.parts import prepare_demo
from rlhf.models.device import autocast_dtype, memory_in_use, reset_peak_memory
from rlhf.models.load import check_policy, context_of, load_policy, load_tokenizer, lora_modules
from rlhf.models.logprobs import base_of
from rlhf.rewards.build import (
    RewardSources,
    find_eval_functions,
    find_rewards,
    given_eval_functions,
    given_rewards,
    load_rewards,
    make_eval_functions,
)
from rlhf.rewards.checks import check_critic
from rlhf.rewards.functions import RewardFunction
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards, check_columns
from rlhf.rollout.engine import check_engine
from rlhf.rollout.vllm import require_vllm
from rlhf.settings.training import Config
from rlhf.setup.input_checks import (
    StartModel,
    check_overlap,
    check_prompts,
    check_topics,
)
from rlhf.setup.inputs import check_fills_a_batch, check_warmup
from rlhf.trainer.evaluation import text_of_file
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.trl_host import check_optimizer
from rlhf.utils.console import Screen


def prepare_demo_components(config: Config, screen: Screen, device: torch.device) -> None:
    """With the recipe of a demo, make its start model, its prompts and its reward model if they do not exist yet."""
    if config.recipe == "demo":
        prepare_demo(screen, device)
    elif config.recipe == "demo-checker":
        prepare_checker(screen)


@dataclass
class Components:
    """The parts that a trainer is built from."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSets
    reward_model: RewardModel | None
    rewards: Rewards
    policy: torch.nn.Module
    memory_before: int  # bytes in use before any of this was loaded
    eval_functions: Rewards | None = None  # evaluation functions; None: there are none


def load_components(
    config: Config,
    device: torch.device,
    screen: Screen,
    prompts: Sequence[GivenPrompt] | None = None,
    evaluation_prompts: Sequence[GivenPrompt] | None = None,
    rewards: Sequence[RewardFunction | nn.Module] | None = None,
    reward_weights: Sequence[float] | None = None,
    eval_functions: Sequence[RewardFunction | nn.Module] | None = None,
    selection: Selection | None = None,
) -> Components:
    """Load and check the parts of the run that the settings describe. Raises UserError.

    Data is loaded before models, and small models before large ones, so that errors are found before the slow work.

    Args:
        config: the settings of the run.
        device: where the models are loaded.
        screen: prints notes and warnings.
        prompts: training prompts given in Python. None: use the prompts of the settings.
        evaluation_prompts: evaluation prompts, only with `prompts`. None: hold out a part of `prompts`.
        rewards: one or several functions or modules. They replace the settings' reward model and functions.
        reward_weights: one weight per entry of `rewards`. None: all weights are 1.
        eval_functions: evaluation functions. They replace those of the settings.
        selection: the rows of the settings' data, if they were read already.
    """
    autocast_dtype(config.model.bf16, device)  # raises UserError if the device has no bfloat16
    reset_peak_memory(device)
    before = 0 if device.type == "cuda" else memory_in_use(device)
    if config.speed.rollout_engine == "vllm":
        require_vllm()
    check_optimizer(config)
    sources = find_rewards(config) if rewards is None else given_rewards(rewards, reward_weights)
    watched = find_eval_functions(config) if eval_functions is None else given_eval_functions(eval_functions)
    start = find_start_model(config, "--actor-model" if prompts is None else "actor_model")
    tokenizer = start.tokenizer
    if config.data.eval_text is not None:
        text_of_file(tokenizer, config.data.eval_text)
    sets = _load_prompt_sets(config, start, sources, screen, prompts, evaluation_prompts, selection)
    held_out, kind = [p.example for p in sets.evaluation], "evaluation function"
    check_columns(list(watched.values()), held_out, "the evaluation prompts", screen.say, kind)
    chosen, reward_model = load_rewards(config, sources, tokenizer, sets, device, screen)
    policy = load_start_policy(config, start.folder, tokenizer, device)
    check_engine(config.speed.rollout_engine, policy, device)
    if config.critic_from_reward_model:
        check_critic(reward_model, config.model.rm_model, base_of(policy), tokenizer, sets, config.speed.packed)
    evaluated = make_eval_functions(config, watched, tokenizer)
    return Components(tokenizer, sets, reward_model, chosen, policy, before, evaluated)


def build_trainer(config: Config, components: Components, callbacks: Sequence = ()) -> OnPolicyLoop:
    """Return a trainer for `config.algorithm` with exactly these callbacks."""
    trainer = OnPolicyLoop(
        config,
        policy=components.policy,
        tokenizer=components.tokenizer,
        train=components.prompts.train,
        evaluation=components.prompts.evaluation,
        rewards=components.rewards,
        callbacks=callbacks,
    )
    if components.eval_functions is not None:
        trainer.evaluator.add_functions(components.eval_functions)
    return trainer


def _load_prompt_sets(
    config: Config,
    start: StartModel,
    sources: RewardSources,
    screen: Screen,
    prompts: Sequence[GivenPrompt] | None,
    evaluation_prompts: Sequence[GivenPrompt] | None,
    selection: Selection | None = None,
) -> PromptSets:
    """Return the prompts given in Python or those of the settings, checked against the start model and the rewards."""
    data, room = config.data, start.context and max(0, start.context - config.sampling.max_new_tokens)
    if prompts is None:
        source = f"--prompts {data.prompts}"
        sets = load_prompts(data, start.tokenizer, screen.say, room=room, selection=selection)
        check_fills_a_batch(config, len(sets.train))
    else:
        source, sets = "prompts", given_prompts(data, start.tokenizer, prompts, evaluation_prompts, screen.say, room)
    check_prompts(sets, start, config.sampling.max_new_tokens, source, screen, data.plain_prompts)
    check_overlap(sets, screen)
    check_topics(config, sets.train, screen)
    check_warmup(config, PromptSampler(config, sets.train).updates)
    check_columns(sources.rules, [p.example for p in (*sets.train, *sets.evaluation)], source, screen.say)
    if prompts is None and len(sets.evaluation) < FEW_PROMPTS:
        screen.say(
            f"note: there are only {len(sets.evaluation)} evaluation prompts. All of them are used, and evaluation "
            "results are uncertain"
        )
    return sets


def find_start_model(config: Config, flag: str) -> StartModel:
    """Find the start model, load its tokenizer and check its config. Does not read the weights. Raises UserError."""
    m = config.model
    folder = find_model(m.actor_model, flag)
    tokenizer = load_tokenizer(folder, config.data.plain_prompts)
    found = check_policy(folder, len(tokenizer), m.lora_targets if m.use_lora else ())
    return StartModel(m.actor_model, folder, tokenizer, context_of(found))


def load_start_policy(config: Config, start: str, tokenizer: PreTrainedTokenizerBase, device: torch.device):
    """Load the start model for training: with all weights trainable, or with LoRA adapters (the base may be 4-bit)."""
    m = config.model
    lora = LoraConfig(
        r=m.lora_r, lora_alpha=m.lora_alpha, lora_dropout=m.lora_dropout, target_modules=lora_modules(m.lora_targets),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(config.run.seed)  # peft initialises adapters with torch's global generator
    return load_policy(
        start,
        lora=lora if m.use_lora else None,
        load_in_4bit=m.load_in_4bit,
        dtype=autocast_dtype(m.bf16, device),
        gradient_checkpointing=m.gradient_checkpointing,
        device=device,
        vocabulary=len(tokenizer),
    )

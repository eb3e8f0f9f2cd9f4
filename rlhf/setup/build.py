"""From the settings to the parts of a run: data, models, rewards. Cheap checks come before slow loading."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase

from config import Config
from rlhf.data.prompts import FEW_PROMPTS, PromptSets, load_prompts
from rlhf.demo.parts import prepare_demo
from rlhf.models.device import autocast_dtype, memory_in_use, reset_peak_memory
from rlhf.models.load import check_policy, context_of, find_model, load_policy, load_tokenizer, lora_modules
from rlhf.rewards.build import find_rewards, load_rewards
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards, check_columns
from rlhf.rollout.engine import check_engine
from rlhf.rollout.vllm import require_vllm
from rlhf.setup.input_checks import StartModel, check_prompts, check_topics
from rlhf.trainer.evaluation import text_of_file
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError


def prepare_demo_parts(config: Config, screen: Screen, device: torch.device) -> None:
    """Under the demo recipe: build its start model, pairs and reward model where they are not there yet."""
    if config.recipe == "demo":
        prepare_demo(screen, device)


@dataclass
class Parts:
    """What a trainer is built from."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSets
    reward_model: RewardModel | None
    rewards: Rewards
    policy: torch.nn.Module
    memory_before: int  # bytes in use before any of this was loaded

    @property
    def for_trainer(self) -> dict:
        """As the trainers' arguments."""
        return {
            "policy": self.policy,
            "tokenizer": self.tokenizer,
            "train": self.prompts.train,
            "evaluation": self.prompts.evaluation,
            "rewards": self.rewards,
        }


def load_parts(config: Config, device: torch.device, screen: Screen) -> Parts:
    """Data before models, small models before large: a fault is said before anything slow is done for nothing."""
    d = config.data
    autocast_dtype(config.model.bf16, device)  # whether the device has what is asked for
    reset_peak_memory(device)
    before = memory_in_use(device)
    if config.speed.rollout_engine == "vllm":
        require_vllm()
    sources = find_rewards(config)
    start = find_start_model(config, "--actor-model")
    tokenizer = start.tokenizer
    if d.eval_text is not None:
        text_of_file(tokenizer, d.eval_text)
    prompts = load_prompts(
        d.prompts, tokenizer, d.split, d.prompt_length, d.max_prompts, d.eval_prompts, screen.say,
        topics=d.steps_per_topic is not None,
    )  # fmt: skip
    if len(prompts.train) < config.batch.batch_size:  # the same ones, repeated, would fill it
        raise UserError(
            f"{len(prompts.train)} prompts to train on, fewer than a batch of {config.batch.batch_size}: --prompts "
            f"{d.prompts}. Give more (--prompts, --split, --max-prompts), or a smaller --batch-size"
        )
    check_prompts(prompts, start, config.sampling.reply_length, f"--prompts {d.prompts}", screen, d.plain_prompts)
    check_topics(config, prompts.train, screen)
    used = [p.example for p in (*prompts.train, *prompts.evaluation)]
    check_columns(sources.rules, used, f"--prompts {d.prompts}")
    if len(prompts.evaluation) < FEW_PROMPTS:
        screen.say(
            f"only {len(prompts.evaluation)} evaluation prompts: all of them are used, and figures are uncertain"
        )
    rewards, reward_model = load_rewards(config, sources, tokenizer, prompts, device, screen)
    policy = load_start_policy(config, start.folder, tokenizer, device)
    check_engine(config.speed.rollout_engine, policy, device)
    return Parts(tokenizer, prompts, reward_model, rewards, policy, before)


def find_start_model(config: Config, flag: str) -> StartModel:
    """The start model, found and checked: all that can be known of it before its weights are read."""
    m = config.model
    folder = find_model(m.actor_model, flag)
    tokenizer = load_tokenizer(folder, config.data.plain_prompts)
    found = check_policy(folder, len(tokenizer), m.lora_targets if m.use_lora else ())
    return StartModel(m.actor_model, folder, tokenizer, context_of(found))


def load_start_policy(config: Config, start: str, tokenizer: PreTrainedTokenizerBase, device: torch.device):
    """The start model as the settings want it trained: whole, or with adapters, perhaps over 4-bit weights."""
    m = config.model
    lora = LoraConfig(
        r=m.lora_r, lora_alpha=m.lora_alpha, lora_dropout=m.lora_dropout, target_modules=lora_modules(m.lora_targets),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(config.run.seed)  # adapters are drawn from torch's own stream
    return load_policy(
        start,
        lora=lora if m.use_lora else None,
        load_in_4bit=m.load_in_4bit,
        dtype=autocast_dtype(m.bf16, device),
        gradient_checkpointing=m.gradient_checkpointing,
        device=device,
        vocabulary=len(tokenizer),
    )

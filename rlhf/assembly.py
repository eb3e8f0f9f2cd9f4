"""From a Config to the parts of a run. What both training scripts share, in the order in which faults are cheap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase

from config import Config
from rlhf.checkpoints.run_folder import check_output, claim_output, require_run, require_unused
from rlhf.checkpoints.run_record import RunLog
from rlhf.data.prompts import PromptSets, fingerprint, load_prompts, topics_fingerprint
from rlhf.demo.parts import prepare_demo
from rlhf.inputs import inputs_of
from rlhf.models.device import autocast_dtype, memory_in_use, reset_peak_memory
from rlhf.models.load import check_policy, context_of, find_model, load_policy, load_tokenizer, lora_modules
from rlhf.preflight import StartModel, check_prompts, check_topics
from rlhf.resume import budget, check_same_run
from rlhf.rewards.build import find_rewards, load_rewards
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards, check_columns
from rlhf.rollout.engine import check_engine
from rlhf.rollout.vllm import require_vllm
from rlhf.settings.fields import as_plain
from rlhf.trainer.evaluation import text_of_file
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.files import files_print
from rlhf.utils.hub import is_on_hub
from rlhf.utils.paths import check_inputs_outside

FEW_PROMPTS = 20


def _placing(config: Config) -> dict:
    is_default = Path(config.run.output) == Path(f"./{config.algorithm}_training_output")
    return {"overwrite": config.run.overwrite, "is_default": is_default}


def check_run_folder(config: Config) -> None:
    """Refuse, before anything is loaded, an output folder that holds what a new run may not touch."""
    if config.run.dry_run:
        return
    if config.run.resume:
        return require_unused(Path(config.run.output))
    check_output(Path(config.run.output), **_placing(config))
    check_inputs_outside(config.run.output, inputs_of(config), "--output")


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


def start_run(config: Config, parts: Parts, updates: int, screen: Screen) -> RunLog:
    """Claim the output folder and open run.json, which says "failed" unless the run comes to its end. With --resume,
    go on with the one that is there; raises UserError where its data were others."""
    data = {
        "train_prompts": len(parts.prompts.train),
        "evaluation_prompts": len(parts.prompts.evaluation),
        "too_long": parts.prompts.too_long,
        "train_sha256": fingerprint(parts.prompts.train),
        "evaluation_sha256": fingerprint(parts.prompts.evaluation),
        "start_model": files_print(config.model.actor_model, "*.safetensors"),
        "reward_model": files_print(config.model.rm_model, "*.safetensors"),
        "rules": {rule: files_print(rule.rpartition(":")[0], "") for rule in config.reward.reward_func},
    }
    if config.data.steps_per_topic is not None:
        data["topics_sha256"] = topics_fingerprint(parts.prompts.train)
    if config.run.resume:
        folder = Path(config.run.output)
        before = require_run(folder, "--resume, --output")["data"]
        known = before.keys() & data.keys()
        changed = [f"{n} was {before[n]}, is {data[n]}" for n in data if n in known and before[n] != data[n]]
        check_same_run(config, changed, screen)
        return RunLog(folder, resume=True)
    held, moved = claim_output(Path(config.run.output), **_placing(config))
    if moved:
        screen.say(moved)
    return RunLog(
        Path(config.run.output),
        held,
        algorithm=config.algorithm,
        settings=as_plain(config),
        seed=config.run.seed,
        data=data,
        plan=budget(config, updates),
        prompts={"rows": parts.prompts.rows, "split": str(parts.prompts.split)},
        on_hub=[name for name in (config.model.actor_model, config.data.prompts) if is_on_hub(name)],
    )

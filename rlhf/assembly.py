"""From a Config to the parts of a run. What both training scripts share, in the order in which faults are cheap."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase

from config import Config, RunSettings
from recipes import RECIPES
from reward_model.scorer import RewardModel
from rlhf.console import Screen
from rlhf.demo.parts import prepare_demo
from rlhf.demo.tasks import gold_quality
from rlhf.errors import UserError
from rlhf.knobs import as_plain
from rlhf.models import autocast_dtype, find_model, load_policy, load_tokenizer
from rlhf.preflight import check_leaks, check_reward_model
from rlhf.prompts import Prompt, PromptSets, load_prompts
from rlhf.report import compare, last_kl, show_figures, show_samples
from rlhf.rewards import LearnedReward
from rlhf.runlogs import RunLog, check_output, claim_output

FEW_PROMPTS = 20


def _placing(config: Config) -> dict:
    return {"overwrite": config.run.overwrite, "is_default": Path(config.run.output) == Path(RunSettings().output)}


def check_run_folder(config: Config) -> None:
    """Refuse, before anything is loaded, an output folder that holds what a new run may not touch."""
    if config.run.dry_run:
        return
    check_output(Path(config.run.output), **_placing(config))
    output = Path(config.run.output).resolve()
    for flag, name in (("--actor-model", config.model.actor_model), ("--rm-model", config.model.rm_model)):
        if output in (Path(name).resolve(), *Path(name).resolve().parents):
            raise UserError(f"the output folder holds the model to start from: {flag} {name}. Name another --output")


def prepare_demo_parts(config: Config, screen: Screen, device: torch.device) -> None:
    """Under the demo recipe: build its start model, pairs and reward model where they are not there yet."""
    if config.recipe == "demo":
        prepare_demo(screen, device)


@dataclass
class Parts:
    """What a trainer is built from."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSets
    reward_model: RewardModel
    policy: torch.nn.Module

    @property
    def reward_functions(self) -> list:
        return [LearnedReward(self.reward_model)]


def load_parts(config: Config, device: torch.device, screen: Screen) -> Parts:
    """Data before models, small models before large: a fault is said before anything slow is done for nothing."""
    m, d = config.model, config.data
    start, reward_name = find_model(m.actor_model, "--actor-model"), find_model(m.rm_model, "--rm-model")
    tokenizer = load_tokenizer(start)
    prompts = load_prompts(d.prompts, tokenizer, d.split, d.prompt_length, d.max_prompts, d.eval_prompts, screen.say)
    if len(prompts.evaluation) < FEW_PROMPTS:
        screen.say(
            f"only {len(prompts.evaluation)} evaluation prompts: all of them are used, and figures are uncertain"
        )
    reward_model = RewardModel.load(reward_name, device, autocast_dtype(m.bf16, device))
    check_reward_model(
        reward_model, m.rm_model, [p.example for p in prompts.evaluation], m.allow_weak_reward_model, screen
    )
    check_leaks(reward_model, prompts, screen)
    lora = LoraConfig(r=m.lora_r, lora_alpha=m.lora_alpha, target_modules=list(m.lora_targets), task_type="CAUSAL_LM")
    torch.manual_seed(config.run.seed)  # adapters are drawn from torch's own stream
    policy = load_policy(
        start,
        lora=lora if m.use_lora else None,
        load_in_4bit=m.load_in_4bit,
        dtype=autocast_dtype(m.bf16, device),
        gradient_checkpointing=m.gradient_checkpointing,
        device=device,
        vocabulary=len(tokenizer),
    )
    return Parts(tokenizer, prompts, reward_model, policy)


def show_plan(config: Config, parts: Parts, updates: int, device: torch.device, screen: Screen) -> None:
    """What is about to happen, in numbers."""
    m, p, sets = config.model, config.ppo, parts.prompts
    trained = sum(w.numel() for w in parts.policy.parameters() if w.requires_grad)
    total = sum(w.numel() for w in parts.policy.parameters())
    how = f"LoRA r {m.lora_r}: {trained:,} trained" if m.use_lora else "all trained"
    dtype = autocast_dtype(m.bf16, device)
    accuracy = (parts.reward_model.record or {}).get("accuracy")
    rows = [
        ("recipe", config.recipe),
        ("start model", f"{m.actor_model} ({total:,} parameters, {how})"),
        ("reward model", m.rm_model + (f" (held-out accuracy {accuracy:.3f})" if accuracy is not None else "")),
        ("prompts", prompts_line(sets)),
        ("budget", budget_line(config, updates)),
        ("batch", f"{p.batch_size} prompts in {p.minibatches} minibatches, {p.ppo_epochs} passes over each rollout"),
        (
            "KL",
            f"{config.kl.kl_schedule}, target {', '.join(map(str, config.kl.kl_target))}, beta {config.kl.kl_coef}",
        ),
        ("device", f"{device}, {'bfloat16 autocast' if dtype is not None else 'float32'}"),
        ("output", config.run.output),
    ]
    screen.facts(rows)
    screen.say(f"first prompt, as the model reads it: {first_prompt(parts.tokenizer, sets)}")


def prompts_line(sets: PromptSets) -> str:
    return (
        f"{len(sets.train):,} to train on, {len(sets.evaluation):,} to evaluate on; {sets.too_long:,} too long "
        f"(rows: {sets.rows:,}, split {sets.split}: "
        + ", ".join(f"{name} {count:,}" for name, count in sets.parts.items())
        + ")"
    )


def budget_line(config: Config, updates: int) -> str:
    p = config.ppo
    return (
        f"{updates:,} updates x {p.batch_size} = {updates * p.batch_size:,} episodes, "
        f"{updates * p.ppo_epochs * p.minibatches:,} optimizer steps"
    )


def first_prompt(tokenizer: PreTrainedTokenizerBase, sets: PromptSets) -> str:
    """The first training prompt with its special tokens, on one line."""
    return repr(tokenizer.decode(list(sets.train[0].ids)))


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the prompts' ids: the same data in the same order, or not."""
    return hashlib.sha256(json.dumps([p.ids for p in prompts]).encode()).hexdigest()


def start_run(config: Config, parts: Parts, updates: int, screen: Screen) -> RunLog:
    """Claim the output folder and open run.json, which says "failed" unless the run comes to its end."""
    moved = claim_output(Path(config.run.output), **_placing(config))
    if moved:
        screen.say(moved)
    return RunLog(
        Path(config.run.output),
        algorithm="ppo",
        settings=as_plain(config),
        seed=config.run.seed,
        data={
            "train_prompts": len(parts.prompts.train),
            "evaluation_prompts": len(parts.prompts.evaluation),
            "too_long": parts.prompts.too_long,
            "train_sha256": fingerprint(parts.prompts.train),
            "evaluation_sha256": fingerprint(parts.prompts.evaluation),
        },
        plan={
            "updates": updates,
            "episodes": updates * config.ppo.batch_size,
            "optimizer_steps": updates * config.ppo.ppo_epochs * config.ppo.minibatches,
        },
    )


def finish_run(config: Config, trainer, log: RunLog, screen: Screen) -> None:
    """Before and after, side by side; where everything is; what to type next."""
    before, after, prompts = trainer.evaluations[0], trainer.evaluations[-1], trainer.evaluation_prompts
    knows_gold = config.recipe == "demo" and config.data.prompts == RECIPES["demo"]["training"]["prompts"]
    gold = gold_quality if knows_gold else None
    figures = compare(before, after, prompts, gold, config.run.seed)
    target = config.kl.kl_target[-1]
    kl = last_kl(trainer.state.log_history, target)
    figures |= {"kl_last_10_updates": kl, "kl_target": target.nats}
    log.add(figures=figures, perplexity_text=trainer.text.source)
    show_samples(before, after, prompts, gold, config.run.seed, screen)
    show_figures(figures, kl, target, config.kl.kl_schedule != "fixed", screen)
    output = config.run.output
    loader = "peft.AutoPeftModelForCausalLM" if config.model.use_lora else "transformers.AutoModelForCausalLM"
    screen.say("saved:")
    screen.facts(
        [
            (output, f"model and tokenizer; load with {loader}.from_pretrained({output!r})"),
            (f"{output}/samples", "every evaluation's replies with their scores"),
            (f"{output}/run.json", "settings, versions, figures"),
        ]
    )
    screen.say(f"next: tensorboard --logdir {output}/logs")

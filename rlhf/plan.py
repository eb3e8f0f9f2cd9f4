"""What is about to happen, in numbers: the plan that every run prints before it begins, and `--dry-run` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from config import Config
from rlhf.assembly import Parts, budget
from rlhf.callbacks import kl_controller
from rlhf.console import Screen
from rlhf.dealing import Dealing, one_line
from rlhf.memory import Forecast, available, forecast, gib, what_helps
from rlhf.models import autocast_dtype
from rlhf.prompts import Prompt, PromptSets
from rlhf.rollout import tokens_at_once

MOST_TOPICS = 12  # named


def show_plan(config: Config, parts: Parts, updates: int, device: torch.device, screen: Screen) -> None:
    """What is about to happen, in numbers."""
    m, sets = config.model, parts.prompts
    foretell = forecaster(parts, updates, device)
    trained = sum(w.numel() for w in parts.policy.parameters() if w.requires_grad)
    total = sum(w.numel() for w in parts.policy.parameters())
    dropout = f", dropout {m.lora_dropout:g}" if m.lora_dropout else ""
    shape = f"LoRA r {m.lora_r}, alpha {m.lora_alpha:g}{dropout} on {', '.join(m.lora_targets)}"
    how = f"{shape}: {trained:,} trained" if m.use_lora else "all trained"
    dtype = autocast_dtype(m.bf16, device)
    accuracy = (parts.reward_model.record or {}).get("accuracy") if parts.reward_model is not None else None
    rows = [
        ("algorithm", config.algorithm.upper()),
        ("recipe", config.recipe),
        ("start model", f"{m.actor_model} ({total:,} parameters, {how})"),
        ("reward", str(parts.rewards) + (", scores normalised" if config.reward.normalize_scores else "")),
        ("prompts", prompts_line(sets)),
        *topics_rows(config, sets.train),
        ("budget", budget_line(config, updates)),
        ("batch", batch_line(config, updates, device)),
        ("KL", kl_line(config, updates)),
        ("device", f"{device}, {'bfloat16 autocast' if dtype is not None else 'float32'}"),
        *foretell(config).rows(device),
        ("output", config.run.output),
    ]
    if config.algorithm == "ppo":
        own = "a backbone of its own" if config.separate_critic else "a head on the policy's backbone"
        rows.insert(3, ("critic", own))
    if m.rm_model is not None:
        known = f" (held-out accuracy {accuracy:.3f})" if accuracy is not None else ""
        rows.insert(3, ("reward model", m.rm_model + known))
    screen.facts(rows)
    warn_of_memory(config, parts, foretell, device, screen)
    screen.say(f"first prompt, as the model reads it: {first_prompt(parts.tokenizer, sets)}")


def prompts_line(sets: PromptSets) -> str:
    return (
        f"{len(sets.train):,} to train on, {len(sets.evaluation):,} to evaluate on; {sets.too_long:,} too long "
        f"(rows: {sets.rows:,}, split {sets.split}: "
        + ", ".join(f"{name} {count:,}" for name, count in sets.parts.items())
        + ")"
    )


def warn_of_memory(
    config: Config, parts: Parts, foretell: Callable[[Config], Forecast], device: torch.device, screen: Screen
) -> None:
    """Where less is free than foretold. A warning, as a forecast is no certainty; on Windows, whose driver spills into
    the machine's memory, nothing else would say it."""
    needed, there = foretell(config).peak, available(device)
    if needed > there:
        screen.say(
            f"warning: about {gib(needed)} GiB at the peak, {gib(there)} GiB free: memory of {device}. "
            f"{what_helps(config, parts.policy, foretell)}"
        )


def topics_rows(config: Config, train: Sequence[Prompt]) -> list[tuple[str, str]]:
    """For the plan: the topics in the order in which they are trained; nothing where they are not looked at."""
    dealing = Dealing(config, train)
    if not dealing.topics:
        return []
    stacks = [f"{one_line(topic)} ({len(dealing.stacks[topic]):,} prompts)" for topic in dealing.topics]
    more = [f"and {len(stacks) - MOST_TOPICS} more"] if len(stacks) > MOST_TOPICS else []
    shown = ", ".join([*stacks[:MOST_TOPICS], *more])
    return [("topics", f"{len(stacks)}, {dealing.steps:,} updates on each in turn, round and round: {shown}")]


def budget_line(config: Config, updates: int) -> str:
    plan = budget(config, updates)
    asked = config.run.episodes
    more = f" ({asked:,} asked for, rounded up to whole updates)" if asked not in (None, plan["episodes"]) else ""
    return (
        f"{updates:,} updates x {config.episodes_per_update} = {plan['episodes']:,} episodes{more}, "
        f"{plan['optimizer_steps']:,} optimizer steps, {plan['reply_tokens_at_most']:,} reply tokens at most"
    )


def batch_line(config: Config, updates: int, device: torch.device) -> str:
    """From prompts to optimizer steps, in the order in which an update goes through them."""
    b = config.batch
    group = f" x {config.grpo.K} replies" if config.group_size > 1 else ""
    episodes = config.episodes_per_update // b.minibatches
    at_once = f"{b.micro_batch_size} episodes" if b.micro_batch_size else f"{tokens_at_once(device):,} tokens"
    return (
        f"{b.batch_size} prompts{group} in {b.minibatches} minibatches of {episodes} episodes, an optimizer step "
        f"each; {b.ppo_epochs} passes over each rollout: {config.optimizer_steps(1):,} optimizer steps per update, "
        f"{config.optimizer_steps(updates):,} in all; at most {at_once} in a forward pass (the micro-batch)"
    )


def forecaster(parts: Parts, updates: int, device: torch.device) -> Callable[[Config], Forecast]:
    """What a run would hold under one configuration or another."""
    return partial(
        forecast,
        updates=updates,
        device=device,
        policy=parts.policy,
        reward_model=parts.reward_model.model if parts.reward_model is not None else None,
        tokenizer=parts.tokenizer,
        train=parts.prompts.train,
        evaluation=parts.prompts.evaluation,
    )


def kl_line(config: Config, updates: int) -> str:
    kl = config.kl
    if kl.kl_placement == "none":
        return "only logged"
    phases = kl_controller(config, updates).phases
    named = [f"{target} in updates {a} to {b}" if len(phases) > 1 else str(target) for a, b, target in phases]
    aim = f"target {', '.join(named)}, horizon {kl.kl_horizon:,} episodes" if kl.steered else "no target"
    return f"in the {kl.kl_placement}, {kl.kl_schedule}, {aim}, beta {kl.kl_coef}"


def first_prompt(tokenizer: PreTrainedTokenizerBase, sets: PromptSets) -> str:
    """The first training prompt with its special tokens, on one line."""
    return repr(tokenizer.decode(list(sets.train[0].ids)))

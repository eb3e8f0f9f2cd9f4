"""Prints the plan of a run: every run prints it before training, and `--dry-run` prints only the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf.algorithms.kl_control import SMALLEST_MOVE, default_horizon, kl_controller
from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.gguf import quantized
from rlhf.checkpoints.model_folder import read_record
from rlhf.checkpoints.run_record import Plan
from rlhf.config import user_file_line
from rlhf.data.chat_template import template_rows
from rlhf.data.prompts import Prompt, PromptSets
from rlhf.data.sampler import PromptSampler, planned_updates, shorten
from rlhf.distributed import group
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast_dtype
from rlhf.settings.recipes import DEFAULT_RECIPE
from rlhf.settings.training import CONTROL_MEANS, Config
from rlhf.settings.types import Split
from rlhf.setup.duration import predicted_seconds
from rlhf.setup.fit import estimator, free_memory, what_helps
from rlhf.setup.load_inputs import RunInputs
from rlhf.setup.memory import Estimator
from rlhf.setup.precision import product_seconds
from rlhf.setup.shape import adapter_weights, weights_of
from rlhf.trainer.progress import Predicted, Progress, parts_text
from rlhf.utils.console import Screen, counted, gib
from rlhf.utils.processes import size
from rlhf.utils.statistics import prompts_needed, smallest_change

MOST_TOPICS = 12  # listed in the plan
MORE_SAMPLES = (2, 4, 8)  # completions per evaluation prompt that the plan recommends


def process_rows() -> list[tuple[str, str]]:
    """Return the plan's row of several processes; no row for one."""
    count = max(size(), group.local.get("processes", 1))
    if count == 1:
        return []
    return [("processes", f"{count}, each with a share of every batch; the memory is per process")]


def show_plan(config: Config, inputs: RunInputs, device: torch.device, screen: Screen) -> Predicted:
    """Print the plan of a settled configuration, warnings about memory and KL control, and the first prompt. Returns
    the predicted seconds; {} if only measured updates can predict them: on a GPU, with several processes, and in a
    resumed run."""
    m = config.model
    sets = inputs.prompts
    updates = planned_updates(config, sets.train)
    tensors = weights_of(inputs.start.folder)
    estimate = estimator(inputs, updates, device, config.run.memory)
    trained = adapter_weights(tensors, m.lora_r, m.lora_targets)
    dropout = f", dropout {m.lora_dropout:g}" if m.lora_dropout else ""
    shape = f"LoRA r {m.lora_r}, alpha {m.lora_alpha:g}{dropout} on {', '.join(m.lora_targets)}"
    how = f"{shape}: {trained:,} trainable" if m.use_lora else "all trainable"
    dtype = autocast_dtype(m.bf16, device)
    predicted = {}
    time = "predicted in the progress lines, from measured updates"
    if device.type == "cpu" and not (process_rows() or config.run.resume):
        product = product_seconds(estimate.policy, dtype)
        parts = Progress(seconds=predicted_seconds(config, estimate, product)).left(config.run, updates, 0)
        predicted[f"predicted before update 1 of {updates}"] = parts
        time = f"about {parts_text(parts)} after loading, with completions of {config.sampling.max_new_tokens} tokens"
    rows = [
        ("algorithm", config.title),
        ("recipe", config.recipe),
        *user_file_rows(config),
        (
            "start model",
            f"{m.actor_model}{quantized(inputs.start.folder)} ({estimate.policy.parameters:,} parameters, {how})",
        ),
        *reward_model_rows(config, inputs),
        *([("teacher", f"{m.teacher} ({estimate.teacher.parameters:,} parameters)")] if estimate.teacher else []),
        ("reward", str(inputs.rewards) + (", scores normalised" if config.reward.normalize_scores else "")),
        *environment_rows(config, inputs),
        *([("control", CONTROL_MEANS)] if config.reward.control != "none" else []),
        ("prompts", prompts_line(sets)),
        *template_rows(inputs.start.tokenizer),
        *topics_rows(config, sets.train),
        *evaluation_rows(config, inputs),
        ("budget", budget_line(config, updates)),
        ("batch", batch_line(config, updates, device)),
        ("optimizer", optimizer_line(config, updates)),
        ("KL", kl_line(config, updates)),
        ("device", f"{device}, {'bfloat16 autocast' if dtype is not None else 'float32'}"),
        *process_rows(),
        ("time", time),
        *estimate(config).rows(estimate.total),
        *([] if config.in_python else [("output", config.run.output)]),
    ]
    if ALGORITHMS[config.algorithm].has_critic:
        own = "separate backbone" if config.separate_critic else "value head on the policy's backbone"
        own = "separate backbone, from the reward model" if config.critic_from_reward_model else own
        own += f", from the run {config.critic.run}" if config.critic.run is not None else ""
        rows.insert(3, ("critic", own))
    screen.facts(rows)
    warn_of_memory(config, estimate, device, screen)
    doubts = [*kl_warnings(config, updates), warmup_warning(config, updates), evidence_warning(config, sets)]
    for line in filter(None, doubts):
        screen.say(line)
    screen.say(f"first prompt with special tokens: {inputs.start.tokenizer.decode(list(sets.train[0].ids))!r}")
    return predicted


def reward_model_rows(config: Config, inputs: RunInputs) -> list[tuple[str, str]]:
    """Return the plan's row of the reward model; no row without one."""
    if inputs.rewards.folder is None:
        return []
    record = read_record(Path(inputs.rewards.folder))
    known = f" (held-out accuracy {record['accuracy']:.3f})" if record is not None else ""
    return [("reward model", f"{config.model.rm_model}{known}")]


def environment_rows(config: Config, inputs: RunInputs) -> list[tuple[str, str]]:
    """Return the plan's row of the environment; no row without one."""
    if inputs.environment is None:
        return []
    turns = config.environment.max_turns
    limits = [f"at most {turns} turns"] if turns is not None else []
    limits.append(f"at most {config.episode_tokens} tokens after the prompt")
    tools = [tool["function"]["name"] for tool in inputs.environment.tools]
    return [("environment", ", ".join([inputs.environment.name, *limits, *map("tool {}".format, tools)]))]


def prompts_line(sets: PromptSets) -> str:
    repeated = f", {sets.repeated:,} repeated" if sets.repeated else ""
    parts = ", ".join(f"{name} {count:,}" for name, count in sets.parts.items())
    rows = f" (rows: {sets.rows:,}, split {sets.split}: {parts})" if parts else ""  # not for prompts given in Python
    return (
        f"{len(sets.train):,} for training, {len(sets.evaluation):,} for evaluation, {sets.too_long:,} skipped as too "
        f"long{repeated}{rows}"
    )


def warn_of_memory(config: Config, estimate: Estimator, device: torch.device, screen: Screen) -> None:
    """Warn if less memory is free than predicted. It is not an error, because the forecast is uncertain. On Windows
    nothing else reports it, because the driver moves GPU memory to main memory."""
    needed = estimate(config).peak
    there = free_memory(config, device)
    if needed > there:
        screen.say(
            f"warning: the predicted peak memory is {gib(needed)} GiB, but {device} has only {gib(there)} GiB free. "
            f"{what_helps(config, estimate)}"
        )


def topics_rows(config: Config, train: Sequence[Prompt]) -> list[tuple[str, str]]:
    """Return the plan's row of topics in training order; no row if topics are not used."""
    sampler = PromptSampler(config, train)
    if not sampler.topics:
        return []
    topics = [f"{shorten(topic)} ({len(sampler.by_topic[topic]):,} prompts)" for topic in sampler.topics]
    more = [f"and {len(topics) - MOST_TOPICS} more"] if len(topics) > MOST_TOPICS else []
    shown = ", ".join([*topics[:MOST_TOPICS], *more])
    return [("topics", f"{len(topics)}, {sampler.steps:,} updates per topic, in turn: {shown}")]


def evaluation_rows(config: Config, inputs: RunInputs) -> list[tuple[str, str]]:
    """Return the plan's row of evaluation functions and of how evaluations sample; no row for the defaults."""
    count = config.run.eval_samples
    temperature = config.run.eval_temperature
    sampled = "" if temperature is None else f"temperature {temperature:g}" if temperature else "greedy completions"
    parts = [", ".join(inputs.eval_functions), f"{count} completions per prompt" if count > 1 else "", sampled]
    return [("evaluation", "; ".join(filter(None, parts)))] if any(parts) else []


def budget_line(config: Config, updates: int) -> str:
    plan = budget(config, updates)
    requested = config.run.episodes
    more = (
        f" (--episodes {requested:,}, rounded up to whole updates)" if requested not in (None, plan.episodes) else ""
    )
    draws = config.group.dynamic_sampling
    if draws and requested is not None:
        more += f"; dynamic sampling ends the run after {requested:,} episodes, maybe in fewer updates"
    elif draws:
        more = f"; dynamic sampling may draw up to {draws * plan.episodes:,} more"
    return (
        f"{updates:,} updates x {config.episodes_per_update} = {plan.episodes:,} episodes{more}, "
        f"{plan.optimizer_steps:,} optimizer steps, at most {plan.completion_tokens_at_most:,} completion tokens"
    )


def batch_line(config: Config, updates: int, device: torch.device) -> str:
    """Return the plan's batch row: prompts, minibatches, passes, optimizer steps and micro-batches of an update."""
    b = config.batch
    group = f" x {config.group_size} completions" if config.group_size > 1 else ""
    episodes = config.episodes_per_update // b.minibatches
    tokens = budget_of(device, config).tokens_per_micro_batch
    at_once = f"{b.micro_batch_size} episodes" if b.micro_batch_size else f"{tokens:,} tokens"
    return (
        f"{b.batch_size} prompts{group} = {config.episodes_per_update} episodes per update; minibatches: "
        f"{b.minibatches} of {episodes} episodes; passes over each rollout: {b.ppo_epochs}; optimizer steps: "
        f"{config.optimizer_steps(1):,} per update, {config.optimizer_steps(updates):,} in total; micro-batch: at "
        f"most {at_once}"
    )


def optimizer_line(config: Config, updates: int) -> str:
    """Return learning rate and schedule, and how completions are sampled."""
    o = config.optimizer
    sampling = config.sampling
    stop = f", stop {' '.join(map(repr, sampling.stops))}" if sampling.stop else ""
    warmup = o.warmup_updates(updates)
    rises = f" after a warm-up of {counted(warmup, 'update')}" if warmup else ""
    top_k = f", top-k {sampling.top_k}" if sampling.top_k else ""
    own = f" (critic {critic:g})" if (critic := config.critic.critic_learning_rate) is not None else ""
    return (
        f"{o.optim}, learning rate {o.learning_rate:g}{own}, {o.lr_schedule} schedule{rises}; sampling: temperature "
        f"{sampling.temperature:g}, top-p {sampling.top_p:g}{top_k}, at most {sampling.max_new_tokens} "
        f"tokens{stop}"
    )


def kl_line(config: Config, updates: int) -> str:
    kl = config.kl
    if kl.kl_placement == "none":
        return f"logged for 1 completion in {config.reference_every(0.0)}, not penalised"
    controller = kl_controller(config, updates)
    phases = controller.phases
    named = [f"{target} (updates {a} to {b})" if len(phases) > 1 else str(target) for a, b, target in phases if b >= a]
    aim = "no target"
    if kl.steered:
        move = controller.largest_move(config.episodes_per_update)
        per = "per phase" if len(phases) > 1 else "in the run"
        aim = (
            f"target {', '.join(named)}, horizon {controller.horizon:,} episodes (beta can change at most "
            f"{move:,.3g}-fold {per}; at least {SMALLEST_MOVE:g}-fold is needed: docs/how_it_works.md)"
        )
    return f"penalty in the {kl.kl_placement}, {kl.kl_schedule} schedule, {aim}, initial beta {kl.kl_coef}"


def kl_warnings(config: Config, updates: int) -> list[str]:
    """Return one warning per reason why the KL targets cannot be enforced."""
    if not config.kl.steered:
        return []
    controller = kl_controller(config, updates)
    episodes = config.episodes_per_update
    lines = []
    without = sum(last < first for first, last, _ in controller.phases)
    if without:
        lines.append(
            f"warning: {without} of {len(controller.targets)} KL targets get no update in a run of {updates} updates: "
            "--kl-target. Train longer, or use fewer targets"
        )
    move = controller.largest_move(episodes)
    if move < SMALLEST_MOVE:
        own = default_horizon(controller.shortest_phase, episodes)
        shorter = f"--kl-horizon {own}, " if own < controller.horizon else ""
        lines.append(
            f"warning: beta can change at most {move:.3g}-fold in {counted(controller.shortest_phase, 'update')}, too "
            f"little to enforce the KL target (horizon {controller.horizon:,} episodes). Use {shorter}a "
            "longer run or a larger --kl-coef"
        )
    return lines


def warmup_warning(config: Config, updates: int) -> str | None:
    """Return a warning if the learning rate's warm-up is not shorter than the run."""
    steps = config.optimizer.warmup_updates(updates)
    if steps == 0 or steps < updates:
        return None
    return (
        f"warning: the learning rate rises for {steps:g} updates and the run has {updates}, so it never reaches its "
        "value: --warmup-steps. Train longer, or use a smaller number"
    )


def evidence_warning(config: Config, sets: PromptSets) -> str | None:
    """Return a warning with the flags that help if the evaluations have too few prompts to show a change of 10
    points. None for a program, which gives its own prompts and not with flags."""
    samples = config.run.eval_samples
    count = len(sets.evaluation)
    needed = prompts_needed(samples)
    if count >= needed or not sets.rows:
        return None
    samplings = [more for more in MORE_SAMPLES if more > samples and config.run.eval_temperature != 0]
    fixes = [f"--eval-samples {more}" for more in samplings if prompts_needed(more) <= count][:1]
    split = sets.split
    share = math.ceil(110 * needed / sets.rows)  # 10% more, because the parts are drawn by hash
    left = split.rl + split.evaluation - share
    if sets.parts["evaluation"] >= needed:
        fixes.append(f"--eval-prompts {needed}")
    elif config.data.eval_dataset is None and left >= share:
        fixes.append(f"--split {Split(split.reward, left, share)} --eval-prompts {needed}")
    points = 100 * min(smallest_change(count, samples), 1)
    advice = " or ".join(fixes) or "more questions (--eval-dataset)"
    if not fixes and samplings:
        advice += f" and --eval-samples {samplings[-1]}"
    return (
        f"warning: {counted(count, 'evaluation prompt')} with {counted(samples, 'completion')} each can show only a "
        f"change of at least {points:.0f} points of a score of 0 or 1, or {points / 50:.1f} standard deviations of "
        f"another score. 10 points need {needed} prompts. Use {advice}"
    )


def user_file_rows(config: Config) -> list[tuple[str, str]]:
    """Return the plan's row for config.py: its changes, or that it was edited and is not used."""
    unused = "--resume uses the settings of the run" if config.run.resume else None
    unused = f"--recipe {config.recipe}" if config.recipe != DEFAULT_RECIPE else unused
    line = user_file_line(config.user_file, ALGORITHMS[config.algorithm], unused)
    return [] if line is None else [("config.py", line)]


def budget(config: Config, updates: int) -> Plan:
    """Return the budget of a run of `updates`, in the same units for all algorithms."""
    episodes = updates * config.episodes_per_update
    return Plan(
        updates=updates,
        episodes=episodes,
        optimizer_steps=config.optimizer_steps(updates),
        completion_tokens_at_most=config.most_episodes(updates) * config.episode_tokens,
    )

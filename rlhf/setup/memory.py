"""Predicts the peak memory of a run, and which settings reduce it.

The forecast is computed before the run starts from the weights' shapes, the settings and the lengths of the prompts.
It assumes that every completion has --max-new-tokens tokens. The peak is the memory of the phase that needs most. On
a GPU it is the memory that torch allocates. On a CPU it is the resident memory above that after the imports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.prompts import Prompt
from rlhf.data.sampler import PromptSampler
from rlhf.models.device import autocast_dtype, installed
from rlhf.models.logprobs import base_of
from rlhf.models.packing import MicroBatch
from rlhf.rewards.functions import LearnedReward
from rlhf.rewards.rewards import Rewards
from rlhf.settings.training import Config
from rlhf.setup.footprint import Network, critic_network, second_network, weights_of
from rlhf.setup.peak_memory import MemoryPlan, scoring
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import gib


@dataclass(frozen=True)
class Phase:
    """A part of an update or of an evaluation."""

    name: str
    parts: dict[str, int]  # purpose -> bytes

    @property
    def size(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Forecast:
    """The predicted memory of a run, in bytes."""

    held: dict[str, int]  # held throughout the run
    phases: list[Phase]  # needed in addition, one phase after another
    micro_batch: MicroBatch  # the largest one

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.size)

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + self.largest.size

    def rows(self, device: torch.device) -> list[tuple[str, str]]:
        """Return the plan's rows: the peak, its parts, and the peak of each phase."""
        held, parts = sum(self.held.values()), {**self.held, **self.largest.parts}
        named = sorted(((size, name) for name, size in parts.items() if size >= 2**20), reverse=True)
        return [
            (
                "memory",
                f"predicted peak {gib(self.peak)} of {gib(installed(device))} GiB (phase: {self.largest.name})"
                f"{'' if device.type == 'cuda' else ', in addition to Python and its libraries'}; "
                f"largest micro-batch {len(self.micro_batch.rows)} episodes, {self.micro_batch.ids.numel():,} tokens",
            ),
            ("  parts, GiB", ", ".join(f"{name} {gib(size)}" for size, name in named)),
            ("  phases, GiB", ", ".join(f"{phase.name} {gib(held + phase.size)}" for phase in self.phases)),
        ]


def forecast(
    config: Config,
    updates: int,
    device: torch.device,
    *,
    policy: PreTrainedModel | PeftModel,
    reward_model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Prompt],
    evaluation: Sequence[Prompt],
) -> Forecast:
    """Predict the memory of a run from its models and its longest batch of `train` prompts.

    Ignores evaluations if there are no `evaluation` prompts.
    """
    dtype = autocast_dtype(config.model.bf16, device)
    network = Network.of(base_of(policy), dtype, config.model.gradient_checkpointing)
    second = second_network(config, policy, reward_model, dtype)
    like = None if second is None else critic_network(second, network, dtype)
    plan = MemoryPlan(config, device, policy, network, second, like)
    batch = longest_batch(config, train, updates)
    bits = plan.allowed_tokens(len(batch))
    whole, micro_batches = plan.micro_batches(batch), plan.micro_batches(batch, config.batch.minibatches)
    backwards = [plan.backward(micro_batch, first=number == 0) for number, micro_batch in enumerate(micro_batches)]
    backward, largest = max(zip(backwards, micro_batches, strict=True), key=lambda one: sum(one[0].values()))
    phases = [
        Phase("rollout", {**plan.rollout(batch), "token masks": bits}),
        Phase("log-probs", {**plan.logprob_pass(whole), "token masks": bits}),
        Phase("backward pass", {**backward, "token masks": bits}),
        Phase("optimizer step", {"gradients": plan.trained, "token masks": bits}),
    ]
    if reward_model is not None:
        judge = Network.of(reward_model, dtype)
        scored = scoring(judge, batch, config.sampling.max_new_tokens, plan.budget.scoring_batch_size)
        phases.insert(2, Phase("scoring", {**scored, **plan.cached_forward(whole), "token masks": bits}))
    if evaluation:
        rows = [p for p in sorted(evaluation, key=lambda p: len(p.ids)) for _ in range(config.run.eval_samples)]
        masks, longest = plan.allowed_tokens(len(rows)), rows[-plan.budget.eval_batch_size :]
        phases.append(Phase("evaluation rollout", {**plan.rollout(longest), "token masks": masks}))
        text = plan.reading(tokenizer, evaluation)
        phases.append(Phase("evaluation perplexity", {**text, "token masks": masks}))
    return Forecast(plan.held(reward_model), phases, largest)


def forecaster(
    updates: int,
    device: torch.device,
    policy: PreTrainedModel | PeftModel,
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train: Sequence[Prompt],
    evaluation: Sequence[Prompt] = (),
) -> Callable[[Config], Forecast]:
    """Return a function from settings to this run's forecast. Without `evaluation` prompts it ignores evaluations."""
    learned = [f.model.model for f in rewards.functions if isinstance(f, LearnedReward)]
    return partial(
        forecast,
        updates=updates,
        device=device,
        policy=policy,
        reward_model=learned[0] if learned else None,
        tokenizer=tokenizer,
        train=train,
        evaluation=evaluation,
    )


def forecaster_of(trainer: OnPolicyLoop) -> Callable[[Config], Forecast]:
    """Return a function from settings to the forecast of a trainer's updates."""
    device, policy, tokenizer = trainer.accelerator.device, trainer.actor.policy, trainer.processing_class
    return forecaster(trainer.updates, device, policy, trainer.rewards, tokenizer, train=trainer.train_prompts)


def what_helps(config: Config, policy: PreTrainedModel | PeftModel, estimate: Callable[[Config], Forecast]) -> str:
    """Return the advice for too little memory: the three settings that reduce the predicted peak most."""

    def predicted(**changed: Any) -> Forecast:
        changed_groups = {
            group.name: replace(settings, **{n: v for n, v in changed.items() if hasattr(settings, n)})
            for group in fields(config)
            if is_dataclass(settings := getattr(config, group.name))
        }
        return estimate(replace(config, **changed_groups))

    now, length = predicted(), max(1, config.sampling.max_new_tokens // 2)
    saved = {f"--max-new-tokens {length}": now.peak - predicted(max_new_tokens=length).peak}
    if not config.model.gradient_checkpointing:
        saved["--gradient-checkpointing"] = now.peak - predicted(gradient_checkpointing=True).peak
    if config.batch.batch_size > 1:
        size = config.batch.batch_size // 2
        saved[f"--batch-size {size}"] = now.peak - predicted(batch_size=size, minibatches=1).peak
    if not config.model.use_lora:  # saves gradients, optimizer state and the separate reference model
        saved["--use-lora"] = int(1.5 * now.held["optimizer"]) + now.held["reference"]
    else:
        whole = weights_of(policy, trained=False)
        saved["--load-in-4bit"] = 0 if config.model.load_in_4bit else whole * 3 // 4
    if config.optimizer.optim == "adamw":
        saved["--optim adamw_8bit"] = now.held["optimizer"] - predicted(optim="adamw_8bit").held["optimizer"]
    if config.separate_critic:
        saved["--critic shared"] = now.peak - predicted(critic="shared").peak
    best = sorted(saved.items(), key=lambda one: -one[1])[:3]
    return "To reduce memory: " + ", ".join(f"{flag} (about {gib(max(size, 0))} GiB less)" for flag, size in best)


def longest_batch(config: Config, prompts: Sequence[Prompt], updates: int) -> list[Prompt]:
    """Return the prompts of the update that has the most prompt tokens, one per episode, as the loop samples them."""
    return [
        prompt for prompt in PromptSampler(config, prompts).longest_batch(updates) for _ in range(config.group_size)
    ]

"""The peak memory to expect of a run, and which settings reduce it.

The forecast is computed before the run begins, from shapes alone: weights, settings, lengths of prompts. Completions
are taken to have their full length. The peak is that of the phase that needs most. On a GPU it is what torch
allocates; on a CPU what the process holds above what it held after its imports.
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
from rlhf.setup.footprint import Network, weights_of
from rlhf.setup.peak_memory import MemoryPlan, scoring
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import gib


@dataclass(frozen=True)
class Phase:
    """A part of an update, or of an evaluation. Bytes by what they are for."""

    name: str
    parts: dict[str, int]

    @property
    def size(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Forecast:
    """What a run will hold, bytes."""

    held: dict[str, int]  # throughout
    phases: list[Phase]  # on top, one after another
    micro_batch: MicroBatch  # the largest micro-batch

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.size)

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + self.largest.size

    def rows(self, device: torch.device) -> list[tuple[str, str]]:
        """For the plan: the peak, its parts, and the phases."""
        held, parts = sum(self.held.values()), {**self.held, **self.largest.parts}
        named = sorted(((size, name) for name, size in parts.items() if size >= 2**20), reverse=True)
        return [
            (
                "memory",
                f"about {gib(self.peak)} of {gib(installed(device))} GiB at the peak, in the {self.largest.name}"
                f"{'' if device.type == 'cuda' else ', beside what Python and its libraries hold'}; "
                f"largest micro-batch {len(self.micro_batch.rows)} episodes, {self.micro_batch.ids.numel():,} tokens",
            ),
            ("  its parts", ", ".join(f"{name} {gib(size)}" for size, name in named)),
            ("  by phase", ", ".join(f"{phase.name} {gib(held + phase.size)}" for phase in self.phases)),
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
    """Of a run that has loaded its models and prompts; without `evaluation` prompts, of its updates alone."""
    dtype = autocast_dtype(config.model.bf16, device)
    network = Network.of(base_of(policy), dtype, config.model.gradient_checkpointing)
    plan = MemoryPlan(config, device, policy, network)
    batch = longest_batch(config, train, updates)
    bits = plan.allowed_tokens(len(batch))
    whole, micro_batches = plan.micro_batches(batch), plan.micro_batches(batch, config.batch.minibatches)
    backwards = [plan.backward(micro_batch, first=number == 0) for number, micro_batch in enumerate(micro_batches)]
    backward, largest = max(zip(backwards, micro_batches, strict=True), key=lambda one: sum(one[0].values()))
    phases = [
        Phase("rollout", {**plan.rollout(batch), "nucleus": bits}),
        Phase("measuring", {**plan.logprob_pass(whole), "nucleus": bits}),
        Phase("backward pass", {**backward, "nucleus": bits}),
        Phase("optimizer step", {"gradients": plan.trained, "nucleus": bits}),
    ]
    if reward_model is not None:
        judge = Network.of(reward_model, dtype)
        scored = scoring(judge, batch, config.sampling.max_new_tokens, plan.budget.scoring_batch_size)
        phases.insert(2, Phase("scoring", {**scored, **plan.cached_forward(whole), "nucleus": bits}))
    if evaluation:
        kept = plan.allowed_tokens(len(evaluation))
        asked = sorted(evaluation, key=lambda p: len(p.ids))[-plan.budget.eval_batch_size :]
        phases.append(Phase("evaluation's rollout", {**plan.rollout(asked), "nucleus": kept}))
        text = plan.reading(tokenizer, evaluation)
        phases.append(Phase("evaluation's text", {**text, "nucleus": kept}))
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
    """Return a function from settings to this run's forecast; without `evaluation` prompts, of its updates alone."""
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
    """Where memory does not suffice: the three settings that would take most off the predicted peak."""

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
    if not config.model.use_lora:  # no gradients, no moments and no reference of its own
        saved["--use-lora"] = int(1.5 * now.held["optimizer"]) + now.held["reference"]
    else:
        whole = weights_of(policy, trained=False)
        saved["--load-in-4bit"] = 0 if config.model.load_in_4bit else whole * 3 // 4
    if config.separate_critic:
        saved["--critic shared"] = now.peak - predicted(critic="shared").peak
    best = sorted(saved.items(), key=lambda one: -one[1])[:3]
    return "What would help most: " + ", ".join(f"{flag} (about {gib(max(size, 0))} GiB less)" for flag, size in best)


def longest_batch(config: Config, prompts: Sequence[Prompt], updates: int) -> list[Prompt]:
    """The prompts of the update that has the most prompt tokens, one an episode, as the loop will deal them."""
    return [
        prompt for prompt in PromptSampler(config, prompts).longest_batch(updates) for _ in range(config.group_size)
    ]

"""The predicted memory of a run, the settings that follow from it, and those that reduce it: batches that fit a GPU's
free memory, `--fit`, and the advice for too little memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import torch
from transformers.utils import is_bitsandbytes_available

from rlhf.algorithms.kl_control import with_horizon
from rlhf.checkpoints.model_folder import ALL_LINEAR, linear_modules, missing_targets
from rlhf.data.prompts import Prompt
from rlhf.data.sampler import planned_updates
from rlhf.distributed.group import gather
from rlhf.models.budget import budget_of
from rlhf.models.device import available
from rlhf.models.logprobs import base_of
from rlhf.rollout.choice import WITH_SLOTS, choose_engine
from rlhf.settings.fields import changed_words, flag_words, replaced, setting_words, values_in
from rlhf.settings.training import FITTED, Config
from rlhf.settings.types import MemorySize
from rlhf.setup.load_inputs import RunInputs
from rlhf.setup.memory import IMPORTED, Estimator
from rlhf.setup.precision import choose_precision, choose_threads
from rlhf.setup.shape import Shape, adapter_weights, base_parameters, parameters_in, shape_of, weights_of
from rlhf.utils.command_lines import command
from rlhf.utils.console import Screen, gib
from rlhf.utils.errors import UserError

if TYPE_CHECKING:
    from rlhf.trainer.loop import OnPolicyLoop

MARGIN = 1.1  # times the prediction
CONTEXT = {"cpu": 0, "cuda": 2**29}  # bytes on a GPU outside torch's tensors: CUDA's context and its kernels
# of a GPU, largest first. More tokens than 16,384 do not make a GPU faster; fewer than 1,024 leave it idle
TOKENS = [2**k for k in range(14, 9, -1)]
SLOTS = [2**k for k in range(10, 2, -1)]


def estimator(inputs: RunInputs, updates: int, device: torch.device, memory: MemorySize | None = None) -> Estimator:
    """Return the estimator of the memory of a run with these inputs. `memory` as in --memory."""
    reward_model = inputs.rewards.folder
    return Estimator(
        policy=shape_of(inputs.start.folder),
        reward_model=shape_of(reward_model) if reward_model is not None else None,
        teacher=shape_of(inputs.teacher) if inputs.teacher is not None else None,
        device=device,
        train=inputs.prompts.train,
        evaluation=[len(prompt.ids) for prompt in inputs.prompts.evaluation],
        updates=updates,
        libraries=0 if device.type == "cuda" else max(IMPORTED, psutil.Process().memory_info().rss),
        packs=inputs.start.packs,
        memory=None if memory is None else memory.bytes,
        environment=inputs.environment,
    )


def estimator_of(trainer: OnPolicyLoop) -> Estimator:
    """Return the estimator of the memory of a trainer's updates, without its libraries and evaluations."""
    from rlhf.models.attention import packable  # slow to import

    policy = trainer.actor.policy
    learned = trainer.rewards.learned
    teacher = trainer.teacher
    scorers = (learned and learned[0].model, teacher and teacher.reference.copy)
    reward_model, teacher = (model and Shape.of(model.config, model.num_parameters()) for model in scorers)
    return Estimator(
        policy=Shape.of(base_of(policy).config, base_parameters(policy)),
        reward_model=reward_model,
        teacher=teacher,
        device=trainer.host.accelerator.device,
        train=trainer.train_prompts,
        evaluation=[],
        updates=trainer.updates,
        libraries=0,
        packs=packable(base_of(policy)),
        environment=trainer.collector.environment,
    )


def free_memory(config: Config, device: torch.device) -> int:
    """Return the bytes that a run may use: those of --memory, or those available to this process."""
    return available(device) if config.run.memory is None else config.run.memory.bytes


def settle(config: Config, inputs: RunInputs, device: torch.device, screen: Screen) -> Config:
    """Return the configuration of a run in its final form, with what follows from its inputs and its machine. Set
    torch's threads.

    The length of the run gives the default kl_horizon. A new run chooses its precision, on a GPU the tokens per
    micro-batch and the slots, and with --fit the settings that reduce memory; a resumed run has them. Raises UserError
    as `fit`.
    """
    choose_threads(config, inputs.start.folder, device, screen)
    config = with_horizon(config, planned_updates(config, inputs.prompts.train))
    if config.run.resume:
        return config
    config = choose_precision(config, inputs.start.folder, device, screen)
    if config.speed.fit is not None:
        return fit(config, inputs, device, screen)
    if device.type != "cuda":
        return config
    free = min(gather(free_memory(config, device)))  # of all processes, so that they choose the same
    return choose_batches(config, of_longest(config, inputs, device), free, screen)


def of_longest(config: Config, inputs: RunInputs, device: torch.device) -> Estimator:
    """Return the estimator for a batch of the longest prompts, so that a choice is the same for every seed."""
    longest = sorted(inputs.prompts.train, key=lambda prompt: len(prompt.ids))[-config.batch.batch_size :]
    one_topic = [Prompt(prompt.ids, replace(prompt.example, topic=None)) for prompt in longest]
    libraries = 0 if device.type == "cuda" else IMPORTED
    return replace(estimator(inputs, 1, device, config.run.memory), train=one_topic, libraries=libraries)


def choose_batches(config: Config, estimate: Estimator, free: int, screen: Screen) -> Config:
    """Return the configuration with micro_batch_tokens and rollout_slots, if they are 0: the largest numbers whose
    predicted peak fits `free` bytes; if none does, the largest with the peak of the smallest. Prints smaller ones."""
    tokens = [config.batch.micro_batch_tokens] if config.batch.micro_batch_tokens else TOKENS
    engine = choose_engine(config.speed.rollout_engine, estimate.packs, estimate.device)
    slots = SLOTS if engine in WITH_SLOTS and not config.speed.rollout_slots else [config.speed.rollout_slots]

    smallest = estimate(replaced(config, micro_batch_tokens=tokens[-1], rollout_slots=slots[-1])).peak
    room = max(int(free / MARGIN) - CONTEXT[estimate.device.type], smallest)
    chosen = _largest(config, estimate, room, "micro_batch_tokens", tokens, slots)
    size = chosen.batch.micro_batch_tokens
    count = chosen.speed.rollout_slots
    if (size, count) != (tokens[0], slots[0]):
        words = changed_words({"micro_batch_tokens": size, "rollout_slots": count}, values_in(config))
        screen.say(f"chosen for {gib(free)} GiB of free GPU memory: {command(*words)}")
    return chosen


def _largest(
    config: Config, estimate: Estimator, room: int, name: str, sizes: Sequence[int], slots: Sequence[int]
) -> Config:
    """Return the configuration with the first of `sizes`, the setting `name`, that fits with the fewest slots, and
    then with the first of `slots` that fit."""
    few = slots[-1]
    size = next(n for n in sizes if estimate(replaced(config, rollout_slots=few, **{name: n})).peak <= room)
    options = (replaced(config, rollout_slots=n, **{name: size}) for n in slots)
    return next(option for option in options if estimate(option).peak <= room)


# --- --fit -----------------------------------------------------------------------------------------------------------


def fit(config: Config, inputs: RunInputs, device: torch.device, screen: Screen) -> Config:
    """Return the configuration with settings that fit the size of --fit, and print them. UserError if none do."""
    estimate = of_longest(config, inputs, device)
    room = int(config.speed.fit.bytes / MARGIN) - CONTEXT[device.type]
    tensors = weights_of(inputs.start.folder)
    m = config.model
    adapters = adapter_weights(tensors, m.lora_r, m.lora_targets)
    has_targets = not missing_targets(linear_modules(tensors), set(m.lora_targets) - {ALL_LINEAR}, inputs.start.folder)
    chosen = choose_fitting(config, estimate, room, has_targets)
    if estimate(chosen).peak > room:
        raise UserError(
            "no settings fit",
            f"--fit {config.speed.fit}",
            f"The smallest predicted peak is {gib(estimate(chosen).peak)} GiB ({changed_flags(config, chosen)}), and "
            f"{gib(max(0, room))} GiB are left after a margin of a tenth"
            f"{' and the memory of CUDA itself' if CONTEXT[device.type] else ''}. Use a smaller start model, "
            "--max-new-tokens or --batch-size",
        )
    _show(config, chosen, estimate, f"{adapters:,} of {parameters_in(tensors):,}", screen)
    return chosen


def choose_fitting(config: Config, estimate: Estimator, room: int, has_targets: bool = True) -> Config:
    """Return the configuration that fits in `room` bytes and changes the result least; if none fits, the smallest.

    Settings that change only time come first: gradient checkpointing, then the largest micro-batch and the most slots
    that fit. 8-bit Adam and then LoRA follow. `has_targets`: the model has all target modules of LoRA.
    """
    options = list(_options(config, has_targets))
    for option in options:
        if estimate(_smallest(option, estimate)).peak <= room:
            sizes = [option.batch.micro_batch_size, *range(estimate(option).episodes - 1, 0, -1)]
            return _largest(option, estimate, room, "micro_batch_size", sizes, _slots(option, estimate))
    return min((_smallest(option, estimate) for option in options), key=lambda option: estimate(option).peak)


def _options(config: Config, has_targets: bool) -> Iterator[Config]:
    """Yield the valid configurations to try, those first that change the result least."""
    eight_bit = [{}, {"optim": "adamw_8bit"}] if is_bitsandbytes_available() else [{}]
    for lora in [{}, {"use_lora": True}] if has_targets else [{}]:
        for optimizer in eight_bit:
            for checkpointing in ({}, {"gradient_checkpointing": True}):
                option = replaced(config, **lora, **optimizer, **checkpointing)
                if not option.validate():
                    yield option


def _smallest(config: Config, estimate: Estimator) -> Config:
    """Return the configuration with the smallest micro-batch and the fewest slots."""
    return replaced(config, micro_batch_size=1, rollout_slots=_slots(config, estimate)[-1])


def _slots(config: Config, estimate: Estimator) -> list[int]:
    """Return the rollout slots to try, the most first. The first entry is the setting's own value, which may be 0. It
    is the only one if the engine that samples has no slots."""
    if choose_engine(config.speed.rollout_engine, estimate.packs, estimate.device) not in WITH_SLOTS:
        return [config.speed.rollout_slots]
    most = budget_of(estimate.device, config).rollout_slots
    return [config.speed.rollout_slots, *(n for n in SLOTS if n < most)]


def _show(config: Config, chosen: Config, estimate: Estimator, adapters: str, screen: Screen) -> None:
    """Print what --fit chose, and what each choice changes."""
    before = estimate(config).peak
    after = estimate(chosen).peak
    changed = _changes(config, chosen)
    if not changed:
        return screen.say(f"--fit {config.speed.fit}: predicted peak at most {gib(after)} GiB, nothing is changed")
    m = config.model
    effects = {
        "micro_batch_size": "the same gradients up to rounding; smaller micro-batches are slower on a GPU",
        "rollout_slots": "the same completions up to rounding; sampling is slower",
        "gradient_checkpointing": "the same gradients; optimizer steps take about a third longer",
        "optim": "the optimizer's moments are rounded to 8 bits, so the result differs slightly",
        "use_lora": f"trains {adapters} weights (rank {m.lora_r}), so the result differs; a higher --learning-rate is "
        "usual",
    }
    screen.say(
        f"--fit {config.speed.fit}: predicted peak at most {gib(after)} GiB instead of {gib(before)} GiB, with:"
    )
    screen.facts([(command(*flag_words(name, value)), effects[name]) for name, value in changed.items()])


def _changes(config: Config, chosen: Config) -> dict[str, Any]:
    before = values_in(config)
    after = values_in(chosen)
    return {name: after[name] for name in reversed(FITTED) if before[name] != after[name]}


def changed_flags(config: Config, chosen: Config) -> str:
    """Return the flags of the settings that --fit changed."""
    return command(*setting_words(_changes(config, chosen)))


# --- advice ----------------------------------------------------------------------------------------------------------


def what_helps(config: Config, estimate: Estimator) -> str:
    """Return the advice for too little memory: the three settings that reduce the predicted peak most."""
    now = estimate(config).peak
    size = config.batch.batch_size // 2
    limit = "max_episode_tokens" if config.batch.max_episode_tokens else "max_new_tokens"
    options: list[dict[str, Any]] = [
        {"gradient_checkpointing": True},
        {limit: max(1, config.episode_tokens // 2)},
        {"micro_batch_size": 1},
        {"optim": "adamw_8bit"},
        *([{"batch_size": size, "minibatches": 1}] if size else []),
        {"load_in_4bit" if config.model.use_lora else "use_lora": True},
        *([{"critic": "shared"}] if config.separate_critic else []),
    ]
    saved = {}
    for option in options:
        if words := changed_words(option, values_in(config)):
            saved[command(*words)] = now - estimate(replaced(config, **option)).peak
    best = sorted(saved.items(), key=lambda one: -one[1])[:3]
    return "To reduce memory: " + ", ".join(f"{flag} (about {gib(max(by, 0))} GiB less)" for flag, by in best)

"""TRL's trainers as hosts: they own the accelerator, optimizer, scheduler, state, callbacks and logging of a run.

PPOTrainer hosts an algorithm with a critic, GRPOTrainer one without. Their `train()` is not used. The golden tests
(tests/algorithms/test_golden.py) compare the training loop with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftModel
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from transformers.trainer_callback import ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from rlhf.algorithms.table import ALGORITHMS
from rlhf.data.prompts import Prompt
from rlhf.models.actor_critic import Actor, ActorCritic, critic_backbone, with_value_head
from rlhf.models.logprobs import backbone_of
from rlhf.models.reference import Reference
from rlhf.models.reward_critic import critic_of_reward_model, set_value_head
from rlhf.models.save import check_adapter, load_critic
from rlhf.models.trl_ppo import PPOConfig, PPOTrainer
from rlhf.rewards.rewards import Rewards
from rlhf.settings.training import Config
from rlhf.utils.errors import UserError
from rlhf.utils.processes import is_first


def shared_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of transformers' TrainingArguments of both hosts: the optimizer with its schedule, and what
    the training loop does itself.

    The schedule advances once per update, so it counts updates. Of transformers' schedules, `constant` ignores a
    warm-up, which is `constant_with_warmup`.
    """
    settings = config.optimizer
    warms_up = settings.lr_schedule == "constant" and settings.warmup_steps > 0
    return {
        "output_dir": config.run.output,
        "seed": config.run.seed,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant_with_warmup" if warms_up else settings.lr_schedule,
        "warmup_steps": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.adam_beta1,
        "adam_beta2": settings.adam_beta2,
        # detail 35: AdamW as in transformers (37 details, 3). torch's weight decay of 0.01 would shrink the weights.
        **({} if settings.optim == "adamw" else {"optim": settings.optim}),
    }


def separate_overrides(optimizer: Optimizer, optim: str) -> None:
    """Give an 8-bit optimizer a separate list of the weights with a 32-bit state.

    transformers adds each embedding to one list for the whole process. It would keep the embeddings of earlier
    trainers in memory, and bitsandbytes finds a weight in it by its address, which a later trainer may have again.
    """
    if optim == "adamw_8bit":
        shared = optimizer.mng
        optimizer.mng = type(shared).__new__(type(shared))  # its __init__ raises: it is a singleton
        optimizer.mng.initialize()
        optimizer.mng.module_weight_config_triple = shared.module_weight_config_triple
        shared.initialize()


def separate_critic_groups(optimizer: Optimizer, actor: ActorCritic, rate: float | None) -> None:
    """Move the critic's weights to parameter groups of their own, with learning rate `rate` (None: the policy's). The
    steps are those of two Adam optimizers, as in verl and OpenRLHF, but the gradients are clipped together."""
    own = {id(weight) for name, weight in actor.named_parameters() if not name.startswith("policy.")}
    for group in list(optimizer.param_groups):
        moved = [weight for weight in group["params"] if id(weight) in own]
        group["params"] = [weight for weight in group["params"] if id(weight) not in own]
        optimizer.add_param_group({**group, "params": moved, "lr": group["lr"] if rate is None else rate})


class _SharedBackboneCritic(nn.Module):
    """The value model that TRL's __init__ requires. It shares the actor's backbone and value head."""

    base_model_prefix = "backbone"

    def __init__(self, policy: PreTrainedModel | PeftModel, value_head: nn.Module):
        super().__init__()
        self.backbone = backbone_of(policy)
        self.score = value_head


def second_network(
    config: Config, policy: PreTrainedModel | PeftModel, value_head: nn.Module, rewards: Rewards
) -> PreTrainedModel | None:
    """Return the critic's own backbone, a copy of the policy's or of the reward model's; None if the critic shares the
    policy's. With the reward model or a run, `value_head` becomes its head."""
    if not config.critic_from_reward_model:
        critic = critic_backbone(policy) if config.separate_critic else None
        run = config.critic.run
        if run is not None and critic is not None and isinstance(policy, PeftModel):
            check_adapter(policy, Path(run))
        if run is not None:
            load_critic(value_head, critic, Path(run))
        return critic
    if rewards.learned is None:
        raise UserError("no reward model among the rewards", "critic reward-model", "Use critic separate")
    model, weight = rewards.learned
    set_value_head(value_head, model.model, model.calibration.mean, model.calibration.std, weight)
    return critic_of_reward_model(config, model.model)


class PPOHost(PPOTrainer):
    """TRL's PPOTrainer with this project's actor and critic."""

    def __init__(
        self,
        config: Config,
        policy: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        updates: int,
        reference: Reference,
        train: Sequence[Prompt],
        rewards: Rewards,
    ):
        self._config = config
        self._container = with_value_head(policy)
        self._critic = second_network(config, policy, self._container.v_head, rewards)
        super().__init__(
            args=PPOConfig(
                per_device_train_batch_size=config.batch.batch_size,
                total_episodes=updates * config.batch.batch_size,
                stop_token="eos",
                num_sample_generations=0,
                **shared_arguments(config),
            ),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference.copy,
            reward_model=nn.Identity(),  # TRL requires a module; completions are scored by reward functions
            value_model=_SharedBackboneCritic(policy, self._container.v_head),
            train_dataset=Dataset.from_list([{"input_ids": list(p.ids)} for p in train]),
        )

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Called by TRL's __init__ before accelerate prepares the model. Replaces TRL's model by ActorCritic."""
        self.model = ActorCritic(self._container, self._critic)
        super().create_optimizer_and_scheduler(num_training_steps)
        separate_overrides(self.optimizer, self._config.optimizer.optim)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Called before the schedule is created, which scales the learning rate of each parameter group."""
        optimizer = super().create_optimizer(model)
        separate_critic_groups(optimizer, self.model, self._config.critic.critic_learning_rate)
        return optimizer

    @cached_property
    def actor(self) -> ActorCritic:
        """The model without accelerate's wrapper. First used after TRL's __init__, which prepares the model."""
        return self.accelerator.unwrap_model(self.model)


def no_reward(completions: list[str], **_) -> list[float]:
    """The reward function that TRL's constructor requires. It is not called: the training loop scores completions."""
    raise AssertionError("TRL called no_reward(), although the training loop scores the completions")


class GRPOHost(GRPOTrainer):
    """TRL's GRPOTrainer with this project's actor."""

    def __init__(
        self, config: Config, policy: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, updates: int
    ):
        super().__init__(
            model=policy,
            reward_funcs=[no_reward],
            args=GRPOConfig(
                per_device_train_batch_size=2,  # TRL requires a group of 2; the training loop makes the minibatches
                num_generations=2,
                max_completion_length=config.sampling.max_new_tokens,
                temperature=config.sampling.temperature,
                num_iterations=1,  # the training loop repeats epochs over a rollout
                beta=0.0,  # otherwise TRL loads a second reference model
                max_steps=updates,
                disable_dropout=True,
                **shared_arguments(config),
            ),
            train_dataset=Dataset.from_list([{"prompt": ""}]),  # TRL requires one; the training loop has the prompts
            processing_class=tokenizer,
        )
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()  # with 4-bit weights GRPOTrainer casts adapters to bfloat16
        self.actor = Actor(policy)
        self.create_optimizer_and_scheduler(updates)
        separate_overrides(self.optimizer, config.optimizer.optim)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)


Host = PPOHost | GRPOHost


def make_host(
    config: Config,
    policy: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    updates: int,
    reference: Reference,
    train: Sequence[Prompt],
    rewards: Rewards,
) -> Host:
    """Construct the host for the algorithm of these settings.

    Args:
        config: settings of the run.
        policy: the policy, which the host wraps.
        tokenizer: the policy's tokenizer.
        updates: number of updates in the run.
        reference: the frozen reference, used with a critic only.
        train: training prompts, used with a critic only.
        rewards: used for a critic that starts from the reward model only.
    """
    if ALGORITHMS[config.algorithm].has_critic:
        host = PPOHost(config, policy, tokenizer, updates, reference, train, rewards)
    else:
        host = GRPOHost(config, policy, tokenizer, updates)
    for printer in (PrinterCallback, ProgressCallback):
        host.remove_callback(printer)  # rlhf.callbacks.logging prints to the console
    host.state.max_steps = updates
    host.state.is_world_process_zero = is_first()  # TRL sees one process; callbacks of transformers read this
    return host

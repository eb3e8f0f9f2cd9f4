"""TRL's trainers as hosts: they own the accelerator, optimizer, scheduler, state, callbacks and logging of a run.

PPOTrainer hosts an algorithm with a critic, GRPOTrainer one without. Their `train()` is not used. The golden tests
(tests/algorithms/test_golden.py) compare the training loop with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from rlhf.algorithms.table import ALGORITHMS
from rlhf.data.prompts import Prompt
from rlhf.models.actor_critic import Actor, ActorCritic, critic_backbone, with_value_head
from rlhf.models.logprobs import backbone_of
from rlhf.models.reference import Reference
from rlhf.models.trl_ppo import PPOConfig, PPOTrainer
from rlhf.settings.training import Config


class _SharedBackboneCritic(nn.Module):
    """The value model that TRL's __init__ requires. It shares the actor's backbone and value head."""

    base_model_prefix = "backbone"

    def __init__(self, policy: PreTrainedModel | PeftModel, value_head: nn.Module):
        super().__init__()
        self.backbone, self.score = backbone_of(policy), value_head


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
    ):
        self._container = with_value_head(policy)
        self._critic = critic_backbone(policy) if config.separate_critic else None
        super().__init__(
            args=PPOConfig(
                output_dir=config.run.output,
                per_device_train_batch_size=config.batch.batch_size,
                total_episodes=updates * config.batch.batch_size,
                learning_rate=config.optimizer.learning_rate,
                lr_scheduler_type=config.optimizer.lr_schedule,
                seed=config.run.seed,
                stop_token="eos",
                bf16=False,
                gradient_checkpointing=False,
                num_sample_generations=0,
                report_to="none",
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

    @property
    def actor(self) -> ActorCritic:
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
                output_dir=config.run.output,
                per_device_train_batch_size=2,  # TRL requires a group of 2; the training loop makes the minibatches
                num_generations=2,
                max_completion_length=config.sampling.max_new_tokens,
                temperature=config.sampling.temperature,
                num_iterations=1,  # the training loop repeats epochs over a rollout
                beta=0.0,  # otherwise TRL loads a second reference model
                learning_rate=config.optimizer.learning_rate,
                lr_scheduler_type=config.optimizer.lr_schedule,
                seed=config.run.seed,
                max_steps=updates,
                bf16=False,
                gradient_checkpointing=False,
                disable_dropout=True,
                report_to="none",
            ),
            train_dataset=Dataset.from_list([{"prompt": ""}]),  # TRL requires one; the training loop has the prompts
            processing_class=tokenizer,
        )
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()  # with 4-bit weights GRPOTrainer casts adapters to bfloat16
        self.actor = Actor(policy)
        self.create_optimizer_and_scheduler(updates)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)


Host = PPOHost | GRPOHost


def make_host(
    config: Config,
    policy: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    updates: int,
    reference: Reference,
    train: Sequence[Prompt],
) -> Host:
    """Construct the host for the algorithm of these settings.

    Args:
        config: settings of the run.
        policy: the policy, which the host wraps.
        tokenizer: the policy's tokenizer.
        updates: number of updates in the run.
        reference: the frozen reference, used with a critic only.
        train: training prompts, used with a critic only.
    """
    if ALGORITHMS[config.algorithm].has_critic:
        return PPOHost(config, policy, tokenizer, updates, reference, train)
    return GRPOHost(config, policy, tokenizer, updates)

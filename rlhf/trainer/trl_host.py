"""TRL's trainers as hosts: they own the accelerator, optimizer, scheduler, state, callbacks and logging of a run.

PPOTrainer hosts an algorithm with a critic, GRPOTrainer one without. Both are only constructed here; the golden tests
compare our training with their `train()`.
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
    """The value model that TRL's __init__ requires: a view of the actor's own backbone and value head."""

    base_model_prefix = "backbone"

    def __init__(self, policy: PreTrainedModel | PeftModel, value_head: nn.Module):
        super().__init__()
        self.backbone, self.score = backbone_of(policy), value_head


class PPOHost(PPOTrainer):
    """TRL's PPOTrainer around our actor and critic."""

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
        """TRL's __init__ calls this before accelerate prepares the model: here actor and critic become one module."""
        self.model = ActorCritic(self._container, self._critic)
        super().create_optimizer_and_scheduler(num_training_steps)

    @property
    def actor(self) -> ActorCritic:
        return self.accelerator.unwrap_model(self.model)


def no_reward(completions: list[str], **_) -> list[float]:
    """TRL's constructor requires a reward function. It is never called: the loop scores completions."""
    raise AssertionError("TRL called no_reward(), although the training loop scores the completions")


class GRPOHost(GRPOTrainer):
    """TRL's GRPOTrainer around our actor."""

    def __init__(
        self, config: Config, policy: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, updates: int
    ):
        super().__init__(
            model=policy,
            reward_funcs=[no_reward],
            args=GRPOConfig(
                output_dir=config.run.output,
                per_device_train_batch_size=2,  # TRL requires a group of two; our loop samples and cuts minibatches
                num_generations=2,
                max_completion_length=config.sampling.max_new_tokens,
                temperature=config.sampling.temperature,
                num_iterations=1,  # passes over a rollout are our loop's
                beta=0.0,  # TRL would load a second reference
                learning_rate=config.optimizer.learning_rate,
                lr_scheduler_type=config.optimizer.lr_schedule,
                seed=config.run.seed,
                max_steps=updates,
                bf16=False,
                gradient_checkpointing=False,
                disable_dropout=True,
                report_to="none",
            ),
            train_dataset=Dataset.from_list([{"prompt": ""}]),  # TRL requires one; our loop draws the prompts
            processing_class=tokenizer,
        )
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()  # over 4-bit weights TRL makes adapters bfloat16; PPO's are not
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
    """Construct the host of these settings' algorithm. TRL's PPOTrainer requires a reference and prompts, too."""
    if ALGORITHMS[config.algorithm].has_critic:
        return PPOHost(config, policy, tokenizer, updates, reference, train)
    return GRPOHost(config, policy, tokenizer, updates)

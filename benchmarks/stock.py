"""Builds stock TRL's trainers as in its documentation, with a callback that measures every update."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks.machine import seconds
from benchmarks.work import KL_COEF, LEARNING_RATE, SEED, TEMPERATURE, Work, letter, prompt_ids

if TYPE_CHECKING:
    from trl.experimental.ppo import PPOTrainer


class UpdateTimer(TrainerCallback):
    """Waits for a request before every update and sends its measurements after it.

    An update ends at the trainer's next `on_step_end` (with GRPO at the one after the last epoch over the rollout).
    TRL's work after `on_step_end` (with PPO: garbage collection and emptying the CUDA cache) counts to the next
    update, so each update includes it once. The first update is a warm-up.
    """

    def __init__(self, work: Work, reward_model: PreTrainedModel, wait: Callable, send: Callable[[dict], None]):
        self.work = work
        self.wait = wait
        self.send = send
        self.optimizer_steps = 0
        self.masks = []
        self.steps = work.ppo_epochs if work.algorithm == "grpo" else 1  # trainer steps per update
        register_optimizer_step_post_hook(self._count)
        reward_model.base_model.register_forward_pre_hook(self._record_mask, with_kwargs=True)

    def _count(self, *_) -> None:
        self.optimizer_steps += 1

    def _record_mask(self, module, _, kwargs: dict[str, Any]) -> None:
        self.masks.append(kwargs["attention_mask"])  # summed later, outside the measured time

    def on_train_begin(self, args, state, control, **_):
        self._next_update()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.steps:
            return
        spent = seconds(self.work.device) - self.start
        tokens = sum(int(mask.sum()) for mask in self.masks) - self.work.episodes * self.work.prompt_length
        self.send({"seconds": spent, "completion_tokens": tokens, "optimizer_steps": self.optimizer_steps})
        if state.global_step < self.work.updates * self.steps:
            self._next_update()

    def _next_update(self) -> None:
        self.masks.clear()
        self.wait()
        self.start = seconds(self.work.device)


def common(work: Work) -> dict[str, Any]:
    """Return the settings that both of TRL's trainers have."""
    return {
        "output_dir": work.output,
        "per_device_train_batch_size": work.episodes,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "temperature": TEMPERATURE,
        "bf16": work.bf16,
        "use_cpu": work.device == "cpu",
        "seed": SEED,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def load(kind: type, folder) -> PreTrainedModel:
    return kind.from_pretrained(folder, dtype=torch.float32)


def build(work: Work, wait: Callable, send: Callable[[dict], None]):
    """Return TRL's trainer for the work. Its train() waits before every update."""
    return {"ppo": build_ppo, "grpo": build_grpo}[work.algorithm](work, wait, send)


def build_ppo(work: Work, wait: Callable, send: Callable[[dict], None]) -> PPOTrainer:
    from trl.experimental.ppo import PPOConfig, PPOTrainer  # removed in TRL 1.13

    policy = load(AutoModelForCausalLM, work.policy)
    reward_model = load(AutoModelForSequenceClassification, work.reward_model)
    ids = prompt_ids(work, policy.config.vocab_size)
    return PPOTrainer(
        args=PPOConfig(
            total_episodes=work.updates * work.episodes,
            num_ppo_epochs=work.ppo_epochs,
            num_mini_batches=work.minibatches,
            response_length=work.reply_length,
            stop_token="eos",
            kl_coef=KL_COEF,
            num_sample_generations=0,
            **common(work),
        ),
        processing_class=AutoTokenizer.from_pretrained(work.policy, padding_side="left"),
        model=policy,
        ref_model=load(AutoModelForCausalLM, work.policy),
        reward_model=reward_model,
        value_model=load(AutoModelForSequenceClassification, work.reward_model),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        callbacks=[UpdateTimer(work, reward_model, wait, send)],
    )


def build_grpo(work: Work, wait: Callable, send: Callable[[dict], None]) -> GRPOTrainer:
    policy = load(AutoModelForCausalLM, work.policy)
    reward_model = load(AutoModelForSequenceClassification, work.reward_model)
    tokenizer = AutoTokenizer.from_pretrained(work.policy, padding_side="left")
    texts = ["".join(map(letter, ids)) for ids in prompt_ids(work, policy.config.vocab_size)]
    return GRPOTrainer(
        model=policy,
        reward_funcs=reward_model,
        reward_processing_classes=tokenizer,
        args=GRPOConfig(
            max_steps=work.updates * work.ppo_epochs,
            num_generations=work.K,
            num_iterations=work.ppo_epochs,  # optimizer steps per rollout
            steps_per_generation=1,
            max_completion_length=work.reply_length,
            beta=KL_COEF,  # above 0, so that TRL also runs a reference model
            scale_rewards="none",
            **common(work),
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        callbacks=[UpdateTimer(work, reward_model, wait, send)],
    )

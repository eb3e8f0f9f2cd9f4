"""Builds this project's trainer as a user would, and measures one update."""

from __future__ import annotations

from typing import Any

from benchmarks.machine import seconds
from benchmarks.work import KL_COEF, LEARNING_RATE, SEED, TEMPERATURE, Work, prompt_lengths, random_prompts
from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import make_config
from rlhf.data.prompts import PromptSets
from rlhf.data.tokenizer import load_tokenizer
from rlhf.distributed.join import join
from rlhf.models.device import memory_in_use, selected_device
from rlhf.rewards.build import make_rewards
from rlhf.rewards.find import find_rewards
from rlhf.settings.training import Config
from rlhf.setup.build import Components, build_trainer, load_start_policy
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.errors import RunError

PARTS = ("rollout", "score", "update")


def configuration(work: Work, **more: Any) -> Config:
    """Return the settings for the work, and `more`. No measured update includes an evaluation."""
    return make_config(
        algorithm=work.algorithm,
        actor_model=str(work.policy),
        rm_model=str(work.reward_model),
        **({"critic": work.critic} if work.critic != "shared" else {}),
        use_lora=work.lora,
        load_in_4bit=work.load_in_4bit,
        bf16=work.bf16,
        gradient_checkpointing=False,
        prompt_length=work.prompt_length,
        max_new_tokens=work.reply_length,
        temperature=TEMPERATURE,
        top_p=1.0,
        top_k=0,
        batch_size=work.batch_size,
        **({"K": work.K} if ALGORITHMS[work.algorithm].group_size > 1 else {}),
        ppo_epochs=work.ppo_epochs,
        minibatches=work.minibatches,
        kl_coef=KL_COEF,
        kl_schedule="fixed",
        learning_rate=LEARNING_RATE,
        lr_schedule="constant",
        num_iterations=work.updates + 1,
        eval_every=work.updates + 1,
        seed=SEED,
        output=work.output,
        **more,
    )


def build(work: Work, **more: Any) -> OnPolicyLoop:
    """Return a complete trainer for the work and the settings `more`, with reference model and reward model."""
    config = configuration(work, **more)
    join(timeout_s=300)
    device = selected_device()
    before = memory_in_use(device)
    start = str(work.policy)
    tokenizer = load_tokenizer(start)
    rewards, reward_model = make_rewards(config, find_rewards(config), tokenizer, device)
    policy = load_start_policy(config, start, tokenizer, device)
    prompts = random_prompts(prompt_lengths(work), policy.config.vocab_size, SEED)
    sets = PromptSets(train=prompts, evaluation=prompts[:1], too_long=0)
    return build_trainer(config, Components(tokenizer, sets, reward_model, rewards, policy, before))


def measured_update(trainer: OnPolicyLoop, update: int, device: str) -> dict[str, Any]:
    """Run one update. Return its seconds, those of its parts, its completion tokens, and optimizer steps so far.

    Raises RunError if the update was skipped.
    """
    tokens = trainer.progress.completion_tokens
    start = seconds(device)
    metrics = trainer.update_step(update)
    if trainer.progress.skipped:
        raise RunError(f"update {update} was skipped")
    return {
        "seconds": seconds(device) - start,
        "parts": {part: metrics[f"time/{part}_s"] for part in PARTS},
        "completion_tokens": trainer.progress.completion_tokens - tokens,
        "optimizer_steps": trainer.progress.optimizer_steps,
    }

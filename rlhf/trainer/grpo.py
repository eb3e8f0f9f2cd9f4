"""GRPO on TRL's GRPOTrainer: advantages relative to a group of completions, and no critic."""

from __future__ import annotations

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from rlhf.algorithms import objectives
from rlhf.models.actor_critic import Actor
from rlhf.rollout.completions import Rollout
from rlhf.trainer.batch import Batch
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.metrics import policy_stats


def no_reward(completions: list[str], **_) -> list[float]:
    """TRL's constructor requires a reward function. It is never called: rewards are scored by the loop."""
    raise AssertionError("TRL asked for rewards")


class GRPO(OnPolicyLoop, GRPOTrainer):
    """GRPO on TRL's GRPOTrainer, with `train()` in the steps of OnPolicyLoop, so that prompts are dealt, completions
    sampled and minibatches drawn as under PPO.

    TRL owns the accelerator, optimizer, scheduler, state, callbacks and logging. Advantages and losses are the
    equations in rlhf/algorithms/objectives.py; golden tests compare the weights with those of TRL's own train().
    """

    def build_trl(self, policy: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
        GRPOTrainer.__init__(
            self,
            model=policy,
            reward_funcs=[no_reward],
            args=self._trl_config(),
            train_dataset=Dataset.from_list([{"prompt": ""}]),  # TRL wants one; our loop deals the prompts
            processing_class=tokenizer,
        )
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()  # over 4-bit weights TRL makes adapters bfloat16; PPO's are not
        self._actor = Actor(policy)
        self.create_optimizer_and_scheduler(self.updates)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def _trl_config(self) -> GRPOConfig:
        c = self.config
        return GRPOConfig(
            output_dir=c.run.output,
            per_device_train_batch_size=c.episodes_per_update,
            num_generations=c.grpo.K,
            max_completion_length=c.sampling.reply_length,
            temperature=c.sampling.temperature,
            num_iterations=1,  # passes over a rollout are our loop's
            beta=0.0,  # TRL would load a second reference
            learning_rate=c.optimizer.learning_rate,
            lr_scheduler_type=c.optimizer.lr_schedule,
            seed=c.run.seed,
            max_steps=self.updates,
            bf16=False,
            gradient_checkpointing=False,
            disable_dropout=True,
            report_to="none",
        )

    @property
    def actor(self) -> Actor:
        return self._actor

    def advantages(self, rollout: Rollout, scores: Tensor) -> Batch:
        """Group advantages of scores (B,), less beta x each completion's KL if the reward is charged with it."""
        kl = objectives.kl_k1(rollout.logprobs, rollout.ref_logprobs, rollout.mask)
        rewards = scores - self.beta_in("reward") * kl.sum(1)
        groups = objectives.group_advantages(rewards, self.config.grpo.K, self.config.grpo.scale_rewards)
        advantages = torch.where(rollout.mask, groups.unsqueeze(1), 0.0)
        return Batch(rollout, kl, advantages, advantages)

    def losses(
        self, batch: Batch, rows: Tensor, now: tuple[Tensor, Tensor, Tensor | None], tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The GRPO loss of some rows, so that parts add up to the minibatch's, and its statistics, detached."""
        config, rollout, (logprobs, entropy, _) = self.config, batch.rollout, now
        mask, old = rollout.mask[rows], rollout.logprobs[rows]
        weights = objectives.grpo_token_weights(
            config.grpo.loss_type,
            mask.sum(1),
            self.minibatch_size,
            rollout.mask.sum() / config.batch.minibatches,
            config.sampling.reply_length,
        )
        per_token, clipped = objectives.grpo_policy_loss(
            logprobs, old, batch.weights[rows], mask, config.batch.clip_range, config.grpo.loss_type
        )
        policy_loss, clipfrac = (per_token * weights).sum(), objectives.masked_mean(clipped.float(), mask, tokens)
        kl = objectives.kl_loss_per_token(logprobs, old, rollout.ref_logprobs[rows], mask)
        loss = (
            policy_loss
            - config.batch.entropy_coef * objectives.masked_mean(entropy, mask, tokens)
            + self.beta_in("loss") * (kl * weights).sum()
        )
        return loss, {
            "loss": loss.detach(),
            **policy_stats(policy_loss, clipfrac, logprobs, entropy, batch, rows, tokens),
        }

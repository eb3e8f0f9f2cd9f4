"""PPO on TRL's PPOTrainer: a critic beside the actor, advantages by GAE, the clipped losses."""

from __future__ import annotations

from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.algorithms import objectives
from rlhf.models.actor_critic import ActorCritic, critic_backbone, with_value_head
from rlhf.models.logprobs import backbone_of
from rlhf.models.trl_ppo import PPOConfig, PPOTrainer
from rlhf.rollout.completions import Rollout
from rlhf.trainer.batch import Batch
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.metrics import policy_stats


class _SharedBackboneCritic(nn.Module):
    """The value model that TRL's __init__ asks for: a view of the actor's own backbone and value head."""

    base_model_prefix = "backbone"

    def __init__(self, policy: PreTrainedModel | PeftModel, value_head: nn.Module):
        super().__init__()
        self.backbone, self.score = backbone_of(policy), value_head


class PPO(OnPolicyLoop, PPOTrainer):
    """TRL's PPOTrainer around our actor and critic, with `train()` in the steps of OnPolicyLoop.

    What TRL 1.12 leaves out is done here and there: the gradient norm is clipped, minibatches step the optimizer,
    losses are means over a minibatch's tokens whatever the micro-batch, the score stands at EOS and not behind it.
    """

    def build_trl(self, policy: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._container = with_value_head(policy)
        self._critic = critic_backbone(policy) if self.config.separate_critic else None
        PPOTrainer.__init__(
            self,
            args=self._trl_config(),
            processing_class=tokenizer,
            model=policy,
            ref_model=self.reference.copy,
            reward_model=nn.Identity(),  # TRL wants a module; replies are scored by reward functions
            value_model=_SharedBackboneCritic(policy, self._container.v_head),
            train_dataset=Dataset.from_list([{"input_ids": list(p.ids)} for p in self.train_prompts]),
        )

    def _trl_config(self) -> PPOConfig:
        c = self.config
        return PPOConfig(
            output_dir=c.run.output,
            per_device_train_batch_size=c.batch.batch_size,
            total_episodes=self.updates * c.batch.batch_size,
            learning_rate=c.optimizer.learning_rate,
            lr_scheduler_type=c.optimizer.lr_schedule,
            seed=c.run.seed,
            stop_token="eos",
            bf16=False,
            gradient_checkpointing=False,
            num_sample_generations=0,
            report_to="none",
        )

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """TRL's __init__ calls this before accelerate prepares the model: here actor and critic get one body."""
        self.model = ActorCritic(self._container, self._critic)
        super().create_optimizer_and_scheduler(num_training_steps)

    @property
    def actor(self) -> ActorCritic:
        return self.accelerator.unwrap_model(self.model)

    def advantages(self, rollout: Rollout, scores: Tensor) -> Batch:
        """Rewards per token from scores (B,) and KL, then GAE."""
        ppo, mask = self.config.ppo, rollout.mask
        kl = objectives.kl_k1(rollout.logprobs, rollout.ref_logprobs, mask)
        rewards = objectives.shape_rewards(kl, scores, mask, self.beta_in("reward"), ppo.kl_penalty_at)
        if ppo.whiten_rewards:
            rewards = objectives.whiten(rewards, mask, shift_mean=False)
        advantages, returns = objectives.generalized_advantage_estimate(
            rewards, rollout.values, mask, ppo.gamma, ppo.lam
        )
        weights = objectives.whiten(advantages, mask) if ppo.whiten_advantages else advantages
        return Batch(rollout, kl, advantages, weights, returns, rewards)

    def losses(
        self, batch: Batch, rows: Tensor, now: tuple[Tensor, Tensor, Tensor | None], tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The PPO loss of some rows, each term divided by the minibatch's `tokens`, and its statistics, detached."""
        config, rollout, (logprobs, entropy, values) = self.config, batch.rollout, now
        mask, entropy_coef = rollout.mask[rows], config.batch.entropy_coef
        policy_loss, clipfrac = objectives.clipped_policy_loss(
            logprobs, rollout.logprobs[rows], batch.weights[rows], mask, config.batch.clip_range, tokens
        )
        value_loss, value_clipfrac = objectives.clipped_value_loss(
            values, rollout.values[rows], batch.returns[rows], mask, config.ppo.value_clip_range, tokens
        )
        kl = objectives.kl_loss_per_token(logprobs, rollout.logprobs[rows], rollout.ref_logprobs[rows], mask)
        kl_loss = objectives.masked_mean(kl, mask, tokens)
        loss = (
            policy_loss
            + config.ppo.value_coef * value_loss
            - entropy_coef * objectives.masked_mean(entropy, mask, tokens)
            + self.beta_in("loss") * kl_loss
        )
        return loss, {
            "loss": loss.detach(),
            **policy_stats(policy_loss, clipfrac, logprobs, entropy, batch, rows, tokens),
            "value/loss": value_loss.detach(),
            "value/clipfrac": value_clipfrac.detach(),
        }

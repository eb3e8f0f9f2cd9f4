"""PPO on TRL's PPOTrainer, with `train()` in named steps: rollout, score, advantages, update, finish."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from config import Config
from rlhf import objectives
from rlhf.actor_critic import ActorCritic, Reference, backbone_of, with_value_head
from rlhf.checkpoints import save_policy
from rlhf.errors import RunError
from rlhf.evaluation import Evaluation, FixedText, evaluate, fixed_text
from rlhf.metrics import Batch, memory_in_use, rollout_metrics
from rlhf.models import autocast, autocast_dtype
from rlhf.prompts import Prompt
from rlhf.rewards import RewardFunction, score_replies
from rlhf.rollout import Rollout, generator, measure, sample_replies, uniforms
from rlhf.trl_ppo import PPOConfig, PPOTrainer


class _SharedBackboneCritic(nn.Module):
    """The value model that TRL's __init__ asks for: a view of the actor's own backbone and value head."""

    base_model_prefix = "backbone"

    def __init__(self, policy: PreTrainedModel | PeftModel, value_head: nn.Module):
        super().__init__()
        self.backbone, self.score = backbone_of(policy), value_head


def updates_planned(config: Config, prompts: int) -> int:
    """Updates in a run over `prompts` training prompts: --num-iterations, or --epochs passes, the rest rounded up."""
    if config.run.num_iterations is not None:
        return config.run.num_iterations
    return max(1, -(-int(config.run.epochs * prompts) // config.ppo.batch_size))


class PPO(PPOTrainer):
    """TRL's PPOTrainer around one backbone. Randomness comes from (seed, update, purpose), never a global stream.

    What TRL 1.12 leaves out is done here: the gradient norm is clipped, minibatches step the optimizer, losses are
    means over a minibatch's tokens whatever the micro-batch, the score stands at EOS and not behind it.
    """

    def __init__(
        self,
        config: Config,
        policy: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        train: Sequence[Prompt],
        evaluation: Sequence[Prompt],
        reward_functions: Sequence[RewardFunction],
        callbacks: Sequence[TrainerCallback] = (),
    ):
        self.config = config
        self.train_prompts, self.evaluation_prompts = list(train), list(evaluation)
        self.reward_functions = list(reward_functions)
        self.updates = updates_planned(config, len(self.train_prompts))
        self.kl_coef = config.kl.kl_coef
        self.optimizer_steps, self.peak_memory = 0, 0
        self.evaluations: list[Evaluation] = []
        self.sampling = config.sampling
        self.dtype = autocast_dtype(config.model.bf16, PartialState().device)
        self.reference = Reference(policy, self.dtype)
        self._container = with_value_head(policy)
        super().__init__(
            args=self._trl_config(),
            processing_class=tokenizer,
            model=policy,
            ref_model=self.reference.copy,
            reward_model=nn.Identity(),  # TRL wants a module; replies are scored by reward functions
            value_model=_SharedBackboneCritic(policy, self._container.v_head),
            train_dataset=Dataset.from_list([{"input_ids": list(p.ids)} for p in self.train_prompts]),
            callbacks=list(callbacks),
        )
        for printer in (PrinterCallback, ProgressCallback):
            self.remove_callback(printer)
        self.state.max_steps = self.updates

    def _trl_config(self) -> PPOConfig:
        c = self.config
        return PPOConfig(
            output_dir=c.run.output,
            per_device_train_batch_size=c.ppo.batch_size,
            total_episodes=self.updates * c.ppo.batch_size,
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
        self.model = ActorCritic(self._container)
        super().create_optimizer_and_scheduler(num_training_steps)

    # --- the run -----------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, float]:
        """All updates; returns the last update's metrics together with the last evaluation's."""
        self.model.eval()  # no dropout anywhere, and rollouts need their cache
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        self.evaluate()
        metrics: dict[str, float] = {}
        for update in range(1, self.updates + 1):
            metrics = self.one_update(update)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return {**metrics, **self.evaluations[-1].metrics()}

    def one_update(self, update: int) -> dict[str, float]:
        """One rollout batch and all its optimizer steps; returns what was logged."""
        begun = time.perf_counter()
        rollout = self.rollout(self.prompts_of(update), update, "rollout")
        rolled = time.perf_counter()
        scores, raw = self.score(rollout)
        scored = time.perf_counter()
        batch = self.advantages(rollout, scores)
        stats = self.update(batch, update)
        times = {
            "time/rollout_s": rolled - begun,
            "time/score_s": scored - rolled,
            "time/update_s": time.perf_counter() - scored,
        }
        return self.finish_step(update, {**rollout_metrics(batch, raw, self.accelerator), **stats, **times})

    def prompts_of(self, update: int) -> list[tuple[int, Prompt]]:
        """This update's episodes: their numbers in the run and their prompts.

        The prompts are dealt pass by pass, each pass in an order of its own; a batch may span two passes, so that
        every batch is full and every optimizer step planned is taken.
        """
        size, count = self.config.ppo.batch_size, len(self.train_prompts)
        episodes = range((update - 1) * size, update * size)
        orders = {
            e // count: generator(self.config.run.seed, e // count, "order").permutation(count) for e in episodes
        }
        mine = episodes[self.accelerator.process_index :: self.accelerator.num_processes]
        return [(e, self.train_prompts[orders[e // count][e % count]]) for e in mine]

    def rollout(self, episodes: Sequence[tuple[int, Prompt]], update: int, purpose: str) -> Rollout:
        """Sample a reply to every prompt; log-probs, values and reference log-probs under the training forward."""
        prompts = [prompt for _, prompt in episodes]
        uniform = uniforms(self.config.run.seed, update, purpose, [e for e, _ in episodes], self.sampling.reply_length)
        actor_critic = self.accelerator.unwrap_model(self.model)
        actor_critic.eval()
        with autocast(self.accelerator.device, self.dtype):
            replies = sample_replies(
                actor_critic.policy,
                prompts,
                uniform,
                self.sampling,
                eos=self.processing_class.eos_token_id,
                pad=self.processing_class.pad_token_id,
                device=self.accelerator.device,
            )
            rows = self.config.ppo.micro_batch_size or self.config.ppo.batch_size
            measured = measure(actor_critic, self.reference, replies, self.sampling.temperature, rows)
        return Rollout(replies, prompts, replies.texts(self.processing_class), *measured)

    def score(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Scores (B,) with the missing-EOS penalty taken off, and as the reward functions gave them."""
        ended = rollout.replies.ended
        given = score_replies(self.reward_functions, rollout.prompts, rollout.texts, ended.tolist())
        raw = torch.tensor(given, dtype=torch.float32, device=ended.device)
        return raw - self.config.ppo.missing_eos_penalty * (~ended).float(), raw

    def advantages(self, rollout: Rollout, scores: Tensor) -> Batch:
        """Rewards per token from scores and KL, then GAE."""
        ppo, mask = self.config.ppo, rollout.mask
        kl = objectives.kl_k1(rollout.logprobs, rollout.ref_logprobs, mask)
        rewards = objectives.shape_rewards(kl, scores, mask, self.kl_coef, self.config.kl.kl_penalty_at)
        if ppo.whiten_rewards:
            rewards = objectives.whiten(rewards, mask, shift_mean=False)
        advantages, returns = objectives.generalized_advantage_estimate(
            rewards, rollout.values, mask, ppo.gamma, ppo.lam
        )
        weights = objectives.whiten(advantages, mask) if ppo.whiten_advantages else advantages
        return Batch(rollout, scores, kl, advantages, weights, returns)

    # --- optimization ------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, update: int) -> dict[str, float]:
        """E passes of shuffled minibatches, an optimizer step each; returns their mean statistics."""
        # checkpointing works in train mode only, sampling in eval mode only; dropout is off in both
        self.model.train(self.config.model.gradient_checkpointing)
        self.learning_rate, steps = self.lr_scheduler.get_last_lr()[0], []
        for epoch in range(self.config.ppo.ppo_epochs):
            for rows in self.minibatches(update, epoch):
                steps.append(self.optimizer_step(batch, rows))
        self.lr_scheduler.step()
        means = torch.stack([torch.stack(list(s.values())) for s in steps]).mean(0).tolist()
        stats = dict(zip(steps[0], means, strict=True))
        if not math.isfinite(stats["loss"]) or not math.isfinite(stats["policy/grad_norm"]):
            raise RunError(
                f"the loss or its gradient is not finite: update {update}, loss {stats['loss']}. Nothing is saved; "
                "try a smaller --learning-rate or --no-bf16"
            )
        return stats

    def minibatches(self, update: int, epoch: int) -> Iterator[Tensor]:
        """Rows of each minibatch, shuffled by (seed, update, epoch)."""
        size = self.config.ppo.batch_size // self.accelerator.num_processes
        order = torch.from_numpy(generator(self.config.run.seed, update, "minibatches", epoch).permutation(size))
        return iter(order.to(self.accelerator.device).split(size // self.config.ppo.minibatches))

    def optimizer_step(self, batch: Batch, rows: Tensor) -> dict[str, Tensor]:
        """Gradients of one minibatch, micro-batch by micro-batch, clipped; then one step."""
        tokens = self.accelerator.reduce(batch.rollout.mask[rows].sum().float(), reduction="mean")
        stats: dict[str, Tensor] = {}
        for part in rows.split(self.config.ppo.micro_batch_size or len(rows)):
            loss, part_stats = self.losses(batch, part, tokens)
            self.accelerator.backward(loss)
            stats = {k: stats.get(k, 0) + v for k, v in part_stats.items()}
        stats["policy/grad_norm"] = torch.as_tensor(
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        ).to(tokens.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer_steps += 1
        return stats

    def losses(self, batch: Batch, rows: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The PPO loss of some rows, each term divided by the minibatch's `tokens`, and its statistics, detached."""
        ppo, rollout, replies = self.config.ppo, batch.rollout, batch.rollout.replies
        mask, old = rollout.mask[rows], rollout.logprobs[rows]
        with autocast(self.accelerator.device, self.dtype):
            logprobs, entropy, values = self.model(
                replies.ids[rows],
                replies.attention[rows],
                mask,
                self.sampling.temperature,
                replies.allowed(rows),
                entropy="gradient" if ppo.entropy_coef > 0 else "value",
            )
        policy_loss, policy_clipfrac = objectives.clipped_policy_loss(
            logprobs, old, batch.weights[rows], mask, ppo.clip_range, tokens
        )
        value_loss, value_clipfrac = objectives.clipped_value_loss(
            values, rollout.values[rows], batch.returns[rows], mask, ppo.value_clip_range, tokens
        )
        mean_entropy = objectives.masked_mean(entropy, mask, tokens)
        loss = policy_loss + ppo.value_coef * value_loss - ppo.entropy_coef * mean_entropy
        stats = {
            "loss": loss,
            "policy/loss": policy_loss,
            "policy/clipfrac": policy_clipfrac,
            "policy/approx_kl": objectives.approximate_kl(logprobs, old, mask, tokens),
            "policy/entropy": mean_entropy,
            "policy/ratio": objectives.masked_mean(torch.exp(logprobs - old), mask, tokens),
            "value/loss": value_loss,
            "value/clipfrac": value_clipfrac,
        }
        return loss, {name: value.detach() for name, value in stats.items()}

    # --- after the update --------------------------------------------------------------------------------------------

    def finish_step(self, update: int, metrics: dict[str, float]) -> dict[str, float]:
        """Log, so that callbacks hear of it (KL control sets the next update's beta); then evaluate where due."""
        spent = sum(v for k, v in metrics.items() if k.startswith("time/"))
        metrics["kl_coef"], metrics["learning_rate"] = self.kl_coef, self.learning_rate
        metrics["throughput/tokens_per_s"] = self.accelerator.num_processes * metrics.pop("reply/tokens") / spent
        metrics["throughput/episodes_per_s"] = self.config.ppo.batch_size / spent
        metrics["optimizer_steps"] = float(self.optimizer_steps)
        self.peak_memory = max(self.peak_memory, memory_in_use(self.accelerator.device))
        metrics["memory/peak_gib"] = self.peak_memory / 2**30
        self.state.global_step = update
        self.state.episode = update * self.config.ppo.batch_size
        self.state.epoch = self.state.episode / len(self.train_prompts)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if update % self.config.run.eval_every == 0 or update == self.updates:
            self.evaluate()
        return metrics

    def set_kl_coef(self, beta: float) -> None:
        """The one door through which a callback may steer training: beta of the next update."""
        self.kl_coef = beta

    def evaluate(self) -> Evaluation:
        """Sample the evaluation prompts with the same random numbers every time, score, log and keep the result."""
        episodes = list(enumerate(self.evaluation_prompts))
        rows = 32
        parts = [self.rollout(episodes[i : i + rows], 0, "evaluate") for i in range(0, len(episodes), rows)]
        if not self.evaluations:
            replies = [(t, e) for p in parts for t, e in zip(p.texts, p.replies.ended.tolist(), strict=True)]
            self.text: FixedText = fixed_text(self.processing_class, self.evaluation_prompts, replies, 128)
        result = evaluate(
            parts,
            self.state.global_step,
            self.accelerator.unwrap_model(self.model),
            self.reward_functions,
            self.text,
            self.processing_class.pad_token_id,
            self.dtype,
        )
        self.evaluations.append(result)
        result.write(Path(self.config.run.output) / "samples", self.evaluation_prompts)
        self.log(result.metrics())
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Policy (or adapter) and tokenizer as plain Hugging Face files, the value head beside them."""
        save_policy(
            self.accelerator.unwrap_model(self.model), self.processing_class, Path(output_dir or self.args.output_dir)
        )

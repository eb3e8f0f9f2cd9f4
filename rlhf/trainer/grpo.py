"""GRPO on TRL's GRPOTrainer: group advantages and the loss are TRL's; the run around them is the one PPO has."""

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
from rlhf.trainer.metrics import policy_metrics


def score_given(score: list[float], **_) -> list[float]:
    """For TRL, a reward function: the scores that came with the rollout."""
    return score


def sequence_kl(kl: list[float], **_) -> list[float]:
    """For TRL, a reward function of weight -beta: each reply's KL to the reference, nats, k1."""
    return kl


class GRPO(OnPolicyLoop, GRPOTrainer):
    """TRL's GRPOTrainer, with `train()` in the steps of OnPolicyLoop, so that prompts are dealt, replies sampled and
    minibatches drawn as under PPO.

    TRL receives finished rollouts (through `rollout_func`) and scores (through reward functions that return them), and
    computes advantages and loss: `_generate_and_score_completions` and `_compute_loss`. Its forward pass is replaced.
    We set its `reward_weights`, `beta` (always 0) and `current_gradient_accumulation_steps`, and clear its `_metrics`.
    """

    def build_trl(self, policy: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
        GRPOTrainer.__init__(
            self,
            model=policy,
            reward_funcs=[score_given, sequence_kl],
            args=self._trl_config(),
            train_dataset=Dataset.from_list([{"prompt": ""}]),  # TRL wants one; our loop deals the prompts
            processing_class=tokenizer,
            rollout_func=self._handed_on,
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
            beta=0.0,  # TRL would load a second reference; `losses` adds the KL term
            reward_weights=[1.0, 0.0],
            epsilon=c.batch.clip_range,
            epsilon_high=1 + c.batch.clip_range if c.grpo.loss_type == "cispo" else None,  # there, the largest weight
            importance_sampling_level="sequence" if c.grpo.loss_type == "luspo" else "token",
            scale_rewards=c.grpo.scale_rewards,
            loss_type=c.grpo.loss_type,
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
        """TRL's group advantages of scores (B,), less beta x each reply's KL where the reward is charged with it."""
        kl = objectives.kl_k1(rollout.logprobs, rollout.ref_logprobs, rollout.mask)
        self._handing = (rollout, scores, kl)
        self.reward_weights = torch.tensor([1.0, -self.beta_in("reward")])
        self.model.train()  # TRL keeps two books, for training and evaluation
        rows = [{"prompt": ""} for _ in rollout.texts]  # TRL writes the extra fields into them
        given = self._generate_and_score_completions(rows)
        self._handing = None
        advantages = torch.where(rollout.mask, given["advantages"].unsqueeze(1), 0.0)
        return Batch(rollout, kl, advantages, advantages)

    def _handed_on(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        """TRL's `rollout_func`: the rollout that we have made. Extra fields reach the reward functions."""
        rollout, scores, kl = self._handing
        lengths = rollout.replies.lengths.tolist()
        return {
            "prompt_ids": [list(p.ids) for p in rollout.prompts],
            "completion_ids": rollout.replies.rows(),
            "logprobs": [row[:n] for row, n in zip(rollout.logprobs.tolist(), lengths, strict=True)],
            "score": scores.tolist(),
            "kl": kl.sum(1).tolist(),
        }

    def losses(
        self, batch: Batch, rows: Tensor, now: tuple[Tensor, Tensor, Tensor | None], tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """TRL's loss of some rows, scaled so that parts add up to the minibatch's; statistics as PPO's, detached."""
        rollout, replies, (logprobs, entropy, _) = batch.rollout, batch.rollout.replies, now
        mask, entropy_coef = rollout.mask[rows], self.config.batch.entropy_coef
        parts = self.minibatch_size / len(rows)
        self.current_gradient_accumulation_steps = parts  # TRL divides by it: here, by the part's share
        self._given = logprobs, entropy
        loss = self._compute_loss(
            self.model,
            {
                "prompt_ids": replies.prompt_ids[rows],
                "prompt_mask": replies.prompt_mask[rows].long(),
                "completion_ids": replies.reply_ids[rows],
                "completion_mask": mask.long(),
                "advantages": batch.weights[rows],
                "old_per_token_logps": rollout.logprobs[rows],
                "num_items_in_batch": rollout.mask.sum() / self.config.batch.minibatches / parts,
            },
        )
        self._metrics["train"].clear()  # TRL keeps its own figures until its own log
        self._given = None
        beta = self.beta_in("loss")
        if beta:
            kl = objectives.kl_loss_per_token(logprobs, rollout.logprobs[rows], rollout.ref_logprobs[rows], mask)
            loss = loss + beta * (kl * self.token_weights(rollout.mask, rows)).sum()
        loss = loss - entropy_coef * objectives.masked_mean(entropy, mask, tokens)
        _, stats = policy_metrics(
            logprobs.detach(), entropy.detach(), batch, rows, self.config.batch.clip_range, tokens
        )
        return loss, {"loss": loss.detach(), **stats}

    def token_weights(self, mask: Tensor, rows: Tensor) -> Tensor:
        """What one token's loss counts in the minibatch's: 1 / the divisor of TRL's policy term, (n, T) or (n, 1).

        `mask` (B, T) is the rollout's, `rows` (n,) are some of the minibatch's. TRL 1.12 divides by the tokens of the
        rollout / minibatches (dapo, cispo, vespo), by each completion's tokens x completions (grpo, sapo), by the
        longest possible completion x completions (dr_grpo), or by completions alone (luspo).
        """
        loss_type, size = self.config.grpo.loss_type, self.minibatch_size
        if loss_type in ("dapo", "cispo", "vespo"):
            return self.config.batch.minibatches / mask.sum().expand(len(rows), 1)
        tokens = {
            "grpo": mask[rows].sum(1, keepdim=True),
            "sapo": mask[rows].sum(1, keepdim=True),
            "dr_grpo": mask.new_full((len(rows), 1), self.config.sampling.reply_length, dtype=torch.long),
            "luspo": mask.new_ones((len(rows), 1), dtype=torch.long),
        }
        return 1 / (tokens[loss_type] * size)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_, **__
    ) -> tuple[Tensor, Tensor, None]:
        """In place of TRL's forward, ours, which measured the rollout, too, so that the first ratio is 1: positions
        from the mask, nucleus, precision, and logits on reply tokens only. Log-probs and entropies (B, T)."""
        logprobs, entropy = self._given
        return logprobs, entropy.detach(), None

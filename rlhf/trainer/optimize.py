"""The optimizer steps of an update: epochs over shuffled minibatches, gradient accumulation, gradient clipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.algorithms.experience import Experience
from rlhf.algorithms.policy_gradient import MEANS
from rlhf.distributed.gradients import add_up_gradients
from rlhf.distributed.group import add_up
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast
from rlhf.models.logprobs import base_of
from rlhf.models.packing import MicroBatch, on_device
from rlhf.settings.training import Config
from rlhf.trainer.passes import ForwardPasses, Pass
from rlhf.trainer.progress import Progress
from rlhf.trainer.safety import check_step
from rlhf.trainer.trl_host import Host
from rlhf.utils.processes import rank
from rlhf.utils.rng import rng_for


@dataclass
class PolicyOptimizer:
    """Takes the optimizer steps of an update, with the algorithm's loss."""

    config: Config
    host: Host
    algorithm: Any
    passes: ForwardPasses
    progress: Progress

    def run(self, experience: Experience, update: int) -> dict[str, float]:
        """Run `ppo_epochs` epochs over the experience, with one optimizer step per minibatch.

        Returns the statistics averaged over the optimizer steps. Raises SkipUpdate as `step` does.
        """
        self.host.model.train()  # for gradient checkpointing and LoRA dropout; the model's other dropout is disabled
        rates = self.host.lr_scheduler.get_last_lr()  # of each parameter group; those of the critic are the last ones
        steps = []
        for epoch in range(self.config.batch.ppo_epochs):
            for rows in self.minibatches(update, epoch):
                self.seed_dropout(update, len(steps))
                steps.append(self.step(experience, rows, update, epoch == 0))
        self.host.lr_scheduler.step()
        most = max(steps, key=len)  # later epochs have no entropy, steps without a completion no means
        found = {name: torch.stack([stats[name] for stats in steps if name in stats]) for name in most}
        means = torch.stack([values.mean() for values in found.values()]).tolist()
        stats = dict(zip(found, means, strict=True)) | {"learning_rate": rates[0]}
        if self.config.critic.critic_learning_rate is not None:
            stats["learning_rate/critic"] = rates[-1]
        return stats

    def seed_dropout(self, update: int, step: int) -> None:
        """Seed the adapters' dropout by (seed, update, number of the optimizer step in the update)."""
        self.host.actor.dropout.seed = int(rng_for(self.config.run.seed, update, "dropout", step).integers(2**63))

    def minibatches(self, update: int, epoch: int) -> Iterator[list[int]]:
        """Yields the rows of each minibatch, shuffled by (seed, update, epoch)."""
        episodes = self.config.episodes_per_update
        size = self.config.minibatch_size
        # detail 33: a new order in each epoch (37 details, 6). Otherwise the same completions always share a step.
        order = rng_for(self.config.run.seed, update, "minibatches", epoch).permutation(episodes).tolist()
        return (order[start : start + size] for start in range(0, episodes, size))

    def step(
        self, experience: Experience, rows: Sequence[int], update: int, entropy: bool = True
    ) -> dict[str, Tensor]:
        """Take one optimizer step on one minibatch; returns its statistics. Raises SkipUpdate before the step if the
        loss or the gradient norm is not finite, or the mean ratio is out of range. `entropy` as in `gradients`."""
        only_critic = update <= self.config.critic.critic_warmup
        stats = self.minibatch_gradients(experience, rows, entropy, only_critic)
        check_step(stats, rows)
        self.progress.last_good_update = update - 1  # its weights gave these gradients
        with self.passes.raise_on_oom("the optimizer step"):
            self.host.optimizer.step()
        self.passes.weights.refresh()
        self.host.optimizer.zero_grad()
        self.progress.optimizer_steps += 1
        return stats

    def minibatch_gradients(
        self, experience: Experience, rows: Sequence[int], entropy: bool = True, only_critic: bool = False
    ) -> dict[str, Tensor]:
        """Accumulate the gradients of a minibatch over its micro-batches, and clip them; returns its statistics. Each
        process computes those of its share of the rows, and they are added up. `entropy` as in `gradients`;
        `only_critic`: the policy gets no gradients.

        Completions without a gradient are not computed. They count in the divisors of the loss, but not in the
        statistics that are means. If there are no others, the gradients are 0.
        """
        completions = experience.completions
        tokens = self.tokens_in_loss(experience, rows)
        counted = [row for row in rows if experience.counted is None or experience.counted[row]]
        own = completions.shares(counted)[rank()]

        def all_micro_batches(passes: Iterator[Pass]) -> dict[str, Tensor]:
            stats: dict[str, Tensor] = {}
            self.host.optimizer.zero_grad()  # removes the gradients of an attempt that ran out of memory
            for one in passes:
                add(stats, self.gradients(experience, one, tokens, entropy))
                del one  # frees its memory before the next pass
            return stats

        stats = {}
        error = None
        try:
            stats = self.passes.over(completions, own, all_micro_batches, "the backward pass")
        except Exception as found:
            error = found
        stats = add_up_gradients(self.host.model.parameters(), stats, error)
        if experience.deferred:
            known = torch.zeros_like(experience.logprobs)
            known[own] = experience.logprobs[own]
            experience.logprobs[counted] = add_up(known)[counted]
            experience.deferred = False
        if counted:
            of_tokens = tokens / self.tokens_in_loss(experience, counted)
            of_completions = self.config.minibatch_size / len(counted)
            for name in stats.keys() & MEANS:
                stats[name] = stats[name] * (of_completions if name in self.algorithm.per_completion else of_tokens)
        else:
            zero = torch.zeros_like(tokens)
            stats = {"loss": zero, "policy/loss": zero, "policy/ratio": zero + 1}
            for weight in self.host.model.parameters():
                # not None: Adam's momentum moves the weights in this step, too
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        if only_critic:
            for weight in self.host.actor.policy.parameters():
                weight.grad = None  # with a gradient of 0, momentum and weight decay would still move the weight
        # detail 34: clipped (37 details, 11). Otherwise one bad minibatch can move the weights far.
        norm = self.host.accelerator.clip_grad_norm_(self.host.model.parameters(), self.config.optimizer.max_grad_norm)
        return {**stats, "policy/grad_norm": torch.as_tensor(norm).to(self.passes.device)}

    def tokens_in_loss(self, experience: Experience, rows: Sequence[int]) -> Tensor:
        """Return the number of tokens of these rows in the loss, at least 1, a scalar."""
        chosen = on_device(self.passes.device, np.array(rows))
        return experience.loss_mask.index_select(0, chosen).sum().float().clamp(min=1)

    def gradients(self, experience: Experience, forward: Pass, tokens: Tensor, entropy: bool = True) -> dict:
        """Add the gradients of one micro-batch to the weights' gradients; returns its statistics.

        The language-model head and the loss run chunk by chunk, and each chunk's backward pass stops at the hidden
        states. So the logits of only one chunk are in memory. Finally one backward pass of the backbone uses the
        gradients of all chunks. `tokens` is the number of tokens of the minibatch in the loss. Without `entropy`, the
        statistics have none, unless the loss has an entropy bonus.
        """
        how = "gradient" if self.config.batch.entropy_coef > 0 else "value" if entropy else "none"
        micro_batch, hidden = forward
        allowed = experience.completions.allowed_mask(micro_batch)
        leaf = hidden.detach().requires_grad_()
        stats: dict[str, Tensor] = {}
        for rows, positions in self.chunks(micro_batch):
            limits = None if allowed is None else allowed[positions]
            with autocast(self.passes.device, self.passes.dtype):
                outputs = self.host.actor.forward_heads(
                    leaf[positions], micro_batch.tokens[positions], micro_batch.mask[rows],
                    self.passes.temperature, limits, how,
                )  # fmt: skip
            index = micro_batch.row_index[rows]
            if experience.deferred:
                # a pass before the step would only repeat this one
                experience.logprobs.index_copy_(0, index, outputs.logprobs.detach())
            loss, part = self.algorithm.loss(experience, index, outputs, tokens)
            self.host.accelerator.backward(loss)
            add(stats, part)
        hidden.backward(leaf.grad)
        if how == "none":
            stats.pop("policy/entropy", None)
        return stats

    def chunks(self, micro_batch: MicroBatch) -> Iterator[tuple[slice, slice]]:
        """Yields chunks of whole completions whose logits fit the device's budget, as slices of rows and of tokens."""
        vocabulary = base_of(self.host.actor.policy).get_input_embeddings().num_embeddings
        most = max(1, budget_of(micro_batch.tokens.device).logits_per_chunk // vocabulary)
        first = 0
        start = 0
        end = 0
        for row, length in enumerate(micro_batch.lengths):
            if end > start and end + length - start > most:
                yield slice(first, row), slice(start, end)
                first = row
                start = end
            end += length
        yield slice(first, len(micro_batch.lengths)), slice(start, end)


def add(sums: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
    """Add each value of `parts` to the value of the same name in `sums`."""
    for name, part in parts.items():
        sums[name] = sums[name] + part if name in sums else part

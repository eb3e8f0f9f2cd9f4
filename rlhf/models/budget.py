"""How much work a device does at a time: all batch sizes that are not settings, in one `Budget` per device type.

These numbers do not change the algorithm. They change memory, speed, and the order in which floats are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rlhf.settings.training import Config


@dataclass(frozen=True)
class Budget:
    """The largest batch for each kind of work."""

    # prompt and completion tokens of one forward pass, if --micro-batch-tokens is 0. With few tokens a GPU is idle,
    # and a CPU spends much of its time on adding up the gradients of micro-batches. Activations take memory.
    tokens_per_micro_batch: int
    # logits (tokens x vocabulary) that are in memory together: in bfloat16 64 MiB on a CPU, 256 MiB on a GPU. The
    # logits of a whole micro-batch would be its largest tensor.
    logits_per_chunk: int
    # of these, logits converted to float32 together: as many as fit a CPU's caches; on a GPU the whole chunk
    floats_per_chunk: int
    # completions sampled at a time, if --rollout-slots is 0. More are faster, but take memory
    rollout_slots: int
    # prompts sampled together in an evaluation or a calibration, and texts in one forward pass of the perplexity
    eval_batch_size: int = 32
    # completions that evaluate_generations.py samples and evaluates together; limits its masks of allowed tokens
    generation_batch_size: int = 64

    def scored_together(self, longest: int) -> int:
        """Return how many texts of at most `longest` tokens the reward model scores in one forward pass: 32, or
        as many as have the tokens of a micro-batch, up to `eval_batch_size`."""
        return min(self.eval_batch_size, max(32, self.tokens_per_micro_batch // longest))


VLLM_MEMORY_SHARE = 0.3  # share of the GPU's memory that vLLM reserves at the start

BUDGETS = {
    "cpu": Budget(
        tokens_per_micro_batch=2_048,
        logits_per_chunk=2**25,
        floats_per_chunk=2**20,
        rollout_slots=64,
    ),
    "cuda": Budget(
        tokens_per_micro_batch=16_384,
        logits_per_chunk=2**27,
        floats_per_chunk=2**27,
        rollout_slots=256,
    ),
}


def budget_of(device: torch.device, config: Config | None = None) -> Budget:
    """Return the budget of a device type, with the tokens and the slots that `config` sets. An evaluation samples as
    many completions together as there are slots. Other devices than CPUs and CUDA GPUs have the budget of a CPU."""
    budget = BUDGETS["cuda" if device.type == "cuda" else "cpu"]
    if config is None:
        return budget
    tokens = config.batch.micro_batch_tokens
    slots = config.speed.rollout_slots
    together = min(slots, 256)
    return replace(
        budget,
        tokens_per_micro_batch=tokens or budget.tokens_per_micro_batch,
        rollout_slots=slots or budget.rollout_slots,
        eval_batch_size=max(together, budget.eval_batch_size),
        generation_batch_size=max(together, budget.generation_batch_size),
    )

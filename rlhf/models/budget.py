"""How much a device computes at once. Every batch size that is no setting is here, with one `Budget` per device type.

None of these numbers changes the algorithm. They decide memory and speed, and in which order floats are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Budget:
    """The largest amount of each kind of work that is computed together."""

    # tokens, prompt and completion, of one forward pass if --micro-batch-size is 0. Few tokens leave a GPU idle; more
    # than a thousand make a CPU no faster, and their activations take memory.
    tokens_per_micro_batch: int
    # logits (tokens x vocabulary) that exist together in the forward's precision: in bfloat16 64 MiB on a CPU,
    # 256 MiB on a GPU. All of a micro-batch would be its largest tensor.
    logits_per_chunk: int
    # of these, logits computed together in float32: as many as a CPU's caches hold; on a GPU all of a chunk
    floats_per_chunk: int
    # completions sampled at a time if --rollout-slots is 0: the more the better on a GPU; 32 use a whole CPU
    rollout_slots: int
    # prompts sampled together in an evaluation or a calibration, and texts in one forward pass of the perplexity
    eval_batch_size: int
    # prompts with completions in one forward pass of the reward model
    scoring_batch_size: int
    # completions that evaluate_generations.py samples and evaluates together; bounds its masks of allowed tokens
    generation_batch_size: int
    # completions sampled together for the demo's pairs: many, because its model is tiny
    demo_batch_size: int


BUDGETS = {
    "cpu": Budget(
        tokens_per_micro_batch=1_024,
        logits_per_chunk=2**25,
        floats_per_chunk=2**20,
        rollout_slots=32,
        eval_batch_size=32,
        scoring_batch_size=32,
        generation_batch_size=64,
        demo_batch_size=256,
    ),
    "cuda": Budget(
        tokens_per_micro_batch=16_384,
        logits_per_chunk=2**27,
        floats_per_chunk=2**27,
        rollout_slots=256,
        eval_batch_size=32,
        scoring_batch_size=32,
        generation_batch_size=64,
        demo_batch_size=256,
    ),
}


def budget_of(device: torch.device) -> Budget:
    """Return the budget of the device's type; a device that is neither a CPU nor a CUDA GPU gets the CPU's."""
    return BUDGETS["cuda" if device.type == "cuda" else "cpu"]

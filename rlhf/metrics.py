"""One update's batch, and what it says before the optimizer has touched the policy. Names and units as logged."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor

from rlhf import objectives
from rlhf.rollout import Rollout


@dataclass
class Batch:
    """A rollout with what the optimizer needs. B episodes, T reply tokens."""

    rollout: Rollout
    scores: Tensor  # (B,) after the missing-EOS penalty
    kl: Tensor  # (B, T) k1 to the reference, nats
    advantages: Tensor  # (B, T) before whitening
    weights: Tensor  # (B, T) advantages as the loss takes them: whitened if asked
    returns: Tensor  # (B, T)


def memory_in_use(device: torch.device) -> int:
    """Bytes: the peak of the card's allocations; on a CPU what the process holds now."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def rollout_metrics(batch: Batch, raw_scores: Tensor, accelerator: Accelerator) -> dict[str, float]:
    """Scores (B,) as the reward functions gave them, KL, advantages, replies; means over all processes."""
    rollout, mask = batch.rollout, batch.rollout.mask
    k3 = objectives.kl_k3(rollout.logprobs, rollout.ref_logprobs, mask)
    tokens = mask.sum()
    values = {
        "rewards/mean": raw_scores.mean(),
        "rewards/std": raw_scores.std(unbiased=False),
        "kl_divergence": batch.kl.sum(1).mean(),
        "kl_divergence/token": batch.kl.sum() / tokens,
        "kl_divergence/k3": k3.sum(1).mean(),
        "advantage/mean": objectives.masked_mean(batch.advantages, mask),
        "advantage/std": objectives.masked_var(batch.advantages, mask).sqrt(),
        "value/explained_variance": objectives.explained_variance(rollout.values, batch.returns, mask),
        "reply/length": tokens / len(mask),
        "reply/eos_rate": rollout.replies.ended.float().mean(),
        "reply/tokens": tokens,
    }
    stacked = accelerator.reduce(torch.stack([v.float() for v in values.values()]), reduction="mean")
    return dict(zip(values, stacked.tolist(), strict=True))

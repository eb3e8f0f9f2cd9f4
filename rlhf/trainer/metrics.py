"""Metrics of an update, with their names and units as logged."""

from __future__ import annotations

import torch

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience
from rlhf.trainer.scores import Scored


def rollout_metrics(batch: Experience, scored: Scored, group_size: int) -> dict[str, float]:
    """Scores, KL, advantages, replies. `group_size` is the number of replies to a prompt."""
    mask, scores = batch.mask, scored.raw
    k3 = objectives.kl_k3(batch.logprobs, batch.ref_logprobs, mask)
    tokens = mask.sum()
    values = {
        "rewards/mean": scores.mean(),
        "rewards/std": scores.std(unbiased=False),
        "kl_divergence": batch.kl.sum(1).mean(),
        "kl_divergence/token": batch.kl.sum() / tokens,
        "kl_divergence/k3": k3.sum(1).mean(),
        "advantage/mean": objectives.masked_mean(batch.advantages, mask),
        "advantage/std": objectives.masked_var(batch.advantages, mask).sqrt(),
        "reply/length": tokens / len(mask),
        "reply/eos_rate": batch.replies.ended.float().mean(),
        "reply/tokens": tokens,
    }
    if batch.returns is not None:
        values["value/explained_variance"] = objectives.explained_variance(batch.values, batch.returns, mask)
    if group_size > 1:
        groups = scored.used.view(-1, group_size)
        values["rewards/equal_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    stacked = torch.stack([v.float() for v in values.values()])  # one copy from the device
    each = {f"rewards/each/{name}": mean for name, mean in scored.means.items()} if len(scored.means) > 1 else {}
    return {**dict(zip(values, stacked.tolist(), strict=True)), **each}

"""Metrics of an update, with their names and units as logged."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.trainer.batch import Batch, Scored


def rollout_metrics(batch: Batch, scored: Scored, group_size: int) -> dict[str, float]:
    """Scores, KL, advantages, replies. `group_size` is the number of replies to a prompt."""
    rollout, mask, scores = batch.rollout, batch.rollout.mask, scored.raw
    k3 = objectives.kl_k3(rollout.logprobs, rollout.ref_logprobs, mask)
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
        "reply/eos_rate": rollout.replies.ended.float().mean(),
        "reply/tokens": tokens,
    }
    if batch.returns is not None:
        values["value/explained_variance"] = objectives.explained_variance(rollout.values, batch.returns, mask)
    if group_size > 1:
        groups = scored.used.view(-1, group_size)
        values["rewards/equal_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    stacked = torch.stack([v.float() for v in values.values()])  # one copy from the device
    each = {f"rewards/each/{name}": mean for name, mean in scored.means.items()} if len(scored.means) > 1 else {}
    return {**dict(zip(values, stacked.tolist(), strict=True)), **each}


def policy_stats(
    loss: Tensor, clipfrac: Tensor, logprobs: Tensor, entropy: Tensor, batch: Batch, rows: Tensor, tokens: Tensor
) -> dict[str, Tensor]:
    """Statistics of the policy on some rows, detached: its term of the loss, the share of clipped tokens, and how far
    it has moved from the rollout policy.

    logprobs, entropy (n, T) of the policy as it is now. Means are over the minibatch's `tokens`, so parts add up.
    """
    mask, old = batch.rollout.mask[rows], batch.rollout.logprobs[rows]
    figures = {
        "policy/loss": loss,
        "policy/clipfrac": clipfrac,
        "policy/approx_kl": objectives.approximate_kl(logprobs, old, mask, tokens),
        "policy/entropy": objectives.masked_mean(entropy, mask, tokens),
        "policy/ratio": objectives.masked_mean(torch.exp(logprobs - old), mask, tokens),
    }
    return {name: value.detach() for name, value in figures.items()}

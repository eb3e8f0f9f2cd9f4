"""Metrics of an update, with their names and units as logged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience
from rlhf.trainer.scores import Scores


def rollout_metrics(batch: Experience, scores: Scores, group_size: int, topic: str | None = None) -> dict[str, float]:
    """Scores, KL, advantages, lengths. `group_size` is the number of completions per prompt. If the batch is on one
    `topic`, its score and KL have that name, too."""
    mask, raw = batch.mask, scores.raw
    k3 = objectives.kl_k3(batch.logprobs, batch.ref_logprobs, mask)
    tokens = mask.sum()
    values = {
        "rewards/mean": raw.mean(),
        "rewards/std": raw.std(unbiased=False),
        "kl_divergence": batch.kl.sum(1).mean(),
        "kl_divergence/token": batch.kl.sum() / tokens,
        "kl_divergence/k3": k3.sum(1).mean(),
        "advantage/mean": objectives.masked_mean(batch.raw_advantages, mask),
        "advantage/std": objectives.masked_var(batch.raw_advantages, mask).sqrt(),
        "completions/mean_length": tokens / len(mask),
        "completions/eos_rate": batch.completions.ended.float().mean(),
        "completions/tokens": tokens,
    }
    if batch.returns is not None:
        values["value/explained_variance"] = objectives.explained_variance(batch.values, batch.returns, mask)
    if group_size > 1:
        groups = scores.shaped.view(-1, group_size)
        values["rewards/equal_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    stacked = torch.stack([v.float() for v in values.values()])  # one copy from the device
    each = (
        {f"rewards/each/{name}": mean for name, mean in scores.per_function.items()}
        if len(scores.per_function) > 1
        else {}
    )
    metrics = {**dict(zip(values, stacked.tolist(), strict=True)), **each}
    of_topic = {"score": "rewards/mean", "kl": "kl_divergence"} if topic is not None else {}
    return {**metrics, **{f"topic/{topic}/{kind}": metrics[name] for kind, name in of_topic.items()}}


def speed_metrics(times: Sequence[float], tokens: int, episodes: int) -> dict[str, float]:
    """Seconds of an update's parts, and what they processed per second. `times` are the seconds at which rollout,
    scoring and optimizer steps began, and at which the optimizer steps ended."""
    rollout, score, update = (end - start for start, end in pairwise(times))
    return {
        "time/rollout_s": rollout,
        "time/score_s": score,
        "time/update_s": update,
        "throughput/tokens_per_s": tokens / (rollout + score + update),
        "throughput/episodes_per_s": episodes / (rollout + score + update),
    }

"""Metrics of an update by TensorBoard tag. docs/metrics.md gives their units and healthy ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch

from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience
from rlhf.rewards.scores import Scores
from rlhf.rollout.episodes import MAX_TURNS, Episode


def rollout_metrics(batch: Experience, scores: Scores, group_size: int, topic: str | None = None) -> dict[str, float]:
    """Return the metrics of a rollout: scores, KL, advantages, lengths.

    `group_size` is the number of completions of a prompt that are compared with each other. Greedy completions count
    only in the groups of equal scores. Completions without a score are left out of the metrics of scores and
    advantages. These metrics are missing if no completion has a score. If the whole batch is on one `topic`, the mean
    score and the KL are also returned under its name.
    """
    mask = batch.mask
    scored = batch.scored_mask
    rows = [row for row, turns in enumerate(batch.completions.turns) if turns]  # without greedy completions
    sampled = scores.select(rows) if len(rows) < len(mask) else scores
    raw = sampled.raw[~sampled.raw.isnan()]
    known = ~batch.ref_logprobs.isnan().any(1)  # the reference has scored these completions
    known &= mask.any(1)
    known[batch.stale] = False  # their KL is another policy's
    kl = batch.kl[known]
    k3 = objectives.kl_k3(batch.logprobs[known], batch.ref_logprobs[known], mask[known])
    tokens = mask.sum()
    values = {
        "rewards/mean": raw.mean(),
        "rewards/std": raw.std(unbiased=False),
        # detail 21: in every run (this project). Without it, a run without a penalty could drift unseen.
        "kl_divergence": kl.sum(1).mean(),
        "kl_divergence/token": kl.sum() / mask[known].sum(),
        "kl_divergence/k3": k3.sum(1).mean(),
        "advantage/mean": objectives.masked_mean(batch.raw_advantages, scored),
        "advantage/std": objectives.masked_var(batch.raw_advantages, scored).sqrt(),
        "completions/mean_length": tokens / len(rows),
        "completions/eos_rate": batch.completions.ended[rows].float().mean(),
    }
    if batch.values is not None and batch.returns is not None:
        values["value/explained_variance"] = objectives.explained_variance(batch.values, batch.returns, scored)
    if len(kl) < len(rows):
        values["kl_divergence/completions"] = known.sum()
    if scores.teacher_kl is not None:
        values["teacher_kl"] = scores.teacher_kl.nanmean()
    if group_size > 1:
        values["rewards/equal_groups"] = scores.equal_groups(group_size).float().mean()
    if len(raw) < len(rows):
        values["rewards/unscored"] = sampled.raw.isnan().float().mean()
    stacked = torch.stack([v.float() for v in values.values()]).tolist()  # one transfer from the device
    known = {name: value for name, value in zip(values, stacked, strict=True) if not math.isnan(value)}
    each = {f"rewards/each/{name}": mean for name, mean in sampled.per_function.items()}
    logged = {f"rewards/logged/{name}": value for name, value in sampled.logged.items()}
    metrics = {**known, **each, **logged}
    of_topic = {"score": "rewards/mean", "kl": "kl_divergence"} if topic is not None else {}
    return {**metrics, **{f"topic/{topic}/{kind}": metrics[name] for kind, name in of_topic.items() if name in known}}


def environment_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of episodes with an environment; {} without one."""
    if not any(episode.rewards or episode.failure for episode in episodes):
        return {}
    return {
        "environment/turns": fmean(len(episode.spans) for episode in episodes),
        "environment/max_turns": fmean(episode.stop_reason == MAX_TURNS for episode in episodes),
        "environment/failed": fmean(bool(episode.failure) for episode in episodes),
        "environment/cut_observations": float(sum(episode.cut for episode in episodes)),
    }


def speed_metrics(seconds: Mapping[str, float], tokens: int, episodes: int) -> dict[str, float]:
    """Return the seconds of each part of an update ("rollout", "score", "update"), and tokens and episodes per second
    of the whole update."""
    of_rollout = ("sampling", "environment", "log-probs")
    parts = {
        "rollout": sum(passed for part, passed in seconds.items() if part.split("/")[0] in of_rollout),
        "score": seconds["scoring"],
        "update": seconds["optimizer steps"],
    }
    whole = sum(parts.values())
    return {
        **{f"time/{part}_s": passed for part, passed in parts.items()},
        "throughput/tokens_per_s": tokens / whole,
        "throughput/episodes_per_s": episodes / whole,
    }


def mean_metrics(updates: Sequence[dict[str, float]]) -> Metrics:
    """Return the mean of each metric over the updates that logged it."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    return Metrics({name: fmean(m[name] for m in updates if name in m) for name in names})


# names of the MLX token-level PPO (docs/reference_systems.md) -> metrics here
ALIASES = {
    "avg_reward": "rewards/mean",
    "policy_loss": "policy/loss",
    "value_loss": "value/loss",
    "kl_div": "kl_divergence",
}


class Metrics(dict[str, float]):
    """Metrics by name, which can also be read by the names in ALIASES. Only the first names are listed, so that a
    logger writes each metric once."""

    def __missing__(self, name: str) -> float:
        if name in ALIASES and ALIASES[name] in self:
            return self[ALIASES[name]]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or super().__contains__(ALIASES.get(name, name))

    def get(self, name: str, default: float | None = None) -> float | None:
        return super().get(name, super().get(ALIASES.get(name, name), default))

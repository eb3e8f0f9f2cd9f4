"""Compares the gradients of one micro-batch of PPO, GRPO and RLOO on real weights with autograd through plain forward
passes. The losses are written here from the papers, one completion at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rlhf.rollout.completions import Completions, Rollout
from tests.conftest import whole_gradient
from tests.real.plain import plain_forward, relative_error

pytestmark = pytest.mark.ci
TEMPERATURE = 0.8
BETA = 0.1
CLIP = 0.1
GAMMA = 0.97
LAMBDA = 0.9
VALUE_COEF = 0.3
VALUE_CLIP = 0.15
FLAGS = {
    "ppo": ["--gamma", GAMMA, "--lam", LAMBDA, "--value-coef", VALUE_COEF, "--value-clip-range", VALUE_CLIP],
    "grpo": ["--K", 2, "--batch-size", 2, "--loss-type", "grpo", "--scale-rewards", "group", "--kl-placement", "loss"],
    "rloo": ["--K", 2, "--batch-size", 2],
}
COMMON = ["--temperature", TEMPERATURE, "--clip-range", CLIP, "--kl-schedule", "fixed", "--kl-coef", BETA]
ANSWERS = ("Paris.", "I like the sea.", "No", "Red, green and blue, for example")
SCORES = torch.tensor([1.0, -0.5, 0.25, 2.0])


@dataclass
class Completion:
    """One completion of T tokens, without padding. All log-probs are in nats."""

    old: Tensor  # (T,) log-probs of the rollout policy
    ref: Tensor  # (T,) log-probs of the reference
    new: Tensor  # (T,) log-probs of the current policy, with gradient
    score: Tensor
    old_values: Tensor | None = None  # (T,)
    values: Tensor | None = None  # (T,) with gradient


def clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    """-min(r A, clip(r, 1 - e, 1 + e) A): Schulman et al. 2017, arXiv 1707.06347, eq. 7."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def ppo(batch: Sequence[Completion]) -> Tensor:
    """arXiv 1707.06347 eq. 7 and 9 over all tokens; GAE from arXiv 1506.02438, eq. 16; KL per token in the reward
    (arXiv 1909.08593, eq. 2); whitened advantages and clipped values as in OpenAI Baselines."""
    advantages = []
    returns = []
    for c in batch:
        rewards = -BETA * (c.old - c.ref)
        rewards[-1] += c.score
        advantage = torch.zeros_like(rewards)
        later = 0.0
        value_later = 0.0
        for t in reversed(range(len(rewards))):
            later = rewards[t] + GAMMA * value_later - c.old_values[t] + GAMMA * LAMBDA * later
            advantage[t], value_later = later, c.old_values[t]
        advantages.append(advantage)
        returns.append(advantage + c.old_values)
    every = torch.cat(advantages)
    total = 0.0
    for c, advantage, target in zip(batch, advantages, returns, strict=True):
        policy = clipped((c.new - c.old).exp(), (advantage - every.mean()) / every.std())
        near = c.old_values + (c.values - c.old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
        value = 0.5 * torch.maximum((c.values - target).square(), (near - target).square())
        total = total + (policy + VALUE_COEF * value).sum()
    return total / len(every)


def grpo(batch: Sequence[Completion]) -> Tensor:
    """arXiv 2402.03300, eq. 3, outcome rewards. The KL penalty is the paper's estimate k3 (eq. 4) times the ratio, as
    docs/how_it_works.md derives it."""
    total = 0.0
    for first in range(0, len(batch), 2):
        group = batch[first : first + 2]
        scores = torch.stack([c.score for c in group])
        for c in group:
            ratio = (c.new - c.old).exp()
            to_ref = c.ref - c.new
            policy = clipped(ratio, (c.score - scores.mean()) / (scores.std() + 1e-4))
            total = total + (policy + BETA * ratio * (to_ref.exp() - 1 - to_ref)).mean() / len(batch)
    return total


def rloo(batch: Sequence[Completion]) -> Tensor:
    """arXiv 2402.14740: the baseline of eq. 8 with R = score - beta * KL of the completion, a completion as one
    action, and PPO's clip on its ratio."""
    rewards = [c.score - BETA * (c.old - c.ref).sum() for c in batch]
    total = 0.0
    for i, c in enumerate(batch):
        other = rewards[i + 1 if i % 2 == 0 else i - 1]
        total = total + clipped((c.new - c.old).sum().exp(), rewards[i] - other) / len(batch)
    return total


LOSSES = {"ppo": ppo, "grpo": grpo, "rloo": rloo}


def written_rollout(trainer, tokenizer) -> Rollout:
    """Return a rollout with ANSWERS as its completions: of four lengths, the last one cut off."""
    prompts = [prompt for _, prompt in trainer.episodes_of(1)]
    rows = [tokenizer(a).input_ids for a in ANSWERS]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[tokenizer.eos_token_id] * (longest - len(row))] for row in rows])
    completions = Completions.of(prompts, ids, eos=tokenizer.eos_token_id, pad=0, vocabulary=49152)
    return Rollout(
        completions, trainer.collector.started(trainer.episodes_of(1), 1), *trainer.passes.logprobs(completions)
    )


def off_policy(rollout: Rollout) -> Rollout:
    """Change the rollout's log-probs and values, as if the policy had moved since: some ratios are then clipped."""
    draw = torch.Generator().manual_seed(1)
    for name, size in (("ref_logprobs", 0.3), ("logprobs", 0.08), ("values", 0.2)):
        if (values := getattr(rollout, name)) is not None:
            setattr(rollout, name, values + size * torch.randn(values.shape, generator=draw))
    return rollout


def by_hand(model, head, rollout: Rollout) -> list[Completion]:
    """Return the completions with the current log-probs and values, from plain forward passes."""
    found = []
    for row, ids in enumerate(rollout.completions.rows()):
        size = len(ids)
        new, hidden = plain_forward(model, rollout.prompts[row].ids, ids, TEMPERATURE)
        given = [rollout.logprobs[row, :size], rollout.ref_logprobs[row, :size], new, SCORES[row]]
        values = () if head is None else (rollout.values[row, :size], hidden @ head[0][0] + head[1][0])
        found.append(Completion(*given, *values))
    return found


@pytest.mark.parametrize("algorithm", LOSSES)
def test_gradients_equal_autograd_through_a_plain_forward_pass(real_trainer, plain_model, plain_tokenizer, algorithm):
    """For every weight, the difference is at most 1e-3 of the gradient's norm."""
    trainer = real_trainer(*COMMON, *FLAGS[algorithm], algorithm=algorithm)
    head = None
    critic = getattr(trainer.host.model, "value_head", None)
    if critic is not None:
        torch.nn.init.normal_(critic.summary.weight, std=0.02, generator=torch.Generator().manual_seed(0))
        head = [w.detach().clone().requires_grad_() for w in (critic.summary.weight, critic.summary.bias)]
    rollout = off_policy(written_rollout(trainer, plain_tokenizer))
    whole_gradient(trainer, trainer.advantages(rollout, SCORES))
    found = {name.removeprefix("policy."): w.grad for name, w in trainer.host.model.named_parameters()}

    plain_model.zero_grad()
    batch = by_hand(plain_model, head, rollout)
    LOSSES[algorithm](batch).backward()
    expected = {name: w.grad for name, w in plain_model.named_parameters()}
    if head is not None:
        expected |= {f"value_head.summary.{n}": w.grad for n, w in zip(("weight", "bias"), head, strict=True)}
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in found}
    plain_model.zero_grad()
    assert max(errors.values()) < 1e-3, max(errors.items(), key=lambda item: item[1])
    moved = [(c.new - c.old).detach() for c in batch]
    distance = ((torch.stack([m.sum() for m in moved]) if algorithm == "rloo" else torch.cat(moved)).exp() - 1).abs()
    assert distance.max() > CLIP > distance.min(), "some ratios must be outside the clip range, and some inside"
    assert len({len(m) for m in moved}) == len(moved), "the completions must have different lengths"

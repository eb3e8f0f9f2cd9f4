"""Tests of RLOO: the leave-one-out baseline, and the ratio and KL of a whole completion as one action."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from rlhf.algorithms import objectives
from rlhf.algorithms.clipping import Clip, clipped_surrogate
from rlhf.settings.fields import settings_of
from rlhf.settings.training import Config
from tests.conftest import whole_gradient

CLIP = Clip(0.2, 0.2)


@pytest.fixture
def rloo(build):
    return lambda *flags, **parts: build(*flags, algorithm="rloo", **parts)


def collect_rollout(trainer):
    return trainer.collector.collect(trainer.episodes_of(1), 1)


def test_leave_one_out_advantages_match_values_computed_by_hand():
    """Group 1, 2, 3, 6: the means of the other scores are 11/3, 10/3, 3, 2. Equal scores have advantages 0."""
    actual = objectives.leave_one_out_advantages(torch.tensor([1.0, 2, 3, 6, 5, 5, 5, 5]), 4)
    assert_close(actual, torch.tensor([1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0, 0, 0, 0, 0]))


def test_advantages_are_k_over_k_minus_1_times_grpos():
    scores = torch.randn(12, generator=torch.Generator().manual_seed(0))
    for group_size in (2, 3, 6):
        ours = objectives.leave_one_out_advantages(scores, group_size)
        assert_close(ours, objectives.group_advantages(scores, group_size) * group_size / (group_size - 1))


def test_ratio_is_that_of_the_whole_completion():
    """The first completion has two tokens with ratio 1.1, so its ratio is 1.21 and is clipped at 1.2. The second has
    one token with ratio 0.9. The third has ratio 1.21, which is not clipped because its advantage is negative."""
    old = torch.zeros(3, 2)
    new = torch.tensor([[math.log(1.1), math.log(1.1)], [math.log(0.9), 50.0], [math.log(1.1), math.log(1.1)]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    ratio = objectives.completion_ratio(new, old, mask)
    loss, clipped = clipped_surrogate(ratio, torch.tensor([2.0, 3.0, -2.0]), CLIP)
    assert_close(loss, torch.tensor([-2 * 1.2, -3 * 0.9, 2 * 1.21]))
    assert clipped.tolist() == [True, False, False]
    assert_close(ratio, torch.tensor([1.21, 0.9, 1.21]))


def test_loss_is_the_mean_over_completions(rloo):
    """At ratio 1 the loss is -mean(A) for any lengths. The groups (1, 4) and (0, 2) have A = -3, 3, -2, 2."""
    trainer = rloo("--kl-placement", "none", "--max-new-tokens", 12)
    batch = trainer.advantages(collect_rollout(trainer), torch.tensor([1.0, 4.0, 0.0, 2.0]))
    assert batch.raw_advantages[:, 0].tolist() == [-3, 3, -2, 2]
    batch.advantages = torch.where(batch.mask, torch.tensor([[1.0], [2.0], [4.0], [9.0]]), 0.0)
    trainer.host.model.train()
    stats, _ = whole_gradient(trainer, batch)
    assert_close(stats["loss"], torch.tensor(-4.0))
    assert_close(stats["policy/loss"], torch.tensor(-4.0))


def test_kl_is_subtracted_before_the_baseline(rloo):
    """A = R - mean of the other R, where R = score - beta x KL of the completion. The reference model is changed."""
    trainer = rloo("--kl-coef", 0.7, "--kl-schedule", "fixed")
    with torch.no_grad():
        for weight in trainer.reference.copy.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    rollout = collect_rollout(trainer)
    advantages = trainer.advantages(rollout, torch.arange(4.0)).advantages[:, 0]
    kl = [
        float((p - q)[m].sum()) for p, q, m in zip(rollout.logprobs, rollout.ref_logprobs, rollout.mask, strict=True)
    ]
    a, b, c, d = (score - 0.7 * nats for score, nats in zip(range(4), kl, strict=True))
    assert_close(advantages, torch.tensor([a - b, b - a, c - d, d - c]), rtol=0, atol=1e-5)
    assert max(map(abs, kl)) > 0.05


def gradient(policy_loss, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the loss with respect to the log-probs (B, T), as one vector."""
    leaf = logprobs.clone().requires_grad_()
    policy_loss(leaf).backward()
    return leaf.grad.flatten()


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


@pytest.mark.parametrize("loss_type", settings_of(Config)["loss_type"].choices)
def test_gradient_is_not_a_multiple_of_grpos_gradient(loss_type):
    """The directions agree at ratio 1 with equal lengths, and differ at other ratios with every GRPO loss type."""
    noise = torch.Generator().manual_seed(3)
    old = torch.randn(4, 6, generator=noise)
    mask = torch.ones(4, 6, dtype=torch.bool)
    scores = torch.tensor([1.0, 4.0, 0.0, 2.0])

    def rloo(logprobs):
        advantages = objectives.leave_one_out_advantages(scores, 2)
        ratio = objectives.completion_ratio(logprobs, old, mask)
        return clipped_surrogate(ratio, advantages, Clip(0.9, 0.9))[0].sum() / 4

    def grpo(logprobs):
        advantages = objectives.group_advantages(scores, 2).unsqueeze(1).expand(4, 6)
        weights = objectives.grpo_token_weights(loss_type, mask.sum(1), 4, mask.sum(), 6)
        return (
            objectives.grpo_policy_loss(logprobs, old, advantages, mask, Clip(0.9, 0.9), loss_type)[0] * weights
        ).sum()

    assert cosine(gradient(rloo, old), gradient(grpo, old)) == pytest.approx(1, abs=1e-6)
    changed = old + 0.2 * torch.randn(4, 6, generator=noise)
    assert cosine(gradient(rloo, changed), gradient(grpo, changed)) < 0.99


def test_importance_weight_of_a_completion_applies_to_all_its_tokens(rloo, build):
    """The log-probs of the sampling engine are lower by 0.1 per token. RLOO's weight is exp(0.1 x tokens), at most 2,
    at every token of a completion. GRPO's weight is exp(0.1)."""
    for trainer, exponents in ((rloo(), None), (build(algorithm="grpo"), 1)):
        rollout = collect_rollout(trainer)
        rollout.completions.sampled_logprobs = rollout.logprobs - 0.1
        batch = trainer.advantages(rollout, torch.arange(4.0))
        tokens = rollout.mask.sum(1, keepdim=True) if exponents is None else torch.tensor(1)
        factor = (0.1 * tokens).exp().clamp(max=2)
        assert_close(batch.advantages, batch.raw_advantages * factor, rtol=1e-4, atol=1e-5)


def test_ratio_too_large_for_floats_gives_a_finite_loss_and_gradient():
    """The log ratio is 2,000. The loss is -1.2 if the ratio is clipped, and finite otherwise."""
    leaf = torch.full((2, 2), 1000.0, requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    ratio = objectives.completion_ratio(leaf, torch.zeros(2, 2), mask)
    loss, _ = clipped_surrogate(ratio, torch.tensor([1.0, -1.0]), CLIP)
    loss.sum().backward()
    assert_close(loss.detach(), torch.tensor([-1.2, math.exp(20)]))
    assert leaf.grad.tolist() == [[0, 0], [0, 0]]


def test_logged_ratio_is_the_mean_ratio_of_completions(rloo):
    """The check for out-of-range ratios then uses the same ratio as the loss."""
    trainer = rloo("--ppo-epochs", 1)
    rollout = collect_rollout(trainer)
    batch = trainer.advantages(rollout, torch.arange(4.0))
    batch.logprobs = batch.logprobs - 0.2
    stats, _ = whole_gradient(trainer, batch)
    expected = sum(math.exp(0.2 * length) for length in rollout.mask.sum(1).tolist()) / 4
    assert float(stats["policy/ratio"]) == pytest.approx(expected, rel=1e-4)


def test_importance_weights_of_one_action_match_values_computed_by_hand():
    """Differences of 0.1 and 0.2 nats give exp(0.3) at both tokens. A difference of 5 nats gives the maximum of 2."""
    new = torch.tensor([[0.1, 0.2, 9.0], [5.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    actual = objectives.truncated_importance_weights(new, torch.zeros(2, 3), mask, one_action=True)
    assert_close(actual, torch.tensor([[math.exp(0.3), math.exp(0.3), 0], [2, 0, 0]]))


def test_kl_in_the_loss_is_summed_over_each_completion(rloo):
    """With advantages 0 the loss is beta x the mean over completions of the sum over tokens of (p_new / p_old) k3.
    Here log(p_new / p_old) is 0.3 at each token."""
    trainer = rloo("--kl-placement", "loss", "--kl-coef", 0.7, "--kl-schedule", "fixed")
    with torch.no_grad():
        for weight in trainer.reference.copy.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    rollout = collect_rollout(trainer)
    batch = trainer.advantages(rollout, torch.ones(4))
    batch.logprobs = batch.logprobs - 0.3
    trainer.host.model.train()
    stats, _ = whole_gradient(trainer, batch)
    log_ratio = (rollout.ref_logprobs - rollout.logprobs)[rollout.mask].double()
    expected = 0.7 * math.exp(0.3) * float((log_ratio.exp() - 1 - log_ratio).sum()) / 4
    assert float(stats["loss"]) == pytest.approx(expected, rel=1e-4) and expected > 1e-3

"""Against numbers that a person can redo on paper, and invariants."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from rlhf.algorithms import objectives as o


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def mask(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bool)


def test_gae_by_hand():
    # gamma .9, lambda .8, V = .5 everywhere, reward 1 only at EOS: delta = [-.05, -.05, .5], factor .72
    advantages, returns = o.generalized_advantage_estimate(row(0, 0, 1), row(0.5, 0.5, 0.5), mask(1, 1, 1), 0.9, 0.8)
    assert_close(advantages, row(-0.05 + 0.72 * 0.31, 0.31, 0.5))
    assert_close(returns, row(0.6732, 0.81, 1.0))


def test_gae_ends_at_the_last_token():
    # what a critic says behind EOS must not be bootstrapped from: with gamma = lambda = 1 the advantage is score - V
    advantages, returns = o.generalized_advantage_estimate(
        row(0, 2, 99), row(0.5, 0.25, 77), mask(1, 1, 0), gamma=1.0, lam=1.0
    )
    assert_close(advantages, row(1.5, 1.75, 0))
    assert_close(returns, row(2.0, 2.0, 0))


def test_kl_estimators_by_hand():
    p, q = row(math.log(0.5), math.log(0.2), 0.0), row(math.log(0.25), math.log(0.4), 9.0)
    assert_close(o.kl_k1(p, q, mask(1, 1, 0)), row(math.log(2), -math.log(2), 0))
    # k3 = (r - 1) - log r with r = q / p = 1/2 and 2
    assert_close(o.kl_k3(p, q, mask(1, 1, 0)), row(-0.5 + math.log(2), 1 - math.log(2), 0))


def test_k1_and_k3_are_unbiased_on_a_known_distribution():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    exact = float((p * (p / q).log()).sum())
    lp, lq, on = p.log().unsqueeze(0), q.log().unsqueeze(0), torch.ones(1, 3, dtype=torch.bool)
    assert float((p * o.kl_k1(lp, lq, on)[0]).sum()) == pytest.approx(exact, rel=1e-6)
    assert float((p * o.kl_k3(lp, lq, on)[0]).sum()) == pytest.approx(exact, rel=1e-6)


def test_rewards_by_hand():
    kl, on = row(0.1, 0.2, 5.0), mask(1, 1, 0)
    assert_close(o.shape_rewards(kl, torch.tensor([3.0]), on, beta=0.5), row(-0.05, 2.9, 0))
    eos = o.shape_rewards(row(0.1, 0.2, 0), torch.tensor([3.0]), on, beta=0.5, kl_penalty_at="eos")
    assert_close(eos, row(0, 2.85, 0))


def test_whitening_by_hand():
    # values 1, 2, 3: mean 2, unbiased variance 1
    assert_close(o.whiten(row(1, 2, 3, 50), mask(1, 1, 1, 0)), row(-1, 0, 1, 0))
    assert_close(o.whiten(row(1, 2, 3, 50), mask(1, 1, 1, 0), shift_mean=False), row(1, 2, 3, 0))
    assert o.whiten(row(7, 1), mask(1, 0)).tolist() == [[0, 0]], "a single token has no spread"


def test_policy_loss_by_hand():
    # ratios 2 and 0.5, clip 0.2. A = 1: min(2, 1.2) = 1.2. A = -1: max(0.5, 0.8) = 0.8 as loss
    loss, clipped = o.clipped_policy_loss(
        row(math.log(2), math.log(0.5)), row(0, 0), row(1, -1), mask(1, 1), clip_range=0.2
    )
    assert float(loss) == pytest.approx((-1.2 + 0.8) / 2)
    assert float(clipped) == 1.0


def test_value_loss_by_hand():
    # V moved from 0 to 1, return 1, clip 0.2: held value 0.2, error 0.64 > 0; V moved to 0.1: within the range
    loss, clipped = o.clipped_value_loss(row(1, 0.1), row(0, 0), row(1, 1), mask(1, 1), clip_range=0.2)
    assert float(loss) == pytest.approx(0.5 * (0.64 + 0.81) / 2)
    assert float(clipped) == 0.5


def test_explained_variance_by_hand():
    # returns 1, 3 (variance 2); values 1, 2: errors 0, 1 (variance 0.5)
    assert float(o.explained_variance(row(1, 2), row(1, 3), mask(1, 1))) == pytest.approx(0.75)
    assert float(o.explained_variance(row(1, 2), row(3, 3), mask(1, 1))) == 0


def test_approximate_kl_by_hand():
    assert float(o.approximate_kl(row(0.3, 5), row(0.1, 0), mask(1, 0))) == pytest.approx(0.02)


def test_last_token():
    assert o.last_token(mask(1, 1, 0)).tolist() == [[False, True, False]]
    assert o.last_token(mask(1, 1, 1)).tolist() == [[False, False, True]]


@pytest.mark.parametrize("seed", range(5))
def test_what_stands_behind_eos_never_changes_anything(seed):
    generator = torch.Generator().manual_seed(seed)
    on = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)

    def draw():
        return torch.randn(3, 5, generator=generator)

    fields = {name: draw() for name in ("new", "old", "ref", "values", "old_values", "returns", "advantages")}

    def everything(f):
        kl = o.kl_k1(f["new"], f["ref"], on)
        rewards = o.shape_rewards(kl, torch.tensor([1.0, -1.0, 0.5]), on, 0.3)
        advantages, returns = o.generalized_advantage_estimate(rewards, f["values"], on, 0.97, 0.9)
        return [
            kl, o.kl_k3(f["new"], f["ref"], on), rewards, advantages, returns, o.whiten(f["advantages"], on),
            *o.clipped_policy_loss(f["new"], f["old"], f["advantages"], on, 0.2),
            *o.clipped_value_loss(f["values"], f["old_values"], f["returns"], on, 0.2),
            o.explained_variance(f["values"], f["returns"], on), o.approximate_kl(f["new"], f["old"], on),
        ]  # fmt: skip

    noisy = {name: torch.where(on, value, draw() * 100) for name, value in fields.items()}
    for clean, dirty in zip(everything(fields), everything(noisy), strict=True):
        assert_close(clean, dirty, rtol=0, atol=0)


def test_micro_batches_add_up_to_the_minibatch():
    on = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    new, old, advantages = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    whole, _ = o.clipped_policy_loss(new, old, advantages, on, 0.2)
    parts = [o.clipped_policy_loss(new[i : i + 1], old[i : i + 1], advantages[i : i + 1], on[i : i + 1], 0.2, on.sum())
             for i in range(2)]  # fmt: skip
    assert_close(whole, parts[0][0] + parts[1][0])

"""Tests of advantages, rewards and losses against values computed by hand, and of their invariants."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from rlhf.algorithms import objectives as o
from rlhf.algorithms.clipping import Clip, clipped_surrogate
from rlhf.algorithms.policy_gradient import policy_stats
from rlhf.models.actor_critic import PolicyOutputs
from rlhf.settings.fields import settings_of
from rlhf.settings.training import Config

CLIP = Clip(0.2, 0.2)
GRPO_LOSSES = settings_of(Config)["loss_type"].choices


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def mask(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bool)


def test_gae_matches_values_computed_by_hand():
    # gamma .9, lambda .8, V = .5 everywhere, reward 1 only at EOS: delta = [-.05, -.05, .5], factor .72
    advantages, returns = o.generalized_advantage_estimate(row(0, 0, 1), row(0.5, 0.5, 0.5), mask(1, 1, 1), 0.9, 0.8)
    assert_close(advantages, row(-0.05 + 0.72 * 0.31, 0.31, 0.5))
    assert_close(returns, row(0.6732, 0.81, 1.0))


def test_gae_ends_at_the_last_token():
    # GAE must not bootstrap from values after EOS: with gamma = lambda = 1 the advantage is score - V
    advantages, returns = o.generalized_advantage_estimate(
        row(0, 2, 99), row(0.5, 0.25, 77), mask(1, 1, 0), gamma=1.0, lam=1.0
    )
    assert_close(advantages, row(1.5, 1.75, 0))
    assert_close(returns, row(2.0, 2.0, 0))


def test_kl_estimators_match_values_computed_by_hand():
    p = row(math.log(0.5), math.log(0.2), 0.0)
    q = row(math.log(0.25), math.log(0.4), 9.0)
    assert_close(o.kl_k1(p, q, mask(1, 1, 0)), row(math.log(2), -math.log(2), 0))
    # k3 = (r - 1) - log r with r = q / p = 1/2 and 2
    assert_close(o.kl_k3(p, q, mask(1, 1, 0)), row(-0.5 + math.log(2), 1 - math.log(2), 0))


def test_k1_and_k3_are_unbiased_on_a_known_distribution():
    p = torch.tensor([0.5, 0.3, 0.2])
    q = torch.tensor([0.2, 0.5, 0.3])
    exact = float((p * (p / q).log()).sum())
    lp = p.log().unsqueeze(0)
    lq = q.log().unsqueeze(0)
    on = torch.ones(1, 3, dtype=torch.bool)
    assert float((p * o.kl_k1(lp, lq, on)[0]).sum()) == pytest.approx(exact, rel=1e-6)
    assert float((p * o.kl_k3(lp, lq, on)[0]).sum()) == pytest.approx(exact, rel=1e-6)


def test_shaped_rewards_match_values_computed_by_hand():
    kl = row(0.1, 0.2, 5.0)
    on = mask(1, 1, 0)
    assert_close(o.shape_rewards(kl, torch.tensor([3.0]), on, beta=0.5), row(-0.05, 2.9, 0))
    eos = o.shape_rewards(row(0.1, 0.2, 0), torch.tensor([3.0]), on, beta=0.5, kl_penalty_at="eos")
    assert_close(eos, row(0, 2.85, 0))


def test_a_kl_that_is_not_known_costs_nothing_without_beta_and_is_not_overlooked_with_it():
    kl = row(math.nan, math.nan, 5.0)
    on = mask(1, 1, 0)
    scores = torch.tensor([3.0])
    for beta in (0.0, 0.5):
        tokens = o.shape_rewards(kl, scores, on, beta)
        eos = o.shape_rewards(kl, scores, on, beta, kl_penalty_at="eos")
        whole = o.completion_rewards(kl, scores, on, beta)
        if beta:
            assert tokens[:, :2].isnan().all() and eos[0, 1].isnan() and whole.isnan().all()
        else:
            assert tokens.tolist() == eos.tolist() == [[0, 3, 0]] and whole.tolist() == [3]


def test_whitening_matches_values_computed_by_hand():
    # values 1, 2, 3: mean 2, unbiased variance 1
    assert_close(o.whiten(row(1, 2, 3, 50), mask(1, 1, 1, 0)), row(-1, 0, 1, 0))
    assert_close(o.whiten(row(1, 2, 3, 50), mask(1, 1, 1, 0), shift_mean=False), row(1, 2, 3, 0))
    assert o.whiten(row(7, 1), mask(1, 0)).tolist() == [[0, 0]], "a single token has no variance"


def test_the_help_of_whiten_rewards_is_what_it_computes():
    # rewards 0 0 0 1 and 0 0 0 3: mean 0.5, unbiased variance 8/7, so a reward of 0 becomes 0.5 - 0.5 / 1.069 = 0.032
    rewards = row(0, 0, 0, 1, 0, 0, 0, 3)
    every = mask(*[1] * 8)
    assert o.whiten(rewards, every, shift_mean=False)[0, 0] == pytest.approx(0.5 - 0.5 / (8 / 7) ** 0.5, abs=1e-5)
    text = " ".join(settings_of(Config)["whiten_rewards"].help.split())
    assert "(r - mean) / std + mean" in text and "mean - mean / std" in text and "divide" not in text


def test_policy_loss_matches_values_computed_by_hand():
    # ratios 2 and 0.5, clip 0.2. A = 1: min(2, 1.2) = 1.2. A = -1: max(0.5, 0.8) = 0.8 as loss
    loss, clipped = o.clipped_policy_loss(row(math.log(2), math.log(0.5)), row(0, 0), row(1, -1), mask(1, 1), CLIP)
    assert float(loss) == pytest.approx((-1.2 + 0.8) / 2)
    assert float(clipped) == 1.0


def test_clip_higher_has_two_limits():
    """Clip [0.8, 1.28]. A = 2: the negative loss is min(2.6, 2.56) at ratio 1.3, min(2.5, 2.5) at 1.25 and min(1, 1.6)
    at 0.5. A = -2: the loss is max(1, 1.6) at ratio 0.5, max(1.7, 1.7) at 0.85, and max(3, 2.56) at 1.5."""
    loss, clipped = clipped_surrogate(torch.tensor([1.3, 1.25, 0.5]), torch.tensor(2.0), Clip(0.2, 0.28))
    assert_close(loss, torch.tensor([-2.56, -2.5, -1.0]))
    assert clipped.tolist() == [True, False, False]
    loss, clipped = clipped_surrogate(torch.tensor([0.5, 0.85, 1.5]), torch.tensor(-2.0), Clip(0.2, 0.28))
    assert_close(loss, torch.tensor([1.6, 1.7, 3.0]))
    assert clipped.tolist() == [True, False, False]


def test_delta_bounds_the_loss_of_negative_advantages():
    """Delta 3. A = -2: the loss is 2 * 2 at ratio 2, and 2 * 3 without a gradient at ratio 50. A = 2 is as without."""
    ratio = torch.tensor([2.0, 50.0, 2.0, 50.0], requires_grad=True)
    loss, _ = clipped_surrogate(ratio, torch.tensor([-2.0, -2.0, 2.0, 2.0]), Clip(0.2, 0.2, delta=3.0))
    assert_close(loss.detach(), torch.tensor([4.0, 6.0, -2.4, -2.4]))
    (gradient,) = torch.autograd.grad(loss.sum(), ratio)
    assert_close(gradient, torch.tensor([2.0, 0.0, 0.0, 0.0]))


def test_clipped_tokens_have_no_gradient():
    """dL/dr = -A, and 0 where the clipped branch is the larger one. The limits are 0.8 and 1.28."""
    ratio = torch.tensor([1.0, 1.3, 0.5, 1.3, 0.5, 1.28], requires_grad=True)
    loss, clipped = clipped_surrogate(ratio, torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, 2.0]), Clip(0.2, 0.28))
    (gradient,) = torch.autograd.grad(loss.sum(), ratio)
    assert_close(gradient, torch.tensor([-2.0, 0.0, -2.0, 2.0, 0.0, -2.0]))
    assert clipped.tolist() == [False, True, False, False, True, False]


def test_both_limits_act_in_the_loss_of_every_algorithm():
    """Ratios 1.5 and 9, clip [0.8, 1.3], delta 3. A = 2: -2.6 each. A = -2: 3 and 6. RLOO and gspo have one token.
    cispo has only the limit 1.3: its loss is -1.3 * A * log p."""
    clip, (new, old) = Clip(0.2, 0.3, 3.0), ratios(1.5, 9.0)
    tokens = mask(1, 1)
    good = row(2, 2)
    bad = row(-2, -2)
    for loss_type in ("dapo", "grpo", "dr_grpo"):
        assert_close(o.grpo_policy_loss(new, old, good, tokens, clip, loss_type)[0], row(-2.6, -2.6))
        assert_close(o.grpo_policy_loss(new, old, bad, tokens, clip, loss_type)[0], row(3.0, 6.0))
    assert_close(o.grpo_policy_loss(new, old, bad, tokens, clip, "cispo")[0], 2.6 * new)
    assert_close(o.clipped_policy_loss(new, old, good, tokens, clip)[0], torch.tensor(-2.6))
    assert_close(o.clipped_policy_loss(new, old, bad, tokens, clip)[0], torch.tensor(4.5))
    one = (new.T, old.T, mask(1, 1).T)
    advantages = torch.tensor([-2.0, -2.0])
    assert_close(clipped_surrogate(o.completion_ratio(*one), advantages, clip)[0], torch.tensor([3.0, 6.0]))
    assert_close(o.grpo_policy_loss(one[0], one[1], bad.T, one[2], clip, "gspo")[0], torch.tensor([[3.0], [6.0]]))


def test_value_loss_matches_values_computed_by_hand():
    # V 0 -> 1, return 1, clip 0.2: clipped value 0.2, squared error 0.64 > 0. V 0 -> 0.1: not clipped, 0.81
    values = row(1, 0.1).requires_grad_()
    loss, clipped = o.clipped_value_loss(values, row(0, 0), row(1, 1), mask(1, 1), clip_range=0.2)
    assert float(loss.detach()) == pytest.approx(0.5 * (0.64 + 0.81) / 2)
    assert float(clipped) == 0.5
    # dL/dV = (V - R) / 2 tokens, and 0 for the first value, whose clipped error is the larger one
    assert_close(torch.autograd.grad(loss, values)[0], row(0, -0.45))


def test_share_of_the_masked_tokens():
    assert float(o.masked_share(mask(1, 0, 1, 1), mask(1, 1, 1, 0))) == pytest.approx(2 / 3)
    assert float(o.masked_share(mask(1, 0, 1, 1), mask(1, 1, 1, 0), torch.tensor(8.0))) == 0.25


def test_explained_variance_matches_values_computed_by_hand():
    # returns 1, 3 (variance 2); values 1, 2: errors 0, 1 (variance 0.5)
    assert float(o.explained_variance(row(1, 2), row(1, 3), mask(1, 1))) == pytest.approx(0.75)
    assert float(o.explained_variance(row(1, 2), row(3, 3), mask(1, 1))) == 0


def test_statistics_of_the_policy_match_values_computed_by_hand():
    """The second token is not in the loss."""
    outputs = PolicyOutputs(row(0.3, 5), row(2, 7), None)
    one = torch.tensor(1.0)
    experience = SimpleNamespace(loss_mask=mask(1, 0), logprobs=row(0.1, 0))
    losses = {"loss": 3 * one, "policy_loss": one, "clipfrac": 0.5 * one}
    stats = policy_stats(experience, torch.tensor([0]), outputs, 2 * one, **losses)
    assert float(stats["policy/approx_kl"]) == pytest.approx(0.5 * 0.2**2 / 2)
    assert float(stats["policy/entropy"]) == 1 and float(stats["policy/ratio"]) == pytest.approx(math.exp(0.2) / 2)
    assert [float(stats[n]) for n in ("loss", "policy/loss", "policy/clipfrac")] == [3, 1, 0.5]


def test_last_token_marks_the_last_token_of_the_mask():
    assert o.last_token(mask(1, 1, 0)).tolist() == [[False, True, False]]
    assert o.last_token(mask(1, 1, 1)).tolist() == [[False, False, True]]


@pytest.mark.parametrize("seed", range(5))
def test_tokens_after_eos_have_no_effect(seed):
    generator = torch.Generator().manual_seed(seed)
    on = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)

    def random_values():
        return torch.randn(3, 5, generator=generator)

    fields = {name: random_values() for name in ("new", "old", "ref", "values", "old_values", "returns", "advantages")}

    def all_outputs(f):
        kl = o.kl_k1(f["new"], f["ref"], on)
        rewards = o.shape_rewards(kl, torch.tensor([1.0, -1.0, 0.5]), on, 0.3)
        advantages, returns = o.generalized_advantage_estimate(rewards, f["values"], on, 0.97, 0.9)
        return [
            kl, o.kl_k3(f["new"], f["ref"], on), rewards, advantages, returns, o.whiten(f["advantages"], on),
            *o.clipped_policy_loss(f["new"], f["old"], f["advantages"], on, CLIP),
            *(
                x
                for kind in GRPO_LOSSES
                for x in o.grpo_policy_loss(f["new"], f["old"], f["advantages"], on, CLIP, kind)
            ),
            *o.clipped_value_loss(f["values"], f["old_values"], f["returns"], on, 0.2),
            o.explained_variance(f["values"], f["returns"], on),
        ]  # fmt: skip

    noisy = {name: torch.where(on, value, random_values() * 100) for name, value in fields.items()}
    for clean, dirty in zip(all_outputs(fields), all_outputs(noisy), strict=True):
        assert_close(clean, dirty, rtol=0, atol=0)


def test_micro_batch_losses_add_up_to_the_minibatch_loss():
    on = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    new = torch.randn(2, 3)
    old = torch.randn(2, 3)
    advantages = torch.randn(2, 3)
    whole, _ = o.clipped_policy_loss(new, old, advantages, on, CLIP)
    rows = [slice(i, i + 1) for i in range(2)]
    parts = [o.clipped_policy_loss(new[i], old[i], advantages[i], on[i], CLIP, on.sum()) for i in rows]
    assert_close(whole, parts[0][0] + parts[1][0])


# --- GRPO ------------------------------------------------------------------------------------------------------------


def test_group_advantages_match_values_computed_by_hand():
    """Groups (1, 3) and (4, 8): means 2 and 6, standard deviations sqrt(2) and sqrt(8). All four: sqrt(26 / 3)."""
    scores = torch.tensor([1.0, 3.0, 4.0, 8.0])
    assert_close(o.group_advantages(scores, 2), torch.tensor([-1.0, 1.0, -2.0, 2.0]))
    small, large, batch = (x**0.5 + 1e-4 for x in (2, 8, 26 / 3))
    by_group = torch.tensor([-1 / small, 1 / small, -2 / large, 2 / large])
    assert_close(o.group_advantages(scores, 2, "group"), by_group)
    assert_close(o.group_advantages(scores, 2, "batch"), torch.tensor([-1.0, 1.0, -2.0, 2.0]) / batch)
    assert_close(o.group_advantages(torch.full((4,), 7.0), 2, "group"), torch.zeros(4))


def ratios(*values: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new and rollout log-probs with these ratios. The rollout log-probs are log 0.1."""
    return row(*(math.log(0.1 * v) for v in values)), row(*(math.log(0.1) for _ in values))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_clipped_loss_matches_values_computed_by_hand(loss_type):
    """Ratios 1.5, 0.5, 1.1 at clip 0.2. A = 2: the negative loss is min(3, 2.4), min(1, 1.6), min(2.2, 2.2), so only
    the first is clipped. A = -2: the loss is max(3, 2.4), max(1, 1.6), max(2.2, 2.2), so only the second is."""
    new, old = ratios(1.5, 0.5, 1.1)
    loss, clipped = o.grpo_policy_loss(new, old, row(2, 2, 2), mask(1, 1, 1), CLIP, loss_type)
    assert_close(loss, row(-2.4, -1.0, -2.2))
    assert clipped.tolist() == [[True, False, False]]
    loss, clipped = o.grpo_policy_loss(new, old, row(-2, -2, -2), mask(1, 1, 1), CLIP, loss_type)
    assert_close(loss, row(3.0, 1.6, 2.2))
    assert clipped.tolist() == [[False, True, False]]


def test_gspo_has_one_ratio_per_completion():
    """The geometric mean of ratios 2 and 0.5 is 1. That of 2 and 2 is 2 and is clipped at 1.2."""
    new, old = ratios(2.0, 0.5, 9.0)
    loss, clipped = o.grpo_policy_loss(new, old, row(3, 3, 3), mask(1, 1, 0), CLIP, "gspo")
    assert_close(loss, row(-3.0, -3.0, 0.0))
    assert not clipped.any()
    new, old = ratios(2.0, 2.0)
    loss, clipped = o.grpo_policy_loss(new, old, row(3, 3), mask(1, 1), CLIP, "gspo")
    assert_close(loss, row(-3.6, -3.6))
    assert clipped.all()


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    """CISPO's loss is -min(ratio, 1.2) x A x log p. Its gradient in log p is -min(ratio, 1.2) x A; PPO-clip's is 0."""
    new, old = ratios(1.5, 0.5)
    new.requires_grad_()
    loss, clipped = o.grpo_policy_loss(new, old, row(2, 2), mask(1, 1), CLIP, "cispo")
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert_close(gradient, row(-2.4, -1.0))
    assert clipped.tolist() == [[True, False]]
    ppo, _ = o.grpo_policy_loss(new, old, row(2, 2), mask(1, 1), CLIP, "dapo")
    (gradient,) = torch.autograd.grad(ppo.sum(), new)
    assert_close(gradient, row(0.0, -1.0))


def test_token_weights_match_values_computed_by_hand():
    """Completions of 2 and 6 tokens. The minibatch has 4 completions and 16 tokens, and the maximum length is 10."""
    lengths = torch.tensor([2, 6])
    tokens = torch.tensor(16.0)
    expected = {
        "dapo": [1 / 16, 1 / 16], "cispo": [1 / 16, 1 / 16], "grpo": [1 / 8, 1 / 24], "gspo": [1 / 8, 1 / 24],
        "dr_grpo": [1 / 40, 1 / 40],
    }  # fmt: skip
    assert expected.keys() == set(GRPO_LOSSES)
    for loss_type, weights in expected.items():
        actual = o.grpo_token_weights(loss_type, lengths, 4, tokens, 10)
        assert_close(actual, torch.tensor(weights).unsqueeze(1), msg=loss_type)

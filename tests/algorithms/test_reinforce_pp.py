"""Tests of REINFORCE++: rewards to go of each token, normalized over the batch, against values computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from rlhf.algorithms.reinforce_pp import ReinforcePlusPlus
from rlhf.config import parse_cli
from rlhf.models.actor_critic import PolicyOutputs
from rlhf.rollout.completions import Rollout
from tests.conftest import whole_gradient

MASK = torch.tensor([[True, True, True], [True, True, False]])
KL = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]])


def algorithm(*flags: str):
    config = parse_cli(["--kl-coef", "0.1", "--batch-size", "2", *flags], "reinforce_pp")
    return ReinforcePlusPlus(config)


def experience(scores, *flags: str, token_scores=None):
    """Return the experience of completions of 3 and 2 tokens with a KL of (1, 2, 3) and (4, 5) nats."""
    completions = SimpleNamespace(action_mask=MASK, ended=torch.tensor([True, True]), sampled_logprobs=None)
    rollout = Rollout(completions, [], KL, torch.zeros(2, 3), None, token_scores)
    return algorithm(*flags).advantages(rollout, torch.tensor(scores), 0.1)


def test_advantages_match_values_computed_by_hand():
    """Rewards -0.1, -0.2, 2 - 0.3 and -0.4, 1 - 0.5. Their sums to go have mean 5.2 / 5 = 1.04 and, with deviations
    0.36, 0.46, 0.66, -0.94, -0.54, variance 1.952 / 4 = 0.488."""
    batch = experience([2.0, 1.0])
    assert_close(batch.rewards, torch.tensor([[-0.1, -0.2, 1.7], [-0.4, 0.5, 0.0]]))
    returns = torch.tensor([[1.4, 1.5, 1.7], [0.1, 0.5, 0.0]])
    assert_close(batch.returns, returns)
    assert_close(batch.raw_advantages, returns)
    deviations = torch.tensor([[0.36, 0.46, 0.66], [-0.94, -0.54, 0.0]])
    assert_close(batch.advantages, deviations / math.sqrt(0.488))


def test_completion_without_a_score_does_not_count():
    """The other returns are 1.4, 1.5, 1.7: mean 4.6 / 3, deviations -0.4/3, -0.1/3, 0.5/3, variance 0.14 / 6."""
    batch = experience([2.0, math.nan])
    expected = torch.tensor([-0.4, -0.1, 0.5]) / 3 / math.sqrt(0.14 / 6)
    assert_close(batch.advantages[0], expected)
    assert not batch.advantages[1].any()


def test_kl_in_the_loss_is_not_in_the_rewards():
    """The rewards to go are the score at every token."""
    batch = experience([2.0, 1.0], "--kl-placement", "loss")
    assert batch.returns.tolist() == [[2, 2, 2], [1, 1, 0]]


@pytest.mark.parametrize(
    ("gamma", "first"), [("0", [0.5, -1.0, 0.25]), ("1", [-0.25, -0.75, 0.25]), ("0.5", [0.0625, -0.875, 0.25])]
)
def test_scores_of_tokens_are_discounted(gamma, first):
    """Scores 0.5, -1 and 0.25: at gamma 0 the advantages before whitening are the scores, at gamma 1 the sums to go,
    at 0.5 the second one is -1 + 0.5 x 0.25 and the first one 0.5 - 0.5 x 0.875. The scores of the completions do not
    count in addition."""
    token_scores = torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 9.0]])
    batch = experience([7.0, 0.0], "--kl-placement", "loss", "--gamma", gamma, token_scores=token_scores)
    assert_close(batch.raw_advantages, torch.tensor([first, [0.0, 0.0, 0.0]]))
    assert_close(batch.rewards, torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]))


def test_loss_matches_values_computed_by_hand():
    """Ratios 1.1, 1.5, 0.5 and 1, 0.7, clip 0.2; A = 1, 1, 1, -1, -1. The terms are -1.1, -1.2 (clipped), -0.5, 1 and
    0.8 (clipped): the mean over five tokens is -0.2."""
    batch = experience([2.0, 1.0])
    batch.advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])
    ratios = torch.tensor([[1.1, 1.5, 0.5], [1.0, 0.7, 1.0]])
    outputs = PolicyOutputs(batch.logprobs + ratios.log(), torch.zeros(2, 3), None)
    loss, stats = algorithm("--clip-range", "0.2").loss(batch, torch.tensor([0, 1]), outputs, torch.tensor(5.0))
    assert float(loss) == pytest.approx(-0.2) and float(stats["policy/clipfrac"]) == pytest.approx(0.4)


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_micro_batches_give_the_same_gradient(build, placement):
    gradients = []
    for size in (1, 3, 4):
        flags = ("--kl-placement", placement, "--entropy-coef", 0.1, "--micro-batch-size", size)
        trainer = build(*flags, algorithm="reinforce_pp")
        rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
        batch = trainer.advantages(rollout, torch.arange(4.0))
        trainer.host.model.train()
        gradients.append(whole_gradient(trainer, batch)[1])
    assert_close(gradients[0], gradients[2], atol=1e-6, rtol=1e-4)
    assert_close(gradients[1], gradients[2], atol=1e-6, rtol=1e-4)
    assert gradients[0].abs().max() > 0

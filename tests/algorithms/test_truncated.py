"""Tests of --mask-truncated-completions: completions without EOS are not in the loss, but count in baselines."""

from __future__ import annotations

import pytest
import torch

from rlhf.algorithms import objectives
from rlhf.algorithms.table import ALGORITHMS
from rlhf.settings.fields import settings_of
from rlhf.settings.training import Config
from tests.conftest import whole_gradient

FLAGS = ("--mask-truncated-completions", "--kl-placement", "none")
SCORES = torch.tensor([1.0, 2.0, 3.0, 6.0])


def experience(trainer, *ended: bool, scores=SCORES):
    """Return the experience of four completions, of which some end with EOS."""
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    rollout.completions.ended = torch.tensor(ended)
    return trainer.advantages(rollout, scores)


def make(build, algorithm, *flags):
    groups = [] if ALGORITHMS[algorithm].group_size == 1 else ["--K", 4, "--batch-size", 1]
    return build(*FLAGS, *groups, *flags, algorithm=algorithm)


@pytest.mark.parametrize(("algorithm", "expected"), [("grpo", [0, -1, 0, 3]), ("rloo", [0, -4 / 3, 0, 4])])
def test_scores_of_truncated_completions_count_in_the_baseline(build, algorithm, expected):
    """Completions 0 and 2 are truncated. GRPO: the mean of all scores is 3. RLOO: the means of the others are 10/3 for
    completion 1, and 2 for completion 3."""
    batch = experience(make(build, algorithm), False, True, False, True)
    assert batch.advantages[:, 0].tolist() == pytest.approx(expected)
    assert batch.loss_mask.any(1).tolist() == batch.scored_mask.any(1).tolist() == [False, True, False, True]


def test_ppo_whitens_over_completions_with_eos(build):
    """The mean of the whitened advantages over their tokens is 0 and the variance 1; truncated ones have 0."""
    batch = experience(make(build, "ppo"), False, True, False, True)
    kept = batch.advantages[batch.loss_mask]
    assert float(kept.mean()) == pytest.approx(0, abs=1e-5) and float(kept.var()) == pytest.approx(1, rel=1e-3)
    assert not batch.advantages[[0, 2]].any() and not batch.returns[[0, 2]].any()


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_truncated_completions_have_no_gradient(build, algorithm):
    """Changed advantages, log-probs and returns of the truncated completions change no gradient. Every term is on:
    policy, value, entropy and KL."""
    trainer = make(build, algorithm, "--kl-placement", "loss", "--kl-coef", 0.5, "--entropy-coef", 0.1)
    batch = experience(trainer, False, True, False, True)
    first = whole_gradient(trainer, batch)[1]
    of_critic = ["returns", "values"] if ALGORITHMS[algorithm].has_critic else []
    for name in ("advantages", "logprobs", "ref_logprobs", *of_critic):
        getattr(batch, name)[[0, 2]] += 0.5
    assert torch.equal(first, whole_gradient(trainer, batch)[1])
    batch.advantages[1] += 0.5
    assert not torch.equal(first, whole_gradient(trainer, batch)[1])


def test_mean_entropy_is_over_tokens_in_the_loss(build):
    """With 8 tokens each, the entropy over two completions of four is their mean, not half of it."""
    trainer = make(build, "ppo")
    batch = experience(trainer, False, True, False, True)
    masked = float(trainer.policy_optimizer.minibatch_gradients(batch, [0, 1, 2, 3])["policy/entropy"])
    alone = experience(make(build, "ppo"), True, True, True, True)
    trainer.host.model.zero_grad()
    pair = float(trainer.policy_optimizer.minibatch_gradients(alone, [1, 3])["policy/entropy"])
    assert masked == pytest.approx(pair, rel=1e-4)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_micro_batches_add_up_with_truncated_completions(build, algorithm):
    """One completion per micro-batch, two of them without a token in the loss, or all four together."""
    gradients = []
    for size in (0, 1):
        trainer = make(build, algorithm, "--entropy-coef", 0.1, "--max-grad-norm", 1e9, "--micro-batch-size", size)
        batch = experience(trainer, False, True, False, True)
        trainer.policy_optimizer.minibatch_gradients(batch, [0, 1, 2, 3])
        gradients.append(torch.cat([w.grad.flatten() for w in trainer.host.model.parameters()]))
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


LOSSES = [("ppo", ()), ("rloo", ()), *(("grpo", ("--loss-type", t)) for t in settings_of(Config)["loss_type"].choices)]


@pytest.mark.parametrize(("algorithm", "flags"), LOSSES)
def test_update_with_only_truncated_completions_changes_nothing(build, algorithm, flags):
    """The tiny model does not end in 8 tokens. Each metric is finite, and no weight moves: all gradients are 0."""
    trainer = make(
        build,
        algorithm,
        *flags,
        "--kl-placement",
        "loss",
        "--entropy-coef",
        0.1,
        "--minibatches",
        2,
        "--micro-batch-size",
        1,
    )
    before = [weight.detach().clone() for weight in trainer.actor.parameters()]
    metrics = trainer.update_step(1)
    assert metrics["completions/eos_rate"] == 0
    assert all(value == value and abs(value) < 1e9 for value in metrics.values())
    assert metrics["policy/ratio"] == 1 and metrics["policy/grad_norm"] == 0
    assert trainer.progress.skipped == 0 and trainer.progress.optimizer_steps == 4
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters(), strict=True))


def test_weights_of_masked_completions_are_finite():
    """Lengths 0 and 4, minibatch of 2: 1 / (2 * 1) and 1 / (2 * 4)."""
    weights = objectives.grpo_token_weights("grpo", torch.tensor([0, 4]), 2, torch.tensor(4.0), 8)
    assert weights.flatten().tolist() == [0.5, 0.125]

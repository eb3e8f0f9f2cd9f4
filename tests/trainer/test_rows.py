"""Tests of completions that can have no gradient: the optimizer steps compute only the others."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.algorithms.table import ALGORITHMS
from tests.conftest import BY_TIER

NONE = ("--kl-placement", "none")
FIXED = ("--kl-schedule", "fixed", "--kl-coef", 0)
DIFFERENT = [0.0, 1.0, 2.0, 5.0, 3.0, 1.0]


def trained(build, algorithm, scores, *flags, whole=False, updates=2):
    """Make updates of two groups of three: the first with different scores, the others with `scores`. With `whole`,
    all completions are computed. Returns the trainer, the metrics of the last update, and the rows of its passes."""
    given = iter([DIFFERENT] + [scores] * (updates - 1))
    sizes = ("--batch-size", 2, "--K", 3) if ALGORITHMS[algorithm].group_size > 1 else ("--batch-size", 6)
    common = (*sizes, "--micro-batch-size", 2, "--reward-func", "length_penalty")
    trainer = build(*common, *flags, algorithm=algorithm, rewards=[lambda completions, **_: next(given)])
    trainer.host.model.double()
    trainer.reference.copy.double()
    if whole:
        trainer.algorithm.counted = lambda rollout, scores, kl_coef: torch.ones(6, dtype=torch.bool)
    rows = []
    gradients = trainer.policy_optimizer.gradients

    def watched(experience, forward, *more):
        rows.append(forward.micro_batch.rows)
        return gradients(experience, forward, *more)

    for update in range(1, updates + 1):
        trainer.policy_optimizer.gradients = watched if update == updates else gradients
        metrics = trainer.update_step(update)
        assert trainer.progress.skipped == 0
    return trainer, metrics, [row for one in rows for row in one]


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.host.model.parameters()])


SCORES = {
    "one group counts": ([2.0, 2.0, 2.0, 0.0, 1.0, 2.0], {3, 4, 5}),
    "rounded mean": ([0.1, 0.1, 0.1, 0.0, 1.0, 2.0], {3, 4, 5}),
    "none counts": ([0.0, 0.0, 0.0, 2.0, 2.0, 2.0], set()),
    "without a score": ([None, None, 1.0, 0.0, None, 2.0], {3, 5}),
}


@pytest.mark.parametrize("case", SCORES)
@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("grpo", (*NONE, "--minibatches", 2)),
        ("grpo", (*NONE, "--scale-rewards", "batch", "--ppo-epochs", 1)),
        ("grpo", FIXED),
        ("rloo", (*FIXED, "--kl-placement", "loss")),
        ("rloo", (*NONE, "--minibatches", 3)),
    ],
)
def test_groups_with_equal_scores_are_not_computed_and_the_weights_are_the_same(build, algorithm, flags, case):
    """The momentum of the first update moves the weights, too, if no completion of a minibatch counts."""
    scores, counted = SCORES[case]
    one, metrics, rows = trained(build, algorithm, scores, *flags)
    two, of_all, all_rows = trained(build, algorithm, scores, *flags, whole=True)
    epochs = one.config.batch.ppo_epochs
    assert sorted(rows) == sorted([*counted] * epochs) and sorted(all_rows) == sorted([*range(6)] * epochs)
    torch.testing.assert_close(weights(one), weights(two), rtol=0, atol=1e-9)
    before, _, _ = trained(build, algorithm, scores, *flags, updates=1)
    assert (weights(one) - weights(before)).abs().max() > 1e-5
    assert one.progress.optimizer_steps == two.progress.optimizer_steps
    for name in ("loss", "policy/loss", "policy/grad_norm"):
        assert metrics[name] == pytest.approx(of_all[name], abs=1e-9)


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.ci)])
@pytest.mark.parametrize(
    "flags",
    [("--kl-placement", "loss"), ("--kl-placement", "reward"), (*NONE, "--entropy-coef", 0.1)],
    ids=["KL in the loss", "KL in the reward", "entropy bonus"],
)
def test_all_completions_are_computed_if_more_than_the_score_has_a_gradient(build, algorithm, flags):
    _, _, rows = trained(build, algorithm, SCORES["one group counts"][0], *flags, "--ppo-epochs", 1)
    assert sorted(rows) == list(range(6))


@pytest.mark.parametrize("algorithm", BY_TIER)
@pytest.mark.parametrize(
    "flags", [NONE, ("--kl-placement", "loss", "--entropy-coef", 0.1)], ids=["score", "all terms"]
)
def test_completions_without_a_token_in_the_loss_are_not_computed(build, algorithm, flags, monkeypatch):
    def some_end(trainer):
        rollout_of = trainer.collector.rollout

        def with_ends(episodes):
            rollout = rollout_of(episodes)
            rollout.completions.ended = torch.tensor([True, False, True, False, True, True])
            return rollout

        trainer.collector.rollout = with_ends

    def ended(*given, **more):
        trainer = build(*given, **more)
        some_end(trainer)
        return trainer

    greedy = ALGORITHMS[algorithm].greedy  # with two minibatches, one could have only greedy and truncated completions
    flags = (*flags, "--mask-truncated-completions", "--minibatches", 1 if greedy else 2)
    one, metrics, rows = trained(ended, algorithm, DIFFERENT, *flags)
    two, of_all, _ = trained(ended, algorithm, DIFFERENT, *flags, whole=True)
    assert sorted(rows) == sorted([r for r in (0, 2, 4, 5) if r % 3 < 3 - greedy] * one.config.batch.ppo_epochs)
    torch.testing.assert_close(weights(one), weights(two), rtol=0, atol=1e-9)
    assert metrics["loss"] == pytest.approx(of_all["loss"], abs=1e-9)
    if algorithm != "rloo":  # its ratio is a mean over completions
        assert metrics["policy/ratio"] == pytest.approx(of_all["policy/ratio"], abs=1e-9)


def batch_of(trainer, scores):
    """Return the experience of a rollout. Of the six completions, the last three count."""
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    return trainer.advantages(rollout, torch.tensor(scores))


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.ci)])
def test_statistics_are_means_over_what_is_computed(build, algorithm):
    """Log ratios of 0.2 per token: a ratio of e^0.2 per token, and of e^(0.2 x 8) per completion of 8 tokens."""
    trainer = build("--batch-size", 2, "--K", 3, *NONE, algorithm=algorithm)
    batch = batch_of(trainer, SCORES["one group counts"][0])
    assert batch.counted == [False] * 3 + [True] * 3
    batch.logprobs[3:] -= 0.2
    batch.logprobs[:3] -= 3.0
    stats = trainer.policy_optimizer.minibatch_gradients(batch, [0, 5, 4, 3, 2, 1])
    tokens = 8 if algorithm == "rloo" else 1
    assert float(stats["policy/ratio"]) == pytest.approx(math.exp(0.2 * tokens), rel=1e-4)
    assert float(stats["policy/approx_kl"]) == pytest.approx(0.02, rel=1e-3)
    assert float(stats["policy/clipfrac"]) in (0, pytest.approx(1 / 3))
    batch.counted = None
    of_all = trainer.policy_optimizer.minibatch_gradients(batch, [0, 1, 2, 3, 4, 5])
    trainer.host.model.zero_grad()
    alone = trainer.policy_optimizer.minibatch_gradients(batch, [3, 4, 5])
    assert float(stats["policy/entropy"]) == pytest.approx(float(alone["policy/entropy"]), rel=1e-4)
    assert float(of_all["policy/ratio"]) > 2 * float(stats["policy/ratio"])


def test_update_with_few_counted_tokens_is_not_skipped(build):
    """One group of twelve counts. Over all tokens, the mean ratio would be 1 / 12."""
    scores = [1.0] * 22 + [0.0, 1.0]
    trainer = build(
        "--batch-size", 12, "--K", 2, *NONE, algorithm="grpo", rewards=[lambda completions, **_: scores]
    )  # fmt: skip
    metrics = trainer.update_step(1)
    assert trainer.progress.skipped == 0 and metrics["policy/ratio"] == pytest.approx(1, abs=0.1)


def test_steps_without_a_completion_do_not_count_in_the_means_of_an_update(build):
    """Two minibatches of one group each. The loss of a step without a completion is 0, its ratio 1."""
    trainer = build("--batch-size", 2, "--K", 2, "--minibatches", 2, "--ppo-epochs", 1, *NONE, algorithm="grpo")
    batch = trainer.advantages(trainer.collector.collect(trainer.episodes_of(1), 1), torch.tensor([1.0, 1, 0, 1]))
    trainer.policy_optimizer.minibatches = lambda update, epoch: iter([[0, 1], [2, 3]])
    stats = trainer.policy_optimizer.run(batch, 1)
    alone = trainer.policy_optimizer.minibatch_gradients(batch, [2, 3])
    assert stats["policy/entropy"] == pytest.approx(float(alone["policy/entropy"]), rel=1e-2)
    assert stats["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert stats["policy/grad_norm"] == pytest.approx(float(alone["policy/grad_norm"]) / 2, rel=0.1)

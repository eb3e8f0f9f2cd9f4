"""Tests of log-probs that the pass of the first optimizer step computes, without a pass before it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from rlhf.algorithms.experience import Experience
from rlhf.algorithms.table import ALGORITHMS
from rlhf.trainer.loop import OnPolicyLoop

FLAGS = ("--minibatches", 1, "--ppo-epochs", 1, "--micro-batch-size", 2)
WITHOUT_CRITIC = [name for name, row in ALGORITHMS.items() if not row.has_critic]


class Reader:
    """Stores the log-probs that a callback receives."""

    def __init__(self):
        self.logprobs = []

    def on_batch(self, update, batch, scores):
        self.logprobs.append(batch.logprobs.clone())


@dataclass
class Trained:
    """What updates of a trainer gave, and the rows of each pass of the policy."""

    trainer: OnPolicyLoop
    before: list[torch.Tensor] = field(default_factory=list)  # log-probs before the optimizer steps
    batches: list[Experience] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)


def trained(build, *flags, algorithm="grpo", deferred=True, callbacks=(), updates=2, scores=None) -> Trained:
    """Make updates in float64, with `deferred` False as if the log-probs were always computed before."""
    row = ALGORITHMS[algorithm]
    sizes = ("--batch-size", 2, "--K", 2 + row.greedy) if row.group_size > 1 else ("--batch-size", 4)
    rewards = {} if scores is None else {"rewards": [lambda completions, **_: scores]}
    trainer = build(*sizes, *FLAGS, *flags, algorithm=algorithm, callbacks=callbacks, **rewards)
    trainer.host.model.double()
    if trainer.reference.copy is not None:
        trainer.reference.copy.double()
    trainer.deferrable = trainer.deferrable and deferred
    found = Trained(trainer)
    run_pass = trainer.passes.run
    run_steps = trainer.policy_optimizer.run

    def watched_pass(completions, part):
        found.rows.append(sorted(part))
        return run_pass(completions, part)

    def watched_steps(experience, update):
        found.before.append(experience.logprobs.clone())
        found.batches.append(experience)
        return run_steps(experience, update)

    trainer.passes.run = watched_pass
    trainer.policy_optimizer.run = watched_steps
    found.metrics = [trainer.update_step(update) for update in range(1, updates + 1)]
    assert trainer.progress.skipped == 0
    return found


def weights(found: Trained) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in found.trainer.host.model.parameters()])


@pytest.mark.parametrize("algorithm", WITHOUT_CRITIC)
@pytest.mark.parametrize(
    "flags",
    [
        ("--kl-placement", "loss", "--kl-coef", "0.2"),
        ("--kl-placement", "loss", "--ppo-epochs", "2"),
        ("--kl-placement", "none"),
        ("--kl-placement", "loss", "--gradient-checkpointing"),
    ],
    ids=" ".join,
)
def test_one_pass_per_micro_batch_gives_the_same_weights_and_metrics(build, algorithm, flags):
    one = trained(build, *flags, algorithm=algorithm)
    two = trained(build, *flags, algorithm=algorithm, deferred=False)
    epochs = one.trainer.config.batch.ppo_epochs
    assert len(one.rows) == 2 * 2 * epochs and len(two.rows) > len(one.rows)
    torch.testing.assert_close(weights(one), weights(two), rtol=0, atol=1e-10)
    for found, other in zip(one.batches, two.batches, strict=True):
        known = found.mask & ~found.logprobs.isnan()
        assert known.any()
        torch.testing.assert_close(found.logprobs[known], other.logprobs[known], rtol=0, atol=1e-10)
    for ours, theirs in zip(one.metrics, two.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        same = {name for name in ours if not name.startswith(("time", "throughput", "memory"))}
        assert {name: ours[name] for name in same} == pytest.approx({name: theirs[name] for name in same}, abs=1e-9)
    assert one.metrics[0]["policy/ratio"] == 1 or epochs > 1


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("ppo", ("--kl-placement", "loss")),
        ("grpo", ("--kl-placement", "reward")),
        ("grpo", ("--kl-placement", "loss", "--minibatches", 2)),
        ("grpo", ("--kl-placement", "loss", "--use-lora", "--lora-dropout", 0.1)),
    ],
    ids=["critic", "KL in the reward", "minibatches", "dropout"],
)
def test_log_probs_that_are_needed_before_or_without_dropout_have_a_separate_pass(build, algorithm, flags):
    found = trained(build, *flags, algorithm=algorithm, updates=1)
    assert not found.before[0].isnan().any()
    assert torch.equal(found.before[0], found.batches[0].logprobs)


def test_a_callback_receives_log_probs_and_changes_nothing(build):
    flags = ("--kl-placement", "loss")
    reader = Reader()
    one = trained(build, *flags)
    two = trained(build, *flags, callbacks=[reader])
    assert one.before[0].isnan().all() and not reader.logprobs[0].isnan().any()
    torch.testing.assert_close(reader.logprobs[0], two.batches[0].logprobs, rtol=0, atol=1e-12)
    assert torch.equal(weights(one), weights(two)) and len(two.rows) == 2 * len(one.rows)


def test_token_records_have_all_log_probs(build):
    found = trained(build, "--kl-placement", "none", "--record-tokens", updates=1)
    assert not found.before[0].isnan().any() and not found.batches[0].kl.isnan().any()


def test_rows_whose_kl_is_logged_have_log_probs_also_without_a_gradient(build):
    """Nothing charges the KL, so the reference scores completion 0. It has no gradient, because its group's scores are
    equal."""
    found = trained(build, "--kl-placement", "none", scores=[1.0, 1.0, 0.0, 1.0])
    assert found.rows == [[0], [2, 3]] * 2
    batch = found.batches[1]
    assert (~batch.logprobs.isnan().any(1)).tolist() == [True, False, True, True]
    expected = (batch.logprobs - batch.ref_logprobs)[0][batch.mask[0]].sum()
    assert found.metrics[1]["kl_divergence"] == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_update_without_a_gradient_computes_the_logged_kl_only(build, minibatches):
    found = trained(build, "--kl-placement", "none", "--minibatches", minibatches, scores=[1.0] * 4)
    assert found.rows == [[0]] * 2 and found.trainer.progress.optimizer_steps == 2 * minibatches
    assert found.metrics[1]["policy/grad_norm"] == 0 and found.metrics[1]["policy/ratio"] == 1


def test_given_completions_have_the_log_probs_of_the_policy_that_sampled(build):
    """The policy has made a step since then."""
    trainer = trained(build, "--kl-placement", "loss", updates=1).trainer
    rollout = trainer.collector.collect(trainer.episodes_of(2), 2)
    trainer.update_step(2)
    batch = trainer.advantages(rollout, torch.tensor([1.0, 0.0, 2.0, 5.0]))
    before = batch.logprobs.clone()
    stats = trainer.policy_optimizer.run(batch, 3)
    assert torch.equal(batch.logprobs, before) and abs(stats["policy/ratio"] - 1) > 1e-6

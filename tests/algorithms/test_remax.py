"""Tests of ReMax: the score of the greedy completion is the baseline, and nothing learns from its tokens."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

import train_remax
from rlhf.algorithms.remax import ReMax
from rlhf.config import parse_cli
from rlhf.models.packing import PackedMicroBatch
from rlhf.rollout.completions import Rollout
from rlhf.trainer.metrics import rollout_metrics

# two prompts, each with a sampled and a greedy completion, whose tokens are not the policy's
MASK = torch.tensor([[True, True, True], [False] * 3, [True, True, False], [False] * 3])
KL = torch.tensor([[1.0, 2.0, 3.0], [9.0, 9.0, 9.0], [4.0, 5.0, 9.0], [9.0, 9.0, 9.0]])


def experience(scores, *flags: str):
    """Return the experience of sampled completions of 3 and 2 tokens with a KL of (1, 2, 3) and (4, 5) nats."""
    config = parse_cli(["--kl-coef", "0.1", "--batch-size", "2", *flags], "remax")
    completions = SimpleNamespace(action_mask=MASK, ended=torch.tensor([True] * 4), sampled_logprobs=None)
    rollout = Rollout(completions, [], KL, torch.zeros(4, 3), None)
    return ReMax(config).advantages(rollout, torch.tensor(scores), 0.1)


def test_advantages_match_values_computed_by_hand():
    """Scores 2 and 1 minus the greedy 0.5 and 3: 1.5 and -2. Rewards -0.1, -0.2, 1.5 - 0.3 and -0.4, -2 - 0.5."""
    batch = experience([2.0, 0.5, 1.0, 3.0])
    expected = torch.tensor([[0.9, 1.0, 1.2], [0.0, 0.0, 0.0], [-2.9, -2.5, 0.0], [0.0, 0.0, 0.0]])
    assert_close(batch.advantages, expected)


def test_without_a_kl_in_the_reward_each_token_has_the_difference():
    batch = experience([2.0, 0.5, 1.0, 3.0], "--kl-placement", "loss")
    assert batch.advantages.tolist() == [[1.5, 1.5, 1.5], [0, 0, 0], [-2, -2, 0], [0, 0, 0]]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_pair_without_one_of_its_scores_has_advantage_0(missing):
    scores = [2.0, 0.5, 1.0, 3.0]
    scores[missing] = math.nan
    batch = experience(scores)
    assert not batch.advantages[:2].any() and batch.advantages[2, 1] == pytest.approx(-2.5)


def test_the_baseline_is_the_most_likely_completion(build):
    """Each of its tokens is the arg max of the logits. No mask has its tokens, and they count as sampled."""
    trainer = build("--batch-size", 3, "--K", 3, "--temperature", 1.5, algorithm="remax")
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    completions = rollout.completions
    greedy = [2, 5, 8]
    assert [row for row, turns in enumerate(completions.turns) if not turns] == greedy
    assert not rollout.mask[greedy].any() and completions.mask[greedy].any(1).all()
    assert trainer.progress.episodes == 9
    assert trainer.progress.completion_tokens == sum(completions.completion_lengths) > completions.tokens
    policy = trainer.actor.policy.eval()
    for row in greedy:
        prompt = list(rollout.prompts[row].ids)
        own = completions.rows()[row]
        with torch.no_grad():
            logits = policy(torch.tensor([[*prompt, *own]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == own
    sampled = [completions.rows()[row] for row in (0, 1)]
    assert sampled[0] != sampled[1]


def test_no_metric_and_no_step_depends_on_the_greedy_tokens(build):
    """Metrics are means over the sampled completions. The statistics and the gradient are those of a batch whose
    greedy completions have other tokens."""
    trainer = build("--kl-coef", 0.1, algorithm="remax", rewards=[lambda completions, **_: [1.0, 7.0, 2.0, 7.5]])
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    scores = trainer.collector.score(rollout)
    batch = trainer.advantages(rollout, scores.shaped)
    metrics = rollout_metrics(batch, scores, 2)
    lengths = rollout.completions.completion_lengths
    assert metrics["rewards/mean"] == 1.5 and metrics["rewards/std"] == 0.5
    assert metrics["completions/mean_length"] == (lengths[0] + lengths[2]) / 2
    assert "kl_divergence/completions" not in metrics and metrics["rewards/equal_groups"] == 0
    assert metrics["advantage/mean"] == pytest.approx(-(6 * lengths[0] + 5.5 * lengths[2]) / (lengths[0] + lengths[2]))
    assert batch.counted == [True, False, True, False]
    stats, gradient = whole_gradient_of_counted(trainer, batch)
    batch.completions.completion_ids[[1, 3]] = 5
    again, other = whole_gradient_of_counted(trainer, batch)
    assert torch.equal(gradient, other) and {k: float(v) for k, v in stats.items()} == {
        k: float(v) for k, v in again.items()
    }


def whole_gradient_of_counted(trainer, batch):
    trainer.host.model.train()
    stats = trainer.policy_optimizer.minibatch_gradients(batch, [0, 1, 2, 3])
    return stats, torch.cat([w.grad.flatten() for w in trainer.host.model.parameters() if w.grad is not None])


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_first_pass_is_shared_and_the_ratio_is_1(build, monkeypatch, placement):
    """Nothing is computed for the greedy completions."""
    rows = []
    forward = PackedMicroBatch.forward
    monkeypatch.setattr(
        PackedMicroBatch, "forward", lambda self, backbone: rows.append(self.rows) or forward(self, backbone)
    )
    reward = lambda completions, **_: [1.0, 0.0] * 2  # noqa: E731
    trainer = build("--ppo-epochs", 1, "--kl-placement", placement, algorithm="remax", rewards=[reward])
    logged = trainer.update_step(1)
    assert logged["policy/ratio"] == pytest.approx(1, abs=1e-6)
    assert set().union(*map(set, rows)) == {0, 2} and len(rows) == 2, "the reference's and the policy's"


def test_dynamic_sampling_keeps_the_greedy_completion_last(build):
    calls = []

    def reward(completions, **_):
        calls.append(len(completions))
        return [1.0, 1.0, 0.0, 2.0] if len(calls) == 1 else [3.0, 0.0] * (len(completions) // 2)

    trainer = build("--dynamic-sampling", 1, algorithm="remax", rewards=[reward])
    trainer.events.read_batches = True
    seen = []
    trainer.add_callback(type("Look", (), {"on_batch": lambda self, update, batch, scores: seen.append(batch)})())
    trainer.update_step(1)
    assert [bool(turns) for turns in seen[0].completions.turns] == [True, False, True, False]
    assert sorted(seen[0].scores.tolist()) == [0.0, 0.0, 2.0, 3.0]


def test_what_cannot_have_a_greedy_completion_is_refused(build, user_error):
    with user_error("--rollout-engine vllm", "ReMax"):
        parse_cli(["--rollout-engine", "vllm"], "remax")
    with user_error("--K 1"):
        parse_cli(["--K", "1"], "remax")
    trainer = build(algorithm="remax")
    with user_error("ReMax", "begin()"):
        trainer.generate([trainer.train_prompts[0]])


def test_the_script_trains(run_flags, tmp_path):
    train_remax.main(run_flags("--batch-size", 2))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["algorithm"], record["spent"]["episodes"], "row" in record) == ("remax", 8, False)
    assert record["settings"]["batch"]["K"] == 2


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_give_the_same_gradient(build, size):
    found = []
    for rows in (0, size):
        trainer = build("--micro-batch-size", rows, "--entropy-coef", 0.1, algorithm="remax")
        rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
        batch = trainer.advantages(rollout, torch.arange(4.0))
        found.append(whole_gradient_of_counted(trainer, batch)[1])
    assert_close(found[0], found[1], atol=1e-6, rtol=1e-4)

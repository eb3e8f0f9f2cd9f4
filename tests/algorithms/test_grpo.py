"""Tests of GRPO: groups, advantages, loss types, the KL in the reward, and the logged KL, which must equal PPO's."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from rlhf.config import parse_cli
from rlhf.trainer.metrics import rollout_metrics
from tests.conftest import whole_gradient


@pytest.fixture
def grpo(build):
    return lambda *flags, **parts: build(*flags, algorithm="grpo", **parts)


def per_completion(batch) -> torch.Tensor:
    """Return the advantage of each completion, (B,), after checking that all of its tokens have the same."""
    mask = batch.mask
    advantages = batch.raw_advantages
    assert torch.equal(torch.where(mask, advantages, 0.0), advantages), "advantages outside the mask must be 0"
    first = advantages[:, 0]
    assert_close(torch.where(mask, advantages, first.unsqueeze(1)), first.unsqueeze(1).expand_as(advantages))
    return first


def collect_rollout(trainer):
    return trainer.collector.collect(trainer.episodes_of(1), 1)


def test_group_advantages_match_values_computed_by_hand(grpo):
    """Two groups of 4: A = r - mean(r). --scale-rewards group divides A by the group's unbiased deviation + 1e-4."""
    scores = torch.tensor([1.0, 2, 3, 6, 5, 5, 5, 5])
    flags = ("--K", 4, "--kl-placement", "none")
    trainer = grpo(*flags)
    assert_close(
        per_completion(trainer.advantages(collect_rollout(trainer), scores)),
        torch.tensor([-2.0, -1, 0, 3, 0, 0, 0, 0]),
    )
    deviation = (14 / 3) ** 0.5 + 1e-4
    trainer = grpo(*flags, "--scale-rewards", "group")
    expected = torch.tensor([-2 / deviation, -1 / deviation, 0, 3 / deviation, 0, 0, 0, 0])
    assert_close(per_completion(trainer.advantages(collect_rollout(trainer), scores)), expected)
    whole = (sum((s - 4) ** 2 for s in scores.tolist()) / 7) ** 0.5 + 1e-4
    trainer = grpo(*flags, "--scale-rewards", "batch")
    expected = torch.tensor([-2 / whole, -1 / whole, 0, 3 / whole, 0, 0, 0, 0])
    assert_close(per_completion(trainer.advantages(collect_rollout(trainer), scores)), expected)


def test_kl_in_the_reward_matches_a_plain_forward_pass(grpo):
    """With a changed reference model: A = r - mean(r), r = s - beta KL, with the KL from a plain forward pass."""
    beta = 0.7
    trainer = grpo("--K", 4, "--kl-coef", beta, "--kl-schedule", "fixed")
    with torch.no_grad():
        for weight in trainer.reference.copy.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    rollout = collect_rollout(trainer)
    scores = torch.arange(8.0)
    advantages = per_completion(trainer.advantages(rollout, scores))
    rewards = []
    for prompt, completion, score in zip(rollout.prompts, rollout.completions.rows(), scores.tolist(), strict=True):
        ids = torch.tensor([[*prompt.ids, *completion]])
        with torch.no_grad():
            p, q = ((m(ids).logits[0] / 0.7).log_softmax(-1) for m in (trainer.actor.policy, trainer.reference.copy))
        at = range(len(prompt.ids) - 1, ids.shape[1] - 1)
        kl = sum(float(p[i, token] - q[i, token]) for i, token in zip(at, completion, strict=True))
        rewards.append(score - beta * kl)
    groups = torch.tensor(rewards).view(2, 4)
    assert_close(advantages, (groups - groups.mean(1, keepdim=True)).flatten(), rtol=0, atol=1e-4)
    scores = scores.view(2, 4)
    assert float((advantages - (scores - scores.mean(1, keepdim=True)).flatten()).abs().max()) > 0.05


def test_ppo_and_grpo_log_the_same_kl_for_the_same_completions(build, tmp_path):
    """With the same trained policy, prompts and random numbers, the completions and all logged KL values agree."""
    trained = build("--learning-rate", "1e-2")
    trained.train()
    trained.save_model(tmp_path / "trained")
    logged_kl = []
    completions = []
    for algorithm in ("ppo", "grpo"):
        for placement in ("reward", "loss", "none"):
            every = ("--record-tokens",) if placement == "none" else ()  # otherwise of one completion in 8
            trainer = build("--kl-placement", placement, *every, algorithm=algorithm)
            trainer.load_model(tmp_path / "trained")
            trainer.episodes_of = lambda update, t=trainer: list(enumerate(t.train_prompts[:4]))
            completions.append(trainer.collector.collect(trainer.episodes_of(1), 1).texts)
            trainer.update_step(1)
            (logged,) = [entry for entry in trainer.host.state.log_history if "kl_divergence" in entry]
            measured = logged.keys() - {"kl_divergence/target"}
            logged_kl.append({name: logged[name] for name in measured if name.startswith("kl_divergence")})
    assert all(texts == completions[0] for texts in completions)
    assert all(values == pytest.approx(logged_kl[0], abs=1e-6) for values in logged_kl)
    assert logged_kl[0]["kl_divergence/k3"] > 1e-2 and len(logged_kl[0]) == 3


def test_kl_is_logged_with_beta_0(grpo):
    trainer = grpo("--kl-coef", 0, "--kl-schedule", "fixed", "--learning-rate", "1e-2")
    trainer.update_step(1)
    logged = trainer.update_step(2)
    assert logged["kl_coef"] == 0 and logged["kl_divergence/k3"] > 1e-3


def test_kl_in_the_reward_is_rejected_with_scaled_rewards(user_error):
    for scale in ("group", "batch"):
        with user_error(f"--scale-rewards {scale}", "--kl-placement loss"):
            parse_cli(["--scale-rewards", scale], "grpo")
        parse_cli(["--scale-rewards", scale, "--kl-placement", "loss"], "grpo")


def test_groups_are_contiguous_and_their_completions_differ(grpo):
    trainer = grpo("--batch-size", 3, "--K", 4, "--max-prompts", 5, "--temperature", 1)
    prompt_ids = [prompt.ids for update in range(1, 6) for _, prompt in trainer.episodes_of(update)]
    groups = [prompt_ids[i : i + 4] for i in range(0, len(prompt_ids), 4)]
    assert len(groups) == 15 and all(len(set(group)) == 1 for group in groups)
    assert [len(set(g[0] for g in groups[i : i + 5])) for i in (0, 5, 10)] == [5, 5, 5], (
        "each pass must contain every prompt"
    )
    texts = collect_rollout(trainer).texts
    assert all(len(set(texts[i : i + 4])) > 1 for i in (0, 4, 8))


def test_share_of_groups_with_equal_scores_is_logged(grpo):
    rewards = [lambda **_: [1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 0.0, 0.5]]
    assert grpo("--K", 2, "--batch-size", 4, rewards=rewards).update_step(1)["rewards/equal_groups"] == 0.5


def test_group_with_different_eos_penalties_is_not_an_equal_group(grpo):
    trainer = grpo("--K", 2, "--missing-eos-penalty", 5, rewards=[lambda **_: [1.0] * 4])
    rollout = collect_rollout(trainer)
    rollout.completions.ended = torch.tensor([True, False, False, False])
    scored = trainer.collector.score(rollout)
    metrics = rollout_metrics(trainer.advantages(rollout, scored.shaped), scored, 2)
    assert metrics["rewards/equal_groups"] == 0.5


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_loss_types_match_values_computed_by_hand_on_the_first_step(grpo, loss_type):
    """At ratio 1 the loss of a token is -A. dapo averages it over all tokens. grpo averages it over the tokens of each
    completion, then over completions. dr_grpo divides its sum by B x maximum length."""
    trainer = grpo("--loss-type", loss_type, "--kl-placement", "none", "--max-new-tokens", 12)
    rollout = collect_rollout(trainer)
    batch = trainer.advantages(rollout, torch.tensor([1.0, 4.0, 0.0, 2.0]))
    advantages = torch.tensor([-1.5, 1.5, -1.0, 1.0])
    lengths = torch.tensor(rollout.completions.completion_lengths)
    trainer.host.model.train()
    stats, _ = whole_gradient(trainer, batch)
    expected = {
        "dapo": -(advantages * lengths).sum() / lengths.sum(),
        "grpo": -advantages.mean(),
        "dr_grpo": -(advantages * lengths).sum() / (4 * 12),
    }
    assert_close(stats["loss"], expected[loss_type], rtol=1e-5, atol=1e-6)


def test_adapters_on_4_bit_weights_are_float32(grpo):
    trainer = grpo("--use-lora", "--load-in-4bit")
    assert {w.dtype for w in trainer.host.model.parameters() if w.requires_grad} == {torch.float32}
    assert trainer.update_step(1)["policy/ratio"] == pytest.approx(1, abs=0.2)

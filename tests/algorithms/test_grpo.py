"""What only GRPO has: groups, their advantages and losses, the KL in the reward; and the KL that PPO logs, too."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from rlhf.config import parse_cli
from rlhf.settings.fields import settings_of
from rlhf.settings.training import Config
from rlhf.trainer.metrics import rollout_metrics
from rlhf.utils.errors import UserError
from tests.conftest import whole_gradient


@pytest.fixture
def grpo(build):
    return lambda *flags, **parts: build(*flags, algorithm="grpo", **parts)


def per_reply(batch) -> torch.Tensor:
    """Each reply's advantage, (B,): the same at all its tokens."""
    mask, advantages = batch.mask, batch.raw_advantages
    assert torch.equal(torch.where(mask, advantages, 0.0), advantages), "0 off the mask"
    first = advantages[:, 0]
    assert_close(torch.where(mask, advantages, first.unsqueeze(1)), first.unsqueeze(1).expand_as(advantages))
    return first


def rolled(trainer):
    return trainer.collector.collect(trainer.prompts_of(1), 1)


def test_group_advantages_by_hand(grpo):
    """Two groups of four: r - mean(r); with --scale-rewards group, over the group's (unbiased) deviation + 1e-4."""
    scores = torch.tensor([1.0, 2, 3, 6, 5, 5, 5, 5])
    flags = ("--K", 4, "--kl-placement", "none")
    trainer = grpo(*flags)
    assert_close(per_reply(trainer.advantages(rolled(trainer), scores)), torch.tensor([-2.0, -1, 0, 3, 0, 0, 0, 0]))
    deviation = (14 / 3) ** 0.5 + 1e-4
    trainer = grpo(*flags, "--scale-rewards", "group")
    expected = torch.tensor([-2 / deviation, -1 / deviation, 0, 3 / deviation, 0, 0, 0, 0])
    assert_close(per_reply(trainer.advantages(rolled(trainer), scores)), expected)
    whole = (sum((s - 4) ** 2 for s in scores.tolist()) / 7) ** 0.5 + 1e-4
    trainer = grpo(*flags, "--scale-rewards", "batch")
    expected = torch.tensor([-2 / whole, -1 / whole, 0, 3 / whole, 0, 0, 0, 0])
    assert_close(per_reply(trainer.advantages(rolled(trainer), scores)), expected)


def test_the_kl_in_the_reward_against_a_kl_computed_apart(grpo):
    """By a plain forward over each reply, under policy and a shifted reference: A = r - mean(r), r = s - beta KL."""
    beta = 0.7
    trainer = grpo("--K", 4, "--kl-coef", beta, "--kl-schedule", "fixed")
    with torch.no_grad():
        for weight in trainer.reference.copy.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    rollout = rolled(trainer)
    scores = torch.arange(8.0)
    found = per_reply(trainer.advantages(rollout, scores))
    rewards = []
    for prompt, completion, score in zip(rollout.prompts, rollout.completions.rows(), scores.tolist(), strict=True):
        ids = torch.tensor([[*prompt.ids, *completion]])
        with torch.no_grad():
            p, q = ((m(ids).logits[0] / 0.7).log_softmax(-1) for m in (trainer.actor.policy, trainer.reference.copy))
        at = range(len(prompt.ids) - 1, ids.shape[1] - 1)
        kl = sum(float(p[i, token] - q[i, token]) for i, token in zip(at, completion, strict=True))
        rewards.append(score - beta * kl)
    groups = torch.tensor(rewards).view(2, 4)
    assert_close(found, (groups - groups.mean(1, keepdim=True)).flatten(), rtol=0, atol=1e-4)
    assert float((found - (scores.view(2, 4) - scores.view(2, 4).mean(1, keepdim=True)).flatten()).abs().max()) > 0.05


def test_ppo_and_grpo_log_the_same_kl_of_the_same_replies(build, tmp_path):
    """A policy that has moved, the same prompts and random numbers: replies, and every KL figure logged, agree."""
    moved = build("--learning-rate", "1e-2")
    moved.train()
    moved.save_model(tmp_path / "moved")
    text, completions = [], []
    for algorithm in ("ppo", "grpo"):
        for placement in ("reward", "loss", "none"):
            trainer = build("--kl-placement", placement, algorithm=algorithm)
            trainer.load_model(tmp_path / "moved")
            trainer.prompts_of = lambda update, t=trainer: list(enumerate(t.train_prompts[:4]))
            completions.append(trainer.collector.collect(trainer.prompts_of(1), 1).texts)
            trainer.update_step(1)
            (logged,) = [entry for entry in trainer.state.log_history if "kl_divergence" in entry]
            text.append({name: value for name, value in logged.items() if name.startswith("kl_divergence")})
    assert all(texts == completions[0] for texts in completions)
    assert all(figures == pytest.approx(text[0], abs=1e-6) for figures in text)
    assert text[0]["kl_divergence/k3"] > 1e-2 and len(text[0]) == 3


def test_the_kl_is_logged_at_beta_0(grpo):
    trainer = grpo("--kl-coef", 0, "--kl-schedule", "fixed", "--learning-rate", "1e-2")
    trainer.update_step(1)
    logged = trainer.update_step(2)
    assert logged["kl_coef"] == 0 and logged["kl_divergence/k3"] > 1e-3


def test_a_kl_in_the_reward_is_refused_where_rewards_are_scaled():
    for scale in ("group", "batch"):
        with pytest.raises(UserError, match=f"--scale-rewards {scale}. Add --kl-placement loss"):
            parse_cli(["--scale-rewards", scale], "grpo")
        parse_cli(["--scale-rewards", scale, "--kl-placement", "loss"], "grpo")


def test_groups_stand_together_and_their_replies_differ(grpo):
    trainer = grpo("--batch-size", 3, "--K", 4, "--max-prompts", 5, "--temperature", 1)
    dealt = [prompt.ids for update in range(1, 6) for _, prompt in trainer.prompts_of(update)]
    groups = [dealt[i : i + 4] for i in range(0, len(dealt), 4)]
    assert len(groups) == 15 and all(len(set(group)) == 1 for group in groups)
    assert [len(set(g[0] for g in groups[i : i + 5])) for i in (0, 5, 10)] == [5, 5, 5], "every prompt in each pass"
    texts = rolled(trainer).texts
    assert all(len(set(texts[i : i + 4])) > 1 for i in (0, 4, 8))


def test_the_share_of_groups_without_spread_is_logged(grpo):
    given = [lambda **_: [1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 0.0, 0.5]]
    assert grpo("--K", 2, "--batch-size", 4, rewards=given).update_step(1)["rewards/equal_groups"] == 0.5


def test_a_group_whose_penalties_differ_has_spread(grpo):
    trainer = grpo("--K", 2, "--missing-eos-penalty", 5, rewards=[lambda **_: [1.0] * 4])
    rollout = rolled(trainer)
    rollout.completions.ended = torch.tensor([True, False, False, False])
    scored = trainer.collector.score(rollout)
    metrics = rollout_metrics(trainer.advantages(rollout, scored.shaped), scored, 2)
    assert metrics["rewards/equal_groups"] == 0.5


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_loss_types_by_hand_on_the_first_step(grpo, loss_type):
    """At ratio 1 the loss is -A a token: over the tokens; each reply's, then the replies; B x length."""
    trainer = grpo("--loss-type", loss_type, "--kl-placement", "none", "--max-new-tokens", 12)
    rollout = rolled(trainer)
    batch = trainer.advantages(rollout, torch.tensor([1.0, 4.0, 0.0, 2.0]))
    advantages, lengths = torch.tensor([-1.5, 1.5, -1.0, 1.0]), rollout.completions.lengths.float()
    trainer.model.train()
    stats, _ = whole_gradient(trainer, batch)
    expected = {
        "dapo": -(advantages * lengths).sum() / lengths.sum(),
        "grpo": -advantages.mean(),
        "dr_grpo": -(advantages * lengths).sum() / (4 * 12),
    }
    assert_close(stats["loss"], expected[loss_type], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_type", settings_of(Config)["loss_type"].choices)
def test_micro_batches_add_up_under_every_loss_type(grpo, loss_type):
    flags = ("--loss-type", loss_type, "--max-new-tokens", 24, "--minibatches", 1, "--entropy-coef", 0.5)
    moved = []
    for size in (0, 1, 3):
        trainer = grpo("--ppo-epochs", 1, "--micro-batch-size", size, *flags)
        trainer.optimizer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        trainer.update_step(1)
        moved.append(torch.cat([w.detach().flatten() for w in trainer.model.parameters()]))
    assert_close(moved[1], moved[0], rtol=0, atol=1e-6)
    assert_close(moved[2], moved[0], rtol=0, atol=1e-6)


def test_adapters_over_4_bit_weights_stay_float32(grpo):
    trainer = grpo("--use-lora", "--load-in-4bit")
    assert {w.dtype for w in trainer.model.parameters() if w.requires_grad} == {torch.float32}
    assert trainer.update_step(1)["policy/ratio"] == pytest.approx(1, abs=0.2)

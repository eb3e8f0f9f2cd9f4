"""Tests of the value warm-up: in the first updates only the critic is trained."""

from __future__ import annotations

import json

import pytest
import torch

import train_ppo
from rlhf.analysis.curves import read_curves
from rlhf.rewards.rewards import Rewards
from rlhf.trainer.state import STATE_FILE, load_trainer_state, save_trainer_state

KINDS = {
    "shared": (),
    "separate": ("--critic", "separate"),
    "adapters": ("--use-lora", "--critic", "separate"),
    "minibatches": ("--minibatches", 2),
    "recomputed": ("--gradient-checkpointing",),
}


def copies(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def changed(module: torch.nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, weight in module.named_parameters() if not torch.equal(weight, before[name])}


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_critic_is_trained_in_the_warm_up(build, kind):
    """The policy's weights are equal to the bit after the warm-up, and move in the first update after it."""
    trainer = build("--critic-warmup", 2, "--num-iterations", 4, "--learning-rate", "1e-2", *KINDS[kind])
    actor = trainer.actor
    policy = copies(actor.policy)
    head = copies(actor.value_head)
    critic = copies(actor.critic) if actor.critic is not None else {}
    for update in (1, 2):
        metrics = trainer.update_step(update)
        assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6) and metrics["policy/grad_norm"] > 0
    assert changed(actor.policy, policy) == set()
    assert changed(actor.value_head, head)
    assert actor.critic is None or changed(actor.critic, critic)
    trainer.update_step(3)
    assert changed(actor.policy, policy)


def test_value_loss_falls_in_the_warm_up(build):
    """All scores are 1, the values start at 0, and the policy is frozen: the loss starts at 0.5 x 1^2."""
    scripted = [lambda completions, **_: [1.0] * len(completions)]
    flags = ("--critic-warmup", 7, "--num-iterations", 8, "--learning-rate", "3e-3", "--value-clip-range", 10)
    rewards = Rewards(scripted, None, build().processing_class)
    trainer = build(*flags, "--lam", 1, "--ppo-epochs", 4, "--lr-schedule", "constant", rewards=rewards)
    losses = [trainer.update_step(update)["value/loss"] for update in range(1, 8)]
    assert 0.3 < losses[0] <= 0.5 and losses[-1] < 0.7 * losses[0]


def test_beta_is_held_in_the_warm_up(build):
    """The KL is 0 in updates 1 to 3, so beta would fall in each. With a warm-up of 2 it falls after update 3 only."""
    betas = {}
    for warmup in (0, 2):
        trainer = build("--critic-warmup", warmup, "--num-iterations", 4, "--learning-rate", "1e-9")
        betas[warmup] = [trainer.kl_coef]
        for update in (1, 2, 3):
            trainer.update_step(update)
            betas[warmup].append(trainer.kl_coef)
        assert trainer.kl.controller.done == 3, "the warm-up counts for the phases of the targets"
    assert betas[0][0] > betas[0][1] > betas[0][2] > betas[0][3]
    assert betas[2][0] == betas[2][1] == betas[2][2] > betas[2][3]


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_checkpoint_in_and_after_the_warm_up_is_exact(build, tmp_path, saved):
    flags = ("--critic-warmup", 2, "--num-iterations", 4, "--learning-rate", "1e-2")
    straight = build(*flags)
    for update in range(1, 5):
        straight.update_step(update)
        if update == saved:
            (tmp_path / "state").mkdir()
            straight.fix_text()
            save_trainer_state(straight, tmp_path / "state")
    resumed = build(*flags)
    load_trainer_state(resumed, tmp_path / "state")
    for update in range(saved + 1, 5):
        resumed.update_step(update)
    assert changed(resumed.actor, copies(straight.actor)) == set()


def test_a_checkpoint_of_an_older_version_is_loaded(build, tmp_path):
    """Its progress has the explained variances of a warm-up that could end early."""
    trainer = build("--critic-warmup", 2, "--num-iterations", 4)
    trainer.update_step(1)
    trainer.fix_text()
    save_trainer_state(trainer, tmp_path)
    state = json.loads((tmp_path / STATE_FILE).read_text())
    state["progress"]["explained"] = [0.5]
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    resumed = build("--critic-warmup", 2, "--num-iterations", 4)
    load_trainer_state(resumed, tmp_path)
    assert resumed.progress == trainer.progress


def test_command_holds_beta(run_flags, tmp_path):
    """The scripts pass the warm-up to KL control."""
    train_ppo.main(run_flags("--critic-warmup", 2, "--num-iterations", 4, "--eval-every", 4))
    betas = read_curves(tmp_path / "run").scalars["kl_coef"].values
    assert betas[0] == betas[1] == betas[2] > betas[3]

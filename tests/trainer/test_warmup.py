"""Tests of the value warm-up: in the first updates only the critic is trained, until it no longer improves."""

from __future__ import annotations

import pytest
import torch

import train_ppo
from rlhf.analysis.curves import read_curves
from rlhf.rewards.rewards import Rewards
from rlhf.trainer.state import load_trainer_state, save_trainer_state
from rlhf.trainer.warmup import MEASURE

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
    policy, head = copies(actor.policy), copies(actor.value_head)
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
            straight.evaluator.fix_text()
            save_trainer_state(straight, tmp_path / "state")
    resumed = build(*flags)
    load_trainer_state(resumed, tmp_path / "state")
    for update in range(saved + 1, 5):
        resumed.update_step(update)
    assert changed(resumed.actor, copies(straight.actor)) == set()


# --- a warm-up that ends early ---------------------------------------------------------------------------------------

PATIENT = ("--critic-warmup", 9, "--critic-warmup-patience", 2, "--num-iterations", 10, "--learning-rate", "1e-2")
# means of pairs: update 4: .3 > .15; update 5: .25 <= .25, so the warm-up ends after update 5
RISES_AND_FALLS = [0.1, 0.2, 0.3, 0.3, 0.2, 0.9, 0.9, 0.9]


def covered(build, explained: list[float | None], *flags) -> list[int]:
    """Returns the updates that the warm-up covers, if they have this explained variance (None: no score)."""
    warmup = build(*PATIENT, *flags).policy_optimizer.warmup
    found = []
    for update, value in enumerate(explained, 1):
        if warmup.covers(update):
            found.append(update)
        list(warmup.after_update(update, {} if value is None else {MEASURE: value}))
    return found


def test_warm_up_ends_when_the_explained_variance_no_longer_rises(build):
    assert covered(build, RISES_AND_FALLS) == [1, 2, 3, 4, 5]
    assert covered(build, [0.0, 0.0, 0.0, 0.0, 1.0]) == [1, 2, 3, 4], "not before update 2 * patience"
    assert covered(build, [0.1, 0.2, None, 0.3, 0.3, 0.2, 0.9]) == [1, 2, 3, 4, 5, 6], "no score: does not count"
    rising = [update / 20 for update in range(1, 13)]
    assert covered(build, rising) == list(range(1, 10)), "--critic-warmup is the longest"
    assert covered(build, RISES_AND_FALLS, "--critic-warmup-patience", "none") == list(range(1, 9))


@pytest.fixture
def scripted_variance(monkeypatch):
    """Returns a function that replaces the explained variance of the next updates."""

    def script(values: list[float]) -> None:
        left = iter(values)
        monkeypatch.setattr("rlhf.trainer.metrics.objectives.explained_variance", lambda *_: torch.tensor(next(left)))

    return script


def test_policy_and_beta_move_after_the_early_end(build, scripted_variance, monkeypatch):
    lines = []
    trainer = build(*PATIENT)
    monkeypatch.setattr(trainer.session, "say", lines.append)
    policy, beta = copies(trainer.actor.policy), trainer.kl_coef
    scripted_variance(RISES_AND_FALLS)
    for update in range(1, 6):
        assert not lines
        trainer.update_step(update)
    assert changed(trainer.actor.policy, policy) == set() and trainer.kl_coef == beta
    (line,) = lines
    assert "update 5" in line and line.count("0.250") == 2
    trainer.update_step(6)
    assert changed(trainer.actor.policy, policy) and trainer.kl_coef != beta


@pytest.mark.parametrize("saved", [2, 4, 5, 6])
def test_checkpoint_before_and_after_the_early_end_is_exact(build, tmp_path, scripted_variance, saved):
    straight = build(*PATIENT)
    scripted_variance(RISES_AND_FALLS)
    for update in range(1, 8):
        straight.update_step(update)
        if update == saved:
            (tmp_path / "state").mkdir()
            straight.evaluator.fix_text()
            save_trainer_state(straight, tmp_path / "state")
    resumed = build(*PATIENT)
    load_trainer_state(resumed, tmp_path / "state")
    scripted_variance(RISES_AND_FALLS[saved:])
    for update in range(saved + 1, 8):
        resumed.update_step(update)
    assert changed(resumed.actor, copies(straight.actor)) == set() and resumed.kl_coef == straight.kl_coef


def test_command_holds_beta(run_flags, tmp_path):
    """The scripts pass the warm-up to KL control."""
    train_ppo.main(run_flags("--critic-warmup", 2, "--num-iterations", 4, "--eval-every", 4))
    betas = read_curves(tmp_path / "run").scalars["kl_coef"].values
    assert betas[0] == betas[1] == betas[2] > betas[3]

"""Tests of the critic's own learning rate and lambda, and of Adam's betas."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from rlhf.trainer.state import load_trainer_state, save_trainer_state

ONE_STEP = ("--ppo-epochs", 1, "--lr-schedule", "constant", "--learning-rate", "1e-3", "--max-grad-norm", 1e9)
KINDS = {
    "shared": [],
    "separate": ["--critic", "separate"],
    "adapters": ["--critic", "separate", "--use-lora"],
    "8-bit": ["--critic", "separate", "--optim", "adamw_8bit"],
}


def copies(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def largest_step(module: torch.nn.Module, before: dict[str, torch.Tensor]) -> float:
    return max(float((weight.detach() - before[name]).abs().max()) for name, weight in module.named_parameters())


@pytest.fixture
def resumed_and_straight(build, tmp_path):
    """Return a function: the weights of a run of 3 updates, and of the same run resumed after update 1."""

    def both(*flags) -> tuple[dict, dict]:
        straight = build(*flags, "--num-iterations", 3)
        straight.update_step(1)
        straight.fix_text()
        save_trainer_state(straight, tmp_path)
        resumed = build(*flags, "--num-iterations", 3)
        load_trainer_state(resumed, tmp_path)
        for update in (2, 3):
            straight.update_step(update)
            resumed.update_step(update)
        return copies(straight.host.model), copies(resumed.host.model)

    return both


# --- learning rate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_first_adam_step_is_the_learning_rate_of_each_part(build, kind):
    """Adam's first step is rate * g / (|g| + 1e-8): the rate for every gradient that is far above 1e-8."""
    trainer = build(*ONE_STEP, "--critic-learning-rate", "7e-3", *KINDS[kind])
    actor = trainer.actor
    if actor.critic is not None:
        torch.nn.init.normal_(actor.value_head.summary.weight)  # a zero value head blocks the gradient
    policy = copies(actor.policy)
    head = copies(actor.value_head)
    critic = copies(actor.critic) if actor.critic is not None else {}
    trainer.update_step(1)
    assert largest_step(actor.policy, policy) == pytest.approx(1e-3, rel=1e-2)
    assert largest_step(actor.value_head, head) == pytest.approx(7e-3, rel=1e-2)
    assert actor.critic is None or largest_step(actor.critic, critic) == pytest.approx(7e-3, rel=1e-2)


def test_both_rates_have_the_same_schedule(build):
    trainer = build("--num-iterations", 4, "--lr-schedule", "linear", "--learning-rate", "1e-3",
                    "--critic-learning-rate", "4e-2")  # fmt: skip
    metrics = [trainer.update_step(update) for update in range(1, 5)]
    assert [m["learning_rate"] for m in metrics] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert [m["learning_rate/critic"] for m in metrics] == pytest.approx([4e-2, 3e-2, 2e-2, 1e-2])


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_an_equal_rate_changes_nothing(build, kind):
    trainers = [build("--learning-rate", "1e-3", *KINDS[kind], *flags) for flags in
                ([], ["--critic-learning-rate", "1e-3"])]  # fmt: skip
    metrics = [trainer.update_step(1) for trainer in trainers]
    one, other = (copies(trainer.host.model) for trainer in trainers)
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert [("learning_rate/critic" in m) for m in metrics] == [False, True]


@pytest.mark.parametrize("kind", [*list(KINDS)[:3], pytest.param("8-bit", marks=pytest.mark.ci)])
def test_resumed_run_with_a_critic_learning_rate_is_exact(resumed_and_straight, kind):
    straight, resumed = resumed_and_straight("--critic-learning-rate", "1e-2", "--critic-lam", 1, *KINDS[kind])
    assert [name for name, weight in straight.items() if not torch.equal(weight, resumed[name])] == []


def test_weight_decay_of_the_critic_excludes_its_bias(build):
    """The groups of the critic keep what the policy's have: decay for matrices, none for biases."""
    trainer = build("--weight-decay", 0.1, "--critic-learning-rate", "1e-2")
    head = trainer.actor.value_head.summary
    decays = {id(w): group["weight_decay"] for group in trainer.host.optimizer.param_groups for w in group["params"]}
    assert (decays[id(head.weight)], decays[id(head.bias)]) == (0.1, 0.0)
    assert len(decays) == sum(weight.requires_grad for weight in trainer.host.model.parameters())


# --- lambda ----------------------------------------------------------------------------------------------------------


def advantages_of_three_tokens(build, *flags):
    """Return the experience of completions of 3 tokens with score 1 and the values .5, .4, .2; gamma is 1."""
    trainer = build("--no-whiten-advantages", "--kl-placement", "none", "--lam", 0.5, *flags)
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    rollout.completions.action_mask = torch.zeros_like(rollout.mask)
    rollout.completions.action_mask[:, :3] = True
    rollout.values[:, :3] = torch.tensor([0.5, 0.4, 0.2])
    return trainer.advantages(rollout, torch.ones(4))


@pytest.mark.parametrize(
    ("flags", "targets"),
    [
        ([], [0.5, 0.6, 1.0]),  # advantage + value, with --lam
        (["--critic-lam", 1], [1.0, 1.0, 1.0]),  # the reward to go
        (["--critic-lam", 0], [0.4, 0.2, 1.0]),  # reward + the next value
    ],
)
def test_targets_of_three_tokens_have_their_own_lambda(build, flags, targets):
    """delta = [-.1, -.2, .8]. lambda .5: A_3 = .8, A_2 = -.2 + .4 = .2, A_1 = -.1 + .1 = 0."""
    batch = advantages_of_three_tokens(build, *flags)
    assert_close(batch.advantages[0, :3], torch.tensor([0.0, 0.2, 0.8]))
    assert_close(batch.returns[0, :3], torch.tensor(targets))


# --- Adam's betas ----------------------------------------------------------------------------------------------------


def test_two_adam_steps_by_hand(build):
    """Gradients 3 and -1, both betas .5. Step 1: m = 3, v = 9 after bias correction, so -rate * 1. Step 2: m = (.5 *
    1.5 - .5) / .75 = 1/3, v = (.5 * 4.5 + .5) / .75 = 11/3, so -rate * (1/3) / sqrt(11/3) = -rate * .174078."""
    trainer = build("--adam-beta1", 0.5, "--adam-beta2", 0.5, "--learning-rate", "1e-2", "--lr-schedule", "constant")
    bias = trainer.actor.value_head.summary.bias
    before = bias.item()
    for gradient in (3.0, -1.0):
        bias.grad = torch.tensor([gradient])
        trainer.host.optimizer.step()
    assert bias.item() - before == pytest.approx(-1e-2 * 1.174078, rel=1e-4)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_betas_reach_every_weight_and_a_resumed_run_may_change_them(build, tmp_path, algorithm):
    first = build("--adam-beta2", 0.9, algorithm=algorithm)
    first.update_step(1)
    first.fix_text()
    save_trainer_state(first, tmp_path)
    resumed = build("--adam-beta1", 0.7, "--adam-beta2", 0.95, algorithm=algorithm)
    load_trainer_state(resumed, tmp_path)
    assert {tuple(group["betas"]) for group in first.host.optimizer.param_groups} == {(0.9, 0.9)}
    assert {tuple(group["betas"]) for group in resumed.host.optimizer.param_groups} == {(0.7, 0.95)}


def test_resumed_run_with_other_betas_is_exact(resumed_and_straight):
    straight, resumed = resumed_and_straight("--adam-beta1", 0.8, "--adam-beta2", 0.95)
    assert [name for name, weight in straight.items() if not torch.equal(weight, resumed[name])] == []

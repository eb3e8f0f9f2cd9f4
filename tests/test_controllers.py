"""Controllers against traces worked out by hand, and what each recipe's controller can do in its run."""

from __future__ import annotations

import pytest

from config import parse_cli
from recipes import RECIPES
from rlhf.callbacks import kl_controller
from rlhf.controllers import KLController, in_band
from rlhf.knobs import KLTarget
from rlhf.ppo_trainer import updates_planned

SEQUENCE_6 = [KLTarget(6.0, "sequence")]


def test_fixed_never_moves():
    controller = KLController(0.1, SEQUENCE_6, None, updates=10)
    assert [controller.update(kl, 1.0, 100) for kl in (0, 6, 600)] == [0.1, 0.1, 0.1]


def test_adaptive_by_hand():
    # beta .2, target 6, KL 12 (error clipped to .2), 100 episodes, horizon 10,000: .2 * 1.002
    controller = KLController(0.2, SEQUENCE_6, 10_000, updates=10)
    assert controller.update(12.0, 0.1, 100) == pytest.approx(0.2004)
    # KL 5.4: error -.1 -> .2004 * (1 - .001)
    assert controller.update(5.4, 0.1, 100) == pytest.approx(0.2004 * 0.999)


def test_adaptive_per_token_reads_the_per_token_kl():
    controller = KLController(1.0, [KLTarget(0.05, "token")], 100, updates=10)
    assert controller.update(999.0, 0.055, 10) == pytest.approx(1.01)


def test_a_short_horizon_never_turns_beta_negative():
    controller = KLController(1.0, SEQUENCE_6, 1, updates=10)
    assert controller.update(0.0, 0.0, 1000) == 0.5
    assert controller.update(-3.0, 0.0, 1000) == 0.25


def test_phases_are_equal_thirds():
    targets = [KLTarget(t, "token") for t in (0.05, 0.02, 0.01)]
    controller = KLController(0.1, targets, 20, updates=6)
    seen = []
    for _ in range(7):
        seen.append(controller.target.nats)
        controller.update(0.1, 0.02, 1)
    assert seen == [0.05, 0.05, 0.02, 0.02, 0.01, 0.01, 0.01]


def test_state_comes_back():
    one = KLController(0.1, SEQUENCE_6, 100, updates=10)
    one.update(9.0, 0.1, 10)
    other = KLController(0.7, SEQUENCE_6, 100, updates=10)
    other.load_state_dict(one.state_dict())
    assert other.update(9.0, 0.1, 10) == one.update(9.0, 0.1, 10)
    assert other.target == one.target


def test_band():
    assert in_band(3.0, 6.0) and in_band(9.0, 6.0)
    assert not in_band(2.99, 6.0) and not in_band(9.01, 6.0)


# the factor by which each recipe's beta can grow in its run; orca's prompts are what the real split leaves (5,786)
LARGEST_MOVES = {"smollm2-orca": (5_786, 5.0), "demo": (900, 5.0)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipes_controller_can_act(recipe):
    prompts, at_least = LARGEST_MOVES[recipe]
    config = parse_cli(["--recipe", recipe])
    updates = updates_planned(config, prompts)
    assert kl_controller(config, updates).largest_move(config.ppo.batch_size) >= at_least

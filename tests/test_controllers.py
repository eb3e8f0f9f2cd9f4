"""Controllers against traces worked out by hand, and what each recipe's controller can do in its run."""

from __future__ import annotations

import random

import pytest

from config import parse_cli
from recipes import RECIPES
from rlhf.callbacks import kl_controller
from rlhf.controllers import LOWEST_BETA, KLController, ScoreNormalizer, in_band
from rlhf.knobs import KLTarget

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


def test_boundaries_move_the_phases():
    targets = [KLTarget(t, "token") for t in (0.05, 0.02, 0.01)]
    controller = KLController(0.1, targets, 20, updates=100, boundaries=(0.5, 0.9))
    assert [(a, b, t.nats) for a, b, t in controller.phases] == [(1, 50, 0.05), (51, 90, 0.02), (91, 100, 0.01)]
    assert [controller.target_of(u).nats for u in (0, 50, 51, 90, 91, 500)] == [0.05, 0.05, 0.02, 0.02, 0.01, 0.01]


def test_the_controller_acts_within_a_phase():
    """KL 0.03 a token, phases 0.05 then 0.02: error -0.2 (clipped), then +0.2; 10 episodes over a horizon of 20."""
    controller = KLController(1.0, [KLTarget(0.05, "token"), KLTarget(0.02, "token")], 20, updates=4)
    trace = [controller.update(9.0, 0.03, 10) for _ in range(4)]
    assert trace == pytest.approx([0.9, 0.81, 0.81 * 1.1, 0.81 * 1.1**2])


def test_beta_has_a_floor():
    controller = KLController(2e-4, SEQUENCE_6, 1, updates=10)
    assert [controller.update(0.0, 0.0, 100) for _ in range(3)] == [LOWEST_BETA] * 3
    assert KLController(1e-5, SEQUENCE_6, 1, updates=10).update(0.0, 0.0, 100) == 1e-5, "never raised by the floor"
    assert KLController(0.0, SEQUENCE_6, None, updates=10).update(9.0, 0.1, 100) == 0.0


# --- scores ----------------------------------------------------------------------------------------------------------


def test_the_normaliser_against_its_recurrence_by_hand():
    # d = .5. Batch 1: mean 2, variance 2 -> m = 1, v = 1, divided by 1 - .5: 2 and 2.
    # Batch 2: mean 6, variance 18 -> m = .5 + 3, v = .5 + 9, divided by 1 - .25: 14/3 and 38/3
    normalizer = ScoreNormalizer(0.5)
    assert normalizer([1.0, 3.0]) == pytest.approx([-1 / 2**0.5, 1 / 2**0.5])
    assert normalizer([3.0, 9.0]) == pytest.approx([(3 - 14 / 3) / (38 / 3) ** 0.5, (9 - 14 / 3) / (38 / 3) ** 0.5])
    assert (normalizer.m, normalizer.v, normalizer.batches) == (3.5, 9.5, 2)


def test_until_scores_spread_they_are_only_shifted():
    normalizer = ScoreNormalizer(0.99)
    assert normalizer([5.0, 5.0]) == pytest.approx([0.0, 0.0])
    assert ScoreNormalizer(0.99)([4.0]) == pytest.approx([0.0]), "a batch of one has no spread"


def test_a_nearly_flat_first_batch_does_not_blow_up_the_next():
    """Early estimates are averages: the second batch counts as much as the first."""
    normalizer = ScoreNormalizer(0.99)
    normalizer([0.0, 1e-7])
    low, high = normalizer([0.0, 2.0])
    assert high - low == pytest.approx(2 / 1**0.5, rel=0.01), "variances 0 and 2, their mean 1"


def test_the_size_of_the_batch_does_not_move_the_scale():
    """PPO's 4 scores an update and GRPO's 24, from one distribution: the same scale on average."""
    rng = random.Random(0)
    spans = {}
    for size in (4, 24):
        normalizer = ScoreNormalizer(0.99)
        for _ in range(2000):
            last = normalizer([rng.gauss(0, 3) for _ in range(size)])
        spans[size] = (normalizer.v / (1 - 0.99**2000)) ** 0.5
        assert len(last) == size
    assert spans[4] == pytest.approx(3, rel=0.15) and spans[24] == pytest.approx(3, rel=0.06)


def test_a_drift_of_the_mean_is_no_spread():
    normalizer = ScoreNormalizer(0.99)
    spans = []
    for update in range(200):
        low, high = normalizer([3.0 * update, 3.0 * update + 2])
        spans.append(high - low)
    assert spans == pytest.approx([2 / 2**0.5] * 200), "variance stays 2 while the scores climb by 600"


def test_the_normalisers_state_comes_back():
    one = ScoreNormalizer(0.9)
    one([1.0, 4.0])
    other = ScoreNormalizer(0.9)
    other.load_state_dict(one.state_dict())
    assert other([2.0, 8.0]) == one([2.0, 8.0])


# the factor by which each recipe's beta can grow in its run; orca's prompts are what the real split leaves (5,786)
# one topic's updates of rank1-voice; qwen3-tldr's beta is fixed
LARGEST_MOVES = {"smollm2-orca": (5_786, 5.0), "phased-kl": (1_000, 100.0), "demo": (900, 5.0),
                 "rank1-voice": (1_000, 1.6), "qwen3-tldr": (1_000, 1.0)}  # fmt: skip


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipes_controller_can_act(recipe, algorithm):
    prompts, at_least = LARGEST_MOVES[recipe]
    config = parse_cli(["--recipe", recipe], algorithm)
    updates = config.updates(prompts)
    assert kl_controller(config, updates).largest_move(config.episodes_per_update) >= at_least


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_phased_kl_acts_over_about_20_updates(algorithm):
    config = parse_cli(["--recipe", "phased-kl"], algorithm)
    assert config.kl.kl_horizon / config.episodes_per_update == 20
    phases = kl_controller(config, 800).phases
    assert [(a, b, str(t)) for a, b, t in phases] == [
        (1, 267, "0.05/token"), (268, 533, "0.02/token"), (534, 800, "0.01/token")
    ]  # fmt: skip

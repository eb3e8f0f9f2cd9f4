"""Tests of the KL controllers and the score normaliser against values computed by hand, and of the range of beta in
each recipe."""

from __future__ import annotations

import random

import pytest

from rlhf.algorithms.kl_control import (
    LOWEST_BETA,
    SMALLEST_MOVE,
    KLController,
    default_horizon,
    in_band,
    kl_controller,
    with_horizon,
)
from rlhf.algorithms.normalizer import ScoreNormalizer
from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import parse_cli
from rlhf.settings.recipes import shipped_recipes
from rlhf.settings.types import KLTarget
from rlhf.setup.plan import kl_line, kl_warnings
from tests.conftest import algorithms_of

SEQUENCE_6 = [KLTarget(6.0, "sequence")]


def test_fixed_schedule_keeps_beta_constant():
    controller = KLController(0.1, SEQUENCE_6, None, updates=10)
    assert [controller.update(kl, 1.0, 100) for kl in (0, 6, 600)] == [0.1, 0.1, 0.1]


def test_adaptive_schedule_matches_values_computed_by_hand():
    # beta .2, target 6, KL 12 (error clipped to .2), 100 episodes, horizon 10,000: .2 * 1.002
    controller = KLController(0.2, SEQUENCE_6, 10_000, updates=10)
    assert controller.update(12.0, 0.1, 100) == pytest.approx(0.2004)
    # KL 5.4: error -.1 -> .2004 * (1 - .001)
    assert controller.update(5.4, 0.1, 100) == pytest.approx(0.2004 * 0.999)


def test_adaptive_schedule_uses_the_kl_per_token_for_a_token_target():
    controller = KLController(1.0, [KLTarget(0.05, "token")], 100, updates=10)
    assert controller.update(999.0, 0.055, 10) == pytest.approx(1.01)


def test_short_horizon_keeps_beta_positive():
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


def test_controller_state_is_restored():
    one = KLController(0.1, SEQUENCE_6, 100, updates=10)
    one.update(9.0, 0.1, 10)
    other = KLController(0.7, SEQUENCE_6, 100, updates=10)
    other.load_state_dict(one.state_dict())
    assert other.update(9.0, 0.1, 10) == one.update(9.0, 0.1, 10)
    assert other.target == one.target


def test_band_includes_its_limits():
    assert in_band(3.0, 6.0) and in_band(9.0, 6.0)
    assert not in_band(2.99, 6.0) and not in_band(9.01, 6.0)


def test_controller_changes_beta_within_a_phase():
    """KL 0.03 per token, targets 0.05 and then 0.02: the clipped error is -0.2, then 0.2. 10 episodes, horizon 20."""
    controller = KLController(1.0, [KLTarget(0.05, "token"), KLTarget(0.02, "token")], 20, updates=4)
    trace = [controller.update(9.0, 0.03, 10) for _ in range(4)]
    assert trace == pytest.approx([0.9, 0.81, 0.81 * 1.1, 0.81 * 1.1**2])


def test_beta_has_a_minimum():
    controller = KLController(2e-4, SEQUENCE_6, 1, updates=10)
    assert [controller.update(0.0, 0.0, 100) for _ in range(3)] == [LOWEST_BETA] * 3
    assert KLController(1e-5, SEQUENCE_6, 1, updates=10).update(0.0, 0.0, 100) == 1e-5, (
        "the minimum must not raise a lower beta"
    )
    assert KLController(0.0, SEQUENCE_6, None, updates=10).update(9.0, 0.1, 100) == 0.0


# --- scores ----------------------------------------------------------------------------------------------------------


def test_normaliser_matches_its_recurrence_computed_by_hand():
    # d = .5. Batch 1: mean 2, variance 2 -> m = 1, v = 1, divided by 1 - .5: 2 and 2.
    # Batch 2: mean 6, variance 18 -> m = .5 + 3, v = .5 + 9, divided by 1 - .25: 14/3 and 38/3
    normalizer = ScoreNormalizer(0.5)
    assert normalizer([1.0, 3.0]) == pytest.approx([-1 / 2**0.5, 1 / 2**0.5])
    assert normalizer([3.0, 9.0]) == pytest.approx([(3 - 14 / 3) / (38 / 3) ** 0.5, (9 - 14 / 3) / (38 / 3) ** 0.5])
    assert (normalizer.mean, normalizer.var, normalizer.batches) == (3.5, 9.5, 2)


def test_equal_scores_are_only_shifted():
    normalizer = ScoreNormalizer(0.99)
    assert normalizer([5.0, 5.0]) == pytest.approx([0.0, 0.0])
    assert ScoreNormalizer(0.99)([4.0]) == pytest.approx([0.0]), "a batch of one score has no variance"


def test_nearly_equal_first_scores_do_not_inflate_the_next_batch():
    """Early estimates are averages, so the second batch counts as much as the first."""
    normalizer = ScoreNormalizer(0.99)
    normalizer([0.0, 1e-7])
    low, high = normalizer([0.0, 2.0])
    assert high - low == pytest.approx(2 / 1**0.5, rel=0.01), "the mean of the variances 0 and 2 is 1"


def test_batch_size_does_not_change_the_scale():
    """4 scores per update (PPO) and 24 (GRPO) from one distribution give the same scale on average."""
    rng = random.Random(0)
    spans = {}
    for size in (4, 24):
        normalizer = ScoreNormalizer(0.99)
        for _ in range(2000):
            last = normalizer([rng.gauss(0, 3) for _ in range(size)])
        spans[size] = (normalizer.var / (1 - 0.99**2000)) ** 0.5
        assert len(last) == size
    assert spans[4] == pytest.approx(3, rel=0.15) and spans[24] == pytest.approx(3, rel=0.06)


def test_drift_of_the_mean_does_not_increase_the_variance():
    normalizer = ScoreNormalizer(0.99)
    spans = []
    for update in range(200):
        low, high = normalizer([3.0 * update, 3.0 * update + 2])
        spans.append(high - low)
    assert spans == pytest.approx([2 / 2**0.5] * 200), "the variance is 2 while the scores rise by 600"


def test_normaliser_state_is_restored():
    one = ScoreNormalizer(0.9)
    one([1.0, 4.0])
    other = ScoreNormalizer(0.9)
    other.load_state_dict(one.state_dict())
    assert other([2.0, 8.0]) == one([2.0, 8.0])


ORCA_PROMPTS = 5_786  # training prompts of the real dataset with the default split

# commands in README.md or a reference document, reduced to the flags that decide how far beta can change
DOCUMENTED = [
    *(f"--recipe {recipe}" for recipe in shipped_recipes()),
    "--num-iterations 800 --kl-schedule phased",  # MLX phased-KL PPO, MLX phased-KL GRPO
    "--num-iterations 800 --kl-schedule phased --K 6",
    "--kl-target 6/sequence",  # SmolLM2-orca PPO
    "--steps-per-topic 50 --batch-size 4 --kl-coef 0.2 --kl-target 6/sequence",  # rank-1 voice PPO
    "--kl-schedule phased --kl-target 0.05/token 0.02/token 0.01/token",
    "--num-iterations 40 --batch-size 2",
    "--epochs 1 --batch-size 64",
]


@pytest.mark.parametrize(
    ("words", "algorithm"),
    [(words, name) for words in DOCUMENTED for name in algorithms_of(words.removeprefix("--recipe "))],
)
def test_beta_can_change_enough_in_every_recipe_and_documented_command(words, algorithm):
    """At least 3-fold in the shortest phase; about 11-fold with the default horizon."""
    if "--K" in words and ALGORITHMS[algorithm].group_size == 1:
        words = words.split(" --K")[0]
    config = parse_cli(words.split(), algorithm)
    updates = config.updates(ORCA_PROMPTS, topics=10)
    move = kl_controller(config, updates).largest_move(config.episodes_per_update)
    if config.kl.kl_schedule == "fixed":
        return
    assert move >= SMALLEST_MOVE
    if config.kl.kl_horizon is None:
        assert 7 < move < 20
    assert kl_warnings(config, updates) == []


def test_default_horizon_matches_values_computed_by_hand():
    """800 updates of 4 episodes in three phases: 266 x 4 / 12 = 89. The maximum is 10,000 episodes or two updates."""
    assert default_horizon(266, 4) == 89
    assert pytest.approx(10.8, abs=0.1) == (1 + 0.2 * 4 / 89) ** 266
    assert default_horizon(3, 64) == 128
    assert default_horizon(100_000, 8) == 10_000
    assert default_horizon(2, 8_192) == 16_384
    config = parse_cli("--num-iterations 800 --kl-schedule phased".split())
    assert kl_controller(config, 800).horizon == default_horizon(266, 4)
    assert with_horizon(config, 800).kl.kl_horizon == 89
    assert with_horizon(parse_cli(["--kl-horizon", "5"]), 800).kl.kl_horizon == 5
    assert with_horizon(parse_cli(["--kl-schedule", "fixed"]), 800).kl.kl_horizon is None


def test_warnings_explain_why_a_kl_target_cannot_be_enforced():
    slow = parse_cli("--num-iterations 800 --kl-schedule phased --kl-horizon 2000".split())
    (line,) = kl_warnings(slow, 800)
    assert all(part in line for part in ("1.11-fold", "266 updates", "2,000", "--kl-horizon 89", "--kl-coef"))
    short = kl_warnings(parse_cli("--kl-schedule phased --num-iterations 2".split()), 2)
    assert len(short) == 2 and "1 of 3" in short[0]
    (both,) = kl_warnings(parse_cli("--recipe demo --num-iterations 6".split()), 6)
    assert "--kl-horizon 128" in both and "--kl-coef" in both, "the horizon alone would allow a 1.8-fold change"
    assert kl_warnings(parse_cli(["--kl-schedule", "fixed"]), 2) == []


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_phased_kl_acts_over_about_20_updates(algorithm):
    config = parse_cli(["--recipe", "phased-kl"], algorithm)
    assert config.kl.kl_horizon / config.episodes_per_update == 20
    assert kl_line(config, 800).count("-fold per phase") == 1
    phases = kl_controller(config, 800).phases
    assert [(a, b, str(t)) for a, b, t in phases] == [
        (1, 267, "0.05/token"), (268, 533, "0.02/token"), (534, 800, "0.01/token")
    ]  # fmt: skip

"""Tests win rates, intervals, ranks and text statistics against hand-computed values, scipy and simulations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from rlhf.analysis import statistics
from rlhf.analysis.statistics import (
    Estimate,
    correlation,
    distinct,
    level_of_each,
    over_prompts,
    over_seeds,
    percent,
    ranks,
    repetition,
    win_rates,
)


def test_win_rates_match_hand_computed_values():
    """Prompt 1 wins 3.5 of 4 pairs (3 > 1, 3 > 2, 2 > 1, 2 = 2: a tie is half a win). Prompt 2 wins one of four."""
    ours, theirs = np.array([[3.0, 2.0], [0.0, 5.0]]), np.array([[1.0, 2.0], [1.0, 6.0]])
    assert win_rates(ours, theirs).tolist() == [3.5 / 4, 1 / 4]
    assert win_rates(theirs, ours).tolist() == [0.5 / 4, 3 / 4], "the two win rates add up to 1"


def test_win_rates_with_different_numbers_of_completions():
    assert win_rates(np.array([[1.0]]), np.array([[0.0, 1.0, 2.0]])).tolist() == [0.5]


def test_interval_over_prompts_is_scipys_bca_with_small_sample_widening():
    """With 40 prompts, the BCa interval is widened by sqrt(40 / 39) x t(39) / z = 1.0127 x 2.0227 / 1.9600."""
    values = np.random.default_rng(0).normal(0.3, 1, 40)
    found = over_prompts(values, seed=3)
    plain = stats.bootstrap((values,), np.mean, n_resamples=5000, method="BCa", rng=np.random.default_rng(3))
    wider = [values.mean() + (end - values.mean()) * 1.0127 * 2.0227 / 1.9600 for end in plain.confidence_interval]
    assert (found.low, found.high) == pytest.approx(wider, abs=1e-4)
    assert found.value == pytest.approx(values.mean())


def test_interval_over_prompts_matches_hand_computed_values():
    """Two prompts with the values 0 and 1: half of all resamples have the mean 0.5, a quarter the mean 0 and a quarter
    the mean 1. The ends of the interval then move sqrt(2) x 12.706 / 1.960 = 9.168 times as far away from 0.5. With
    `limits`, the interval is clipped to 0 and 1."""
    found = over_prompts([0.0, 1.0], seed=1)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5 - 0.5 * 9.168, 0.5 + 0.5 * 9.168), rel=1e-3)
    assert over_prompts([0.0, 1.0], 1, limits=(0, 1)) == Estimate(0.5, 0.0, 1.0)
    assert not found.excludes(0.5) and found.excludes(9) and not found.above(0)
    assert over_prompts([0.0, 0.0, 0.0], seed=1) == Estimate(0.0, 0.0, 0.0)
    few, many = (over_prompts([2.0] * count, seed=1) for count in (2, 40))
    assert not few.excludes(0) and many.above(1.2), "equal values: one more prompt could have the opposite value"
    won = [over_prompts([1.0] * count, 1, null=0.5, limits=(0, 1)) for count in (5, 20, 128)]
    assert won[0].low < 0.6 < won[1].low < 0.9 < won[2].low < 1 and {w.high for w in won} == {1.0}
    assert over_prompts([2.0], seed=1) == Estimate(2.0), "one prompt gives no interval"
    assert not Estimate(2.0).excludes(0) and not Estimate(2.0).above(0)
    nan = float("nan")
    assert not Estimate(nan, nan, nan).excludes(0) and over_prompts([1.0, nan], 1).low is None


def test_false_positive_rate_with_12_prompts_is_at_most_5_percent(monkeypatch):
    """At most 5% (plus 2 standard errors) of 400 intervals for means of 12 values around 0 exclude 0."""
    monkeypatch.setattr(statistics, "RESAMPLES", 500)
    rng = np.random.default_rng(2)
    significant = sum(over_prompts(rng.normal(0, 1, 12), trial).excludes(0) for trial in range(400))
    assert significant <= 400 * 0.05 + 2 * np.sqrt(400 * 0.05 * 0.95)


def test_interval_is_always_finite():
    """BCa is undefined for a jackknife without skew. Win rates of 0s and 1s come close to that case."""
    for values in ([0.0] * 30 + [1.0], [1.0] * 5 + [0.0], [0.5, 0.5, 0.5, 1.0]):
        found = over_prompts(values, seed=0)
        assert np.isfinite([found.low, found.high]).all() and found.low <= found.value <= found.high


def test_interval_over_seeds_matches_hand_computed_values():
    """Two seeds per group and no variation except between seeds: means 1 and 3 against 0 and 0. The difference is 2.
    The first group has s^2 / S = 2 / 2 with 1 degree of freedom, so t = 12.7 and the difference is not significant."""
    gaps = np.array([1.0, 3.0])[:, None, None] - np.zeros((1, 2, 50))
    found = over_seeds(gaps, seed=0)
    assert found.value == 2
    # resampled means of the widened seeds (2 -+ sqrt(2)) range from 0.59 to 3.41; then times t / z = 12.706 / 1.96
    half = np.sqrt(2) * stats.t.ppf(0.975, 1) / stats.norm.ppf(0.975)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), rel=1e-6)


def test_interval_over_identical_seeds_is_the_interval_over_prompts():
    """Without a difference between seeds, the interval equals scipy's percentile bootstrap over prompts."""
    per_prompt = np.random.default_rng(1).normal(0.3, 1, 200)
    found = over_seeds(np.tile(per_prompt, (3, 3, 1)), seed=0)
    plain = stats.bootstrap((per_prompt,), np.mean, method="percentile", rng=np.random.default_rng(5))
    assert found.low == pytest.approx(plain.confidence_interval.low, abs=0.02)
    assert found.high == pytest.approx(plain.confidence_interval.high, abs=0.02)


def test_bonferroni_levels_match_hand_computed_values():
    """Each of three intervals has the level 1 - 0.05 / 3: t(199) is 2.414 instead of the 1.972 of a 95% interval."""
    assert [level_of_each(n) for n in (0, 1, 2)] == [0.95, 0.95, pytest.approx(0.975)]
    assert (percent(0.95), percent(level_of_each(3))) == ("95%", "98.3%")
    values = np.random.default_rng(1).normal(0, 1, 200)
    of_mean = values.std(ddof=1) / np.sqrt(200)
    for level, quantile in ((0.95, 1.972), (level_of_each(3), 2.414)):
        for found in (over_prompts(values, 0, level=level), over_seeds(np.tile(values, (2, 1, 1)), 0, level=level)):
            assert found.high - found.low == pytest.approx(2 * quantile * of_mean, rel=0.05)


def test_over_seeds_returns_no_interval_if_it_cannot_be_estimated():
    assert over_seeds(np.zeros((1, 1, 10)), seed=0) is None
    assert over_seeds(np.zeros((2, 1, 10)), seed=0) == Estimate(0.0, 0.0, 0.0)
    assert over_seeds(np.ones((3, 3, 1)), seed=0) == Estimate(1.0), "one prompt gives no interval"


@pytest.mark.parametrize("gap", [1.0, 0.1, -1 / 3])
def test_equal_gaps_of_all_seeds_and_prompts_have_the_interval_of_one_seed(gap):
    """More seeds must not turn a clear result into no result. The means of 0.1 differ in the last bit."""
    for seeds in ((3, 3), (3, 1)):
        found = over_seeds(np.full((*seeds, 40), gap), seed=0)
        assert found == over_prompts(np.full(40, found.value), seed=0)
        assert found.value == pytest.approx(gap) and found.excludes(0)
    won = over_seeds(np.ones((3, 3, 40)), 0, 0.5, (0.0, 1.0))
    assert won == over_prompts(np.ones(40), 0, 0.5, (0.0, 1.0)) and won.low > 0.5
    assert over_seeds(np.full((3, 3, 40), 0.5), 0, 0.5, (0.0, 1.0)) == Estimate(0.5, 0.5, 0.5)


def test_degrees_of_freedom_match_hand_computed_values():
    """Seeds with means 1 and 3 against a fixed model, and prompts that vary. The variances of the mean are 2 / 2 = 1
    with 1 degree of freedom (seeds) and 4 / 4 = 1 with 3 (prompts: -+sqrt(3), sum of squares 12 / 3 = 4).
    Satterthwaite's formula gives 2^2 / (1/1 + 1/3) = 3 degrees of freedom, so t(3) = 3.182."""
    prompts = np.sqrt(3) * np.array([1.0, -1.0, 1.0, -1.0])
    values = np.array([1.0, 3.0])[:, None, None] + prompts
    found = over_seeds(values, seed=0)
    seeds = np.random.default_rng(3).choice([2 - np.sqrt(2), 2 + np.sqrt(2)], (200_000, 2)).mean(1)
    resampled = seeds + np.random.default_rng(4).choice(prompts, (200_000, 4)).mean(1)
    half = [abs(np.quantile(resampled, q) - 2) * 3.182 / 1.960 for q in (0.025, 0.975)]
    assert (2 - found.low, found.high - 2) == (pytest.approx(half[0], rel=0.05), pytest.approx(half[1], rel=0.05))


def test_false_positive_rate_with_three_seeds_is_at_most_10_percent(monkeypatch):
    """Two groups of three seeds with the same settings; the true mean varies between seeds. At most 10 of 100
    comparisons are significant. A hierarchical bootstrap without the two corrections finds about 15."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    rng, significant = np.random.default_rng(0), 0
    for trial in range(100):
        prompts = rng.normal(0, 1, 64)
        groups = [prompts + rng.normal(0, 0.2, (3, 1)) + rng.normal(0, 0.5, (3, 64)) for _ in range(2)]
        significant += over_seeds(groups[0][:, None] - groups[1][None], trial).excludes(0)
    assert significant <= 10


@pytest.mark.proof
@pytest.mark.parametrize(
    ("seeds", "prompts", "scatter", "noise"),
    [(2, 64, 0.1, 0.5), (3, 64, 0, 0.5), (3, 64, 0.05, 0.5), (3, 64, 0.2, 0.5), (3, 128, 0.2, 0.3), (5, 64, 0.2, 0.5)],
)
def test_false_positive_rates_by_seeds_and_prompts(monkeypatch, seeds, prompts, scatter, noise):
    """Of 400 comparisons of two equal groups, at most 7% are significant. Prints this rate and the rate of a
    hierarchical bootstrap without the corrections."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1500)
    rng, ours, plain = np.random.default_rng(0), 0, 0
    for trial in range(400):
        shared = rng.normal(0, 1, prompts)
        one, other = (
            shared + rng.normal(0, scatter, (seeds, 1)) + rng.normal(0, noise, (seeds, prompts)) for _ in range(2)
        )
        gaps = one[:, None] - other[None]
        ours += over_seeds(gaps, trial).excludes(0)
        drawn = [rng.multinomial(n, np.full(n, 1 / n), 1000) / n for n in gaps.shape]
        low, high = np.quantile(np.einsum("rs,rt,rp,stp->r", *drawn, gaps, optimize=True), [0.025, 0.975])
        plain += not low <= 0 <= high
    print(f"{seeds} seeds, {prompts} prompts, scatter {scatter}: plain {plain / 400:.1%}, ours {ours / 400:.1%}")
    assert ours / 400 <= 0.07


def test_real_difference_is_significant(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    rng = np.random.default_rng(0)
    ours, theirs = (mean + rng.normal(0, 0.05, (3, 1)) + rng.normal(0, 0.5, (3, 128)) for mean in (0.5, 0.0))
    assert over_seeds(ours[:, None] - theirs[None], 0).above(0)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.1, 0.9, 0.5, 0.2], [(4, "WORST"), (1, "BEST"), (2, "MEDIUM"), (3, "MEDIUM")]),
        ([1.0, 1.0, 0.5, 0.0], [(1, "BEST"), (1, "BEST"), (3, "MEDIUM"), (4, "WORST")]),
        ([1.0, 0.0, 0.0], [(1, "BEST"), (2, "WORST"), (2, "WORST")]),
        ([2.0, 2.0], [(1, "BEST"), (1, "BEST")]),
        ([7.0], [(1, "BEST")]),
    ],
)
def test_ranks_with_ties_and_with_one_completion(scores, expected):
    assert ranks(scores) == expected


def test_distinct_matches_hand_computed_values():
    """The first text has 3 different words of 4. Both texts have 4 different words of 6 and 4 different pairs of 4."""
    assert distinct(["the cat the dog"], 1) == 3 / 4
    assert distinct(["The cat the dog", "cat runs"], 1) == 4 / 6
    assert distinct(["The cat the dog", "cat runs"], 2) == 1.0
    assert distinct(["", "one"], 2) == 0.0


def test_repetition_matches_hand_computed_values():
    """Seven times "yes" has four 4-grams; three repeat the first. A text of fewer than four words has no 4-gram."""
    assert repetition("yes yes yes yes yes yes yes") == 3 / 4
    assert repetition("a b c d e f g") == 0.0
    assert repetition("a b c") == repetition("") == 0.0


def test_correlation_is_a_rank_correlation():
    assert correlation([1, 2, 3, 100], [5, 6, 70, 80]) == pytest.approx(1.0)
    assert correlation([1, 1, 1], [1, 2, 3]) is None

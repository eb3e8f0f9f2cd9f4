"""Win rates, intervals, ranks and what is counted in texts: by hand, against scipy, and against chance."""

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


def test_win_rates_by_hand():
    """Prompt 1: of 2 x 2 pairs (3 > 1, 3 > 2, 2 > 1, 2 = 2) three and a half are won. Prompt 2: one of four."""
    ours, theirs = np.array([[3.0, 2.0], [0.0, 5.0]]), np.array([[1.0, 2.0], [1.0, 6.0]])
    assert win_rates(ours, theirs).tolist() == [3.5 / 4, 1 / 4]
    assert win_rates(theirs, ours).tolist() == [0.5 / 4, 3 / 4], "what one side wins the other loses"


def test_win_rates_of_unlike_numbers_of_completions():
    assert win_rates(np.array([[1.0]]), np.array([[0.0, 1.0, 2.0]])).tolist() == [0.5]


def test_an_interval_over_prompts_is_scipys_a_little_wider():
    """40 prompts: BCa, drawn out by sqrt(40 / 39) x t(39) / z = 1.0127 x 2.0227 / 1.9600."""
    values = np.random.default_rng(0).normal(0.3, 1, 40)
    found = over_prompts(values, seed=3)
    plain = stats.bootstrap((values,), np.mean, n_resamples=5000, method="BCa", rng=np.random.default_rng(3))
    wider = [values.mean() + (end - values.mean()) * 1.0127 * 2.0227 / 1.9600 for end in plain.confidence_interval]
    assert (found.low, found.high) == pytest.approx(wider, abs=1e-4)
    assert found.value == pytest.approx(values.mean())


def test_an_interval_over_prompts_by_hand():
    """Two prompts, 0 and 1: half of all resamples have the mean 0.5, a quarter each 0 and 1; then sqrt(2) x 12.706 /
    1.960 = 9.168 times as far from 0.5. As a share it ends at 0 and 1."""
    found = over_prompts([0.0, 1.0], seed=1)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5 - 0.5 * 9.168, 0.5 + 0.5 * 9.168), rel=1e-3)
    assert over_prompts([0.0, 1.0], 1, limits=(0, 1)) == Estimate(0.5, 0.0, 1.0)
    assert not found.excludes(0.5) and found.excludes(9) and not found.above(0)
    assert over_prompts([0.0, 0.0, 0.0], seed=1) == Estimate(0.0, 0.0, 0.0)
    few, many = (over_prompts([2.0] * count, seed=1) for count in (2, 40))
    assert not few.excludes(0) and many.above(1.2), "prompts that all say the same: one more, to the contrary"
    won = [over_prompts([1.0] * count, 1, null=0.5, limits=(0, 1)) for count in (5, 20, 128)]
    assert won[0].low < 0.6 < won[1].low < 0.9 < won[2].low < 1 and {w.high for w in won} == {1.0}
    assert over_prompts([2.0], seed=1) == Estimate(2.0), "one prompt tells nothing of others"
    assert not Estimate(2.0).excludes(0) and not Estimate(2.0).above(0)
    nan = float("nan")
    assert not Estimate(nan, nan, nan).excludes(0) and over_prompts([1.0, nan], 1).low is None


def test_few_prompts_are_seldom_called_different(monkeypatch):
    """Means of 12 values around 0: at most 5 + 2 standard errors of 400 intervals leave out 0."""
    monkeypatch.setattr(statistics, "RESAMPLES", 500)
    rng = np.random.default_rng(2)
    called = sum(over_prompts(rng.normal(0, 1, 12), trial).excludes(0) for trial in range(400))
    assert called <= 400 * 0.05 + 2 * np.sqrt(400 * 0.05 * 0.95)


def test_an_interval_is_always_a_number():
    """BCa has no answer for a jackknife without skew; a win rate of 0s and 1s comes near it."""
    for values in ([0.0] * 30 + [1.0], [1.0] * 5 + [0.0], [0.5, 0.5, 0.5, 1.0]):
        found = over_prompts(values, seed=0)
        assert np.isfinite([found.low, found.high]).all() and found.low <= found.value <= found.high


def test_seeds_by_hand():
    """Two seeds of each side, no noise but theirs: means 1, 3 against 0, 0. The difference is 2; of the first side
    s^2 / S = 2 / 2 with 1 degree of freedom, so t = 12.7 and nothing is shown."""
    gaps = np.array([1.0, 3.0])[:, None, None] - np.zeros((1, 2, 50))
    found = over_seeds(gaps, seed=0)
    assert found.value == 2
    # resampled means of the widened seeds (2 -+ sqrt(2)): from 0.59 to 3.41; times t / z = 12.706 / 1.96
    half = np.sqrt(2) * stats.t.ppf(0.975, 1) / stats.norm.ppf(0.975)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), rel=1e-6)


def test_seeds_that_agree_leave_the_prompts():
    """Without a difference between seeds the interval is that over prompts, as scipy's percentile bootstrap has it."""
    per_prompt = np.random.default_rng(1).normal(0.3, 1, 200)
    found = over_seeds(np.tile(per_prompt, (3, 3, 1)), seed=0)
    plain = stats.bootstrap((per_prompt,), np.mean, method="percentile", rng=np.random.default_rng(5))
    assert found.low == pytest.approx(plain.confidence_interval.low, abs=0.02)
    assert found.high == pytest.approx(plain.confidence_interval.high, abs=0.02)


def test_the_level_of_several_intervals_by_hand():
    """Three intervals at 1 - 0.05 / 3 each. t(199) at 1 - 0.05 / 6 is 2.414, where a 95% interval has 1.972."""
    assert [level_of_each(n) for n in (0, 1, 2)] == [0.95, 0.95, pytest.approx(0.975)]
    assert (percent(0.95), percent(level_of_each(3))) == ("95%", "98.3%")
    values = np.random.default_rng(1).normal(0, 1, 200)
    of_mean = values.std(ddof=1) / np.sqrt(200)
    for level, quantile in ((0.95, 1.972), (level_of_each(3), 2.414)):
        for found in (over_prompts(values, 0, level=level), over_seeds(np.tile(values, (2, 1, 1)), 0, level=level)):
            assert found.high - found.low == pytest.approx(2 * quantile * of_mean, rel=0.05)


def test_one_seed_per_group_has_no_interval_over_seeds():
    assert over_seeds(np.zeros((1, 1, 10)), seed=0) is None
    assert over_seeds(np.zeros((2, 1, 10)), seed=0) == Estimate(0.0, 0.0, 0.0)
    assert over_seeds(np.full((2, 1, 10), 0.5), seed=0) == Estimate(0.5), "all equal: nothing to go by"
    assert over_seeds(np.ones((3, 3, 1)), seed=0) == Estimate(1.0), "one prompt tells nothing of others"


def test_degrees_of_freedom_by_hand():
    """Seeds 1 and 3 against a fixed model, prompts that scatter: the variances of the mean are 2 / 2 = 1 with 1 degree
    of freedom (seeds) and 4 / 4 = 1 with 3 (prompts: -+sqrt(3), sum of squares 12 / 3 = 4). Satterthwaite: 2^2 / (1/1
    + 1/3) = 3, so t(3) = 3.182."""
    prompts = np.sqrt(3) * np.array([1.0, -1.0, 1.0, -1.0])
    values = np.array([1.0, 3.0])[:, None, None] + prompts
    found = over_seeds(values, seed=0)
    seeds = np.random.default_rng(3).choice([2 - np.sqrt(2), 2 + np.sqrt(2)], (200_000, 2)).mean(1)
    redrawn = seeds + np.random.default_rng(4).choice(prompts, (200_000, 4)).mean(1)
    half = [abs(np.quantile(redrawn, q) - 2) * 3.182 / 1.960 for q in (0.025, 0.975)]
    assert (2 - found.low, found.high - 2) == (pytest.approx(half[0], rel=0.05), pytest.approx(half[1], rel=0.05))


def test_seeds_that_differ_by_chance_alone_are_seldom_called_different(monkeypatch):
    """Three seeds a side of the same settings, whose true means scatter: at most 10 of 100 comparisons are called
    different. A hierarchical bootstrap without the two corrections calls about 15."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    rng, called = np.random.default_rng(0), 0
    for trial in range(100):
        prompts = rng.normal(0, 1, 64)
        sides = [prompts + rng.normal(0, 0.2, (3, 1)) + rng.normal(0, 0.5, (3, 64)) for _ in range(2)]
        called += over_seeds(sides[0][:, None] - sides[1][None], trial).excludes(0)
    assert called <= 10


@pytest.mark.proof
@pytest.mark.parametrize(
    ("seeds", "prompts", "scatter", "noise"),
    [(2, 64, 0.1, 0.5), (3, 64, 0, 0.5), (3, 64, 0.05, 0.5), (3, 64, 0.2, 0.5), (3, 128, 0.2, 0.3), (5, 64, 0.2, 0.5)],
)
def test_the_table_of_coverage_in_the_notes(monkeypatch, seeds, prompts, scatter, noise):
    """400 comparisons of two sides that are the same: the share that is called different, and what a hierarchical
    bootstrap without the corrections calls (printed)."""
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


def test_a_real_difference_is_found(monkeypatch):
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


def test_distinct_by_hand():
    """the cat the dog: 3 of 4 words, 3 of 3 pairs; with the second text 4 of 6 words and 4 of 4 pairs."""
    assert distinct(["the cat the dog"], 1) == 3 / 4
    assert distinct(["The cat the dog", "cat runs"], 1) == 4 / 6
    assert distinct(["The cat the dog", "cat runs"], 2) == 1.0
    assert distinct(["", "one"], 2) == 0.0


def test_repetition_by_hand():
    """yes x 7: four 4-grams, one of them new. A text of fewer than four words repeats nothing."""
    assert repetition("yes yes yes yes yes yes yes") == 3 / 4
    assert repetition("a b c d e f g") == 0.0
    assert repetition("a b c") == repetition("") == 0.0


def test_correlation_is_of_ranks():
    assert correlation([1, 2, 3, 100], [5, 6, 70, 80]) == pytest.approx(1.0)
    assert correlation([1, 1, 1], [1, 2, 3]) is None

"""Tests win rates, intervals, power, ranks and pass@k against hand-computed values, scipy and simulations."""

from __future__ import annotations

import itertools
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rlhf.analysis.verdict import contrast
from rlhf.utils import statistics
from rlhf.utils.statistics import (
    Estimate,
    Power,
    all_equal_to,
    attempts,
    contrast_of,
    correlation,
    interval_of,
    learning_signal,
    level_of_each,
    no_difference,
    over_prompts,
    over_seeds,
    paired,
    pass_at_k,
    per_prompt,
    percent,
    power_of,
    prompts_needed,
    ranks,
    share_interval,
    share_limits,
    smallest_change,
    sources_of,
    win_rates,
)
from tests.evaluations import evaluation_of

NAN = np.nan
TRAINED = (True, True)


def with_seeds(values, seed, limits=None, level=0.95) -> Estimate:
    """Return the estimate over seeds and prompts. A group with one seed is a baseline."""
    return over_seeds(values, seed, tuple(n > 1 for n in values.shape[:2]), limits, level)[0]


def test_statistics_leave_out_completions_without_a_score():
    values = np.array([[1, 3, NAN], [NAN, NAN, NAN], [2, 4, 6]])
    assert np.array_equal(per_prompt(values), [2, NAN, 4], equal_nan=True)
    assert np.array_equal(per_prompt(values, exact=True), [2, NAN, 4], equal_nan=True)
    assert per_prompt(np.array([[0.1] * 10]), exact=True) == 0.1 != sum([0.1] * 10) / 10
    assert paired(np.array([[[1, NAN, 3]], [[4, 5, 6]]])).tolist() == [[[1, 3]], [[4, 6]]]
    # prompt 1: (1 > 0), (3 > 0) of two pairs; prompt 2: no pair; prompt 3: (2 < 4), (4 = 4), (6 > 4)
    other = np.array([[0, NAN], [1, 1], [4, NAN]])
    assert np.array_equal(win_rates(values, other), [1, NAN, 0.5], equal_nan=True)
    assert ranks([1.0, NAN, 3.0, 3.0]) == [(3, "WORST"), (None, None), (1, "BEST"), (1, "BEST")]
    assert ranks([NAN, NAN]) == [(None, None)] * 2
    assert correlation([1.0, NAN, 2.0], [1, 9, 2]) == pytest.approx(1.0)
    assert correlation([NAN, NAN], [1, 2]) is None


def test_win_rates_match_hand_computed_values():
    """Prompt 1 wins 3.5 of 4 pairs (3 > 1, 3 > 2, 2 > 1, 2 = 2: a tie is half a win). Prompt 2 wins one of four."""
    ours = np.array([[3.0, 2.0], [0.0, 5.0]])
    theirs = np.array([[1.0, 2.0], [1.0, 6.0]])
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
    assert over_prompts([0.0, 0.0, 0.0], seed=1) == Estimate(0.0), "nothing is known about other prompts"
    few, many = (over_prompts([2.0] * count, seed=1) for count in (2, 40))
    assert not few.excludes(0) and many.above(1.2), "equal values: one more prompt could have the opposite value"
    won = [over_prompts([1.0] * count, 1, limits=(0, 1)) for count in (5, 20, 128)]
    assert won[0].low < 0.6 < won[1].low < 0.9 < won[2].low < 1 and {w.high for w in won} == {1.0}
    assert over_prompts([2.0], seed=1) == Estimate(2.0), "one prompt gives no interval"
    assert not Estimate(2.0).excludes(0) and not Estimate(2.0).above(0)
    nan = float("nan")
    assert not Estimate(nan, nan, nan).excludes(0) and over_prompts([1.0, nan], 1).low is None


def test_false_positive_rate_with_12_prompts_is_at_most_5_percent(monkeypatch):
    """At most 5% (plus 2 standard errors) of 400 intervals for means of 12 values around 0 exclude 0."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    rng = np.random.default_rng(2)
    significant = sum(over_prompts(rng.normal(0, 1, 12), trial).excludes(0) for trial in range(400))
    assert significant <= 400 * 0.05 + 2 * np.sqrt(400 * 0.05 * 0.95)


def test_interval_is_always_finite():
    """BCa is undefined for a jackknife without skew. Win rates of 0s and 1s come close to that case."""
    for values in ([0.0] * 30 + [1.0], [1.0] * 5 + [0.0], [0.5, 0.5, 0.5, 1.0]):
        found = over_prompts(values, seed=0)
        assert np.isfinite([found.low, found.high]).all() and found.low <= found.value <= found.high


def test_equal_values_have_the_exact_binomial_interval():
    """All of eight prompts are won. At least 0.025^(1/8) = 0.6306 of all prompts are; the others may be lost."""
    assert over_prompts([1.0] * 8, 1, (0.0, 1.0)) == Estimate(1.0, pytest.approx(0.6306, abs=1e-4), 1.0)
    assert over_prompts([-1.0] * 8, 1) == Estimate(-1.0, -1.0, pytest.approx(0.3694 - 0.6306, abs=1e-4))


def test_equal_values_up_to_rounding_are_equal():
    """Thirds of 0/1 scores: 1 - 2/3 and 2/3 - 1/3 differ in the last bit. That is no interval without width."""
    one = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    other = np.array([[0, 0, 0], [1, 1, 0], [0, 1, 0]])
    found = contrast_of("", "score", [one], [other], 1)
    assert len(set((one.mean(axis=1) - other.mean(axis=1)).tolist())) > 1
    exact = over_prompts([1 / 3] * 3, 1, (-1, 1))
    assert found.result == "equal" and found.difference.low == pytest.approx(exact.low) and exact.low < 0
    assert over_prompts([1 / 3, 1 / 3 + 1e-16, 1 / 3], 1) == over_prompts([1 / 3] * 3, 1)
    assert correlation(np.array([0.3, 0.1 + 0.2, 0.3]), np.array([1, 2, 3])) is None


def test_large_differences_are_printed_with_four_digits():
    one = np.array([[2.0e7], [1.9e7], [2.1e7], [19_355_833.333]])
    found = contrast_of("", "score", [one], [np.zeros((4, 1))], 1)
    assert found.text.startswith("+1.984e+07 (95%") and found.text.count("e+07") == 3
    assert interval_of({"value": -19_355_833.333, "low": None, "high": None}) == "-1.936e+07"
    assert interval_of({"value": 99_999.4, "low": None, "high": None}) == "+99999.400"


def test_means_that_differ_only_by_rounding_are_equal():
    """The same scores in another order: their sums differ in the last bit, which is no difference."""
    scores = np.array([[0.1, 0.2, 0.3], [0.3, 0.7, 1.1], [0.5, 0.6, 0.1]])
    found = contrast_of("", "score", [scores], [scores[:, ::-1]], 1)
    assert (per_prompt(scores) != per_prompt(scores[:, ::-1])).any()
    assert found.difference == Estimate(0.0) and found.power == Power(None, None, None), "as of equal means"


def test_equal_values_within_limits_are_no_certainty():
    """15 prompts without a change of a score of 0 or 1: at least 0.025^(1/15) = 0.7820 of all prompts do not change,
    and the others can change by 1 in either direction. Win rates of 1/2 likewise: by 1/2."""
    found = over_prompts([0.0] * 15, 1, limits=(-1.0, 1.0))
    assert (found.low, found.high) == pytest.approx((-0.2180, 0.2180), abs=1e-4) and not found.excludes(0)
    ties = over_prompts([0.5] * 15, 1, (0.0, 1.0))
    assert (ties.low, ties.high) == pytest.approx((0.5 - 0.1090, 0.5 + 0.1090), abs=1e-4)


@pytest.mark.parametrize("seeds", [1, 3])
def test_intervals_of_a_score_of_0_or_1_are_within_its_range(seeds):
    """Four prompts, two of which got worse: the interval ended at -1.44 before. No possible difference is visible."""
    before = np.ones((4, 1))
    after = [np.array([[0.0], [0.0], [1.0], [1.0]])] * seeds
    found = contrast_of("", "score", after, [before], 1)
    assert found.difference.low == -1.0 and found.difference.high <= 1.0
    assert found.power.visible == np.inf
    wide = contrast_of("", "score", [10 * rows for rows in after], [10 * before], 1)
    assert wide.difference.low < -10 and np.isfinite(wide.power.visible), "the range of other scores is not known"
    assert contrast_of("", "score", [before * np.nan], [before], 1).result == "unknown"


def test_a_difference_of_0_on_every_prompt_has_a_reason_for_no_interval():
    same = np.full((20, 2), 3.5)
    found = contrast_of("", "score", [same], [same], 1)
    assert (found.difference.low, found.result) == (None, "unknown") and "on every prompt" in found.text
    ones = np.ones((20, 2))
    checked = contrast_of("", "score", [ones], [ones], 1)
    assert checked.result == "equal" and checked.difference.low < 0 < checked.difference.high


def test_number_of_prompts_that_are_needed_matches_values_worked_out_by_hand():
    """(1.960 + 0.842)^2 = 7.849. One completion: 7.849 x (1/9 + 1/3) / 0.1^2 = 348.8; 8 completions: 7.849 x (1/9 +
    1/24) / 0.01 = 119.9; 3 points without noise of the completions: 7.849 / 9 / 0.0009 = 969.0."""
    assert [prompts_needed(samples) for samples in (1, 4, 8)] == [349, 153, 120]
    assert prompts_needed(10**9, 0.03) == pytest.approx(969, abs=1)
    assert smallest_change(349, 1) <= 0.1 < smallest_change(348, 1)


@pytest.mark.parametrize("samples", [1, 8])
def test_about_80_percent_of_evaluations_find_10_points_with_the_needed_prompts(samples):
    """Solve rates spread evenly, of which two thirds are as before and the others are new, plus 10 points. So the
    variance of a prompt's change is 1/3 x 2/12 (half of the assumed 1/9), and at least 80% find it (300 trials)."""
    rng = np.random.default_rng(0)
    prompts = prompts_needed(samples)
    found = 0
    for _ in range(300):
        before = rng.uniform(0, 0.9, prompts)
        after = np.where(rng.uniform(size=prompts) < 2 / 3, before, rng.uniform(0, 0.9, prompts)) + 0.1
        change = (rng.binomial(samples, after) - rng.binomial(samples, before)) / samples
        found += stats.ttest_1samp(change, 0).confidence_interval().low > 0
    assert 0.78 < found / 300 < 0.97


def test_exact_interval_of_a_share_matches_published_values():
    """Clopper & Pearson 1934: 7 of 11 has 0.308 to 0.891, and all of 14 begins at 0.025^(1/14)."""
    assert share_interval(7 / 11, 11) == pytest.approx((0.308, 0.891), abs=1e-3)
    assert share_interval(1.0, 14) == pytest.approx((0.025 ** (1 / 14), 1.0))


@pytest.mark.parametrize(
    ("values", "limits"),
    [([0, 1], (-1, 1)), ([0.2, np.nan], (-1, 1)), ([0, 1.5], None), ([-1, 1], None), ([np.nan, 2], None)],
)
def test_range_of_shares_is_known(values, limits):
    assert share_limits(values) == limits


def test_interval_over_seeds_matches_hand_computed_values():
    """Two seeds per group and no variation except between seeds: means 1 and 3 against 0 and 0. The difference is 2.
    The first group has s^2 / S = 2 / 2 with 1 degree of freedom, so t = 12.706: not significant."""
    gaps = np.array([1.0, 3.0])[:, None, None] - np.zeros((1, 2, 50))
    found = with_seeds(gaps, seed=0)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2 - 12.706, 2 + 12.706), abs=1e-3)


def test_interval_over_identical_seeds_is_the_t_interval_over_prompts():
    values = np.random.default_rng(1).normal(0.3, 1, 200)
    found = with_seeds(np.tile(values, (3, 3, 1)), seed=0)
    plain = stats.ttest_1samp(values, 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(plain))


def test_noise_of_seeds_on_single_prompts_counts_once():
    """Rows -1 and 1 of two seeds, turned on the second prompt: the means of seeds and of prompts are all 0. The mean
    square of the rest is 4 with one degree of freedom, so the noise of the mean is 4 / (2 x 2) = 1. A shift of 3 on
    one prompt only gives the prompts' means 3 and 0 the variance 4.5 / 2 = 2.25, of which 1 is noise."""
    turned = np.array([[1.0, -1.0], [-1.0, 1.0]])[:, None]
    assert [column.tolist() for column in sources_of(turned)] == [[0, 0], [1, 0], [1, 1]]
    assert sources_of(turned).half_width(0.95) == pytest.approx(12.706, abs=1e-3), "as over prompts, at 1 df"
    shifted = sources_of(turned + np.array([3.0, 0.0]))
    assert (shifted.variances.tolist(), shifted.noise.tolist()) == ([0, 1.25], [1, 0])


def test_bonferroni_levels_match_hand_computed_values():
    """Each of three intervals has the level 1 - 0.05 / 3: t(199) is 2.414 instead of the 1.972 of a 95% interval."""
    assert [level_of_each(n) for n in (0, 1, 2)] == [0.95, 0.95, pytest.approx(0.975)]
    assert (percent(0.95), percent(level_of_each(3))) == ("95%", "98.3%")
    values = np.random.default_rng(1).normal(0, 1, 200)
    of_mean = values.std(ddof=1) / np.sqrt(200)
    for level, quantile in ((0.95, 1.972), (level_of_each(3), 2.414)):
        for found in (over_prompts(values, 0, level=level), with_seeds(np.tile(values, (2, 1, 1)), 0, level=level)):
            assert found.high - found.low == pytest.approx(2 * quantile * of_mean, rel=0.05)


def test_over_seeds_returns_no_interval_if_it_cannot_be_estimated():
    assert with_seeds(np.zeros((2, 1, 10)), seed=0) == Estimate(0.0)
    assert with_seeds(np.ones((3, 3, 1)), seed=0) == Estimate(1.0), "one prompt gives no interval"


@pytest.mark.parametrize("gap", [1.0, 0.1, -1 / 3])
def test_equal_gaps_of_all_seeds_and_prompts_have_the_interval_of_one_seed(gap):
    """More seeds must not turn a clear result into no result. The means of 0.1 differ in the last bit."""
    for seeds in ((3, 3), (3, 1)):
        found = with_seeds(np.full((*seeds, 40), gap), seed=0)
        assert found == over_prompts(np.full(40, found.value), seed=0)
        assert found.value == pytest.approx(gap) and found.excludes(0)
    won = with_seeds(np.ones((3, 3, 40)), 0, (0.0, 1.0))
    assert won == over_prompts(np.ones(40), 0, (0.0, 1.0)) and won.low > 0.5
    assert with_seeds(np.full((3, 3, 40), 0.5), 0, (0.0, 1.0)) == over_prompts([0.5] * 40, 0, (0.0, 1.0))


def test_degrees_of_freedom_match_hand_computed_values():
    """Seeds with means 1 and 3 against a fixed model, and prompts that vary. The variances of the mean are 2 / 2 = 1
    with 1 degree of freedom (seeds) and 4 / 4 = 1 with 3 (prompts: -+sqrt(3), sum of squares 12 / 3 = 4).
    The squared half-widths are 12.706^2 = 161.4 and 3.182^2 = 10.13, shares 0.9410 and 0.0590 with roots 0.9700 and
    0.2430. So the degrees of freedom are 1 / 0.9700 = 1.0309 and 3 / 0.2430 = 12.35."""
    values = np.array([1.0, 3.0])[:, None, None] + np.sqrt(3) * np.array([1.0, -1.0, 1.0, -1.0])
    found = with_seeds(values, seed=0)
    half = np.hypot(stats.t.ppf(0.975, 1.0309), stats.t.ppf(0.975, 12.35))
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), rel=1e-3)


@pytest.mark.parametrize("tiny", [0.0, 1e-12, 0.002])
def test_a_perfect_separation_by_three_seeds_is_significant(tiny):
    """Scores of 1 against 0 in every run, on as few as eight prompts; also if the second group is 0 up to `tiny`."""
    other = np.array([0.0, tiny, 2 * tiny])
    for prompts in (8, 64):
        gaps = np.ones((3, 1, prompts)) - other[None, :, None]
        found, over = over_seeds(gaps, 1, level=level_of_each(3))
        assert found.above(0.05) and found.value == pytest.approx(1 - tiny) and over == "seeds and prompts"


def test_win_rates_of_1_in_three_seeds_are_significant():
    """0/1 rewards: all completions are right in one group and wrong in the other."""
    wins = np.array([[win_rates(np.ones((8, 4)), np.zeros((8, 4))) for _ in range(3)] for _ in range(3)])
    found, _ = over_seeds(wins, 1, TRAINED, (0.0, 1.0))
    assert found == over_prompts([1.0] * 8, 1, (0.0, 1.0)) and found.above(0.5)


def test_a_baseline_has_no_seeds():
    """One seed of a trained group is not enough for an interval over seeds; a baseline, on either side, needs none."""
    values = np.random.default_rng(0).normal(0, 1, (3, 1, 20))
    cases = {(3, 1): (True, False), (1, 3): (False, True), (1, 1): (False, False)}
    found = [over_seeds(values[: shape[0]].mean(0, keepdims=True) if shape == (1, 1) else
             values.reshape(*shape, 20), 1, trained)[1] for shape, trained in cases.items()]  # fmt: skip
    assert found == ["seeds and prompts", "seeds and prompts", "prompts"]
    assert over_seeds(values, 1, TRAINED)[1] == "prompts"


def simulated(rng, seeds, prompts=64, spread=(0.1, 0.1), noise=0.0, of_prompts=0.0, difference=0.0) -> np.ndarray:
    """Return gaps (S, T, P) of two groups: normal means of seeds, noise per seed and prompt, effects of prompts."""
    one, other = (rng.normal(0, sd, (n, 1)) + rng.normal(0, noise, (n, prompts))
                  for n, sd in zip(seeds, spread, strict=True))  # fmt: skip
    return difference + rng.normal(0, of_prompts, prompts) + one[:, None] - other[None]


def share_found(rng, trials: int, **of) -> float:
    return np.mean([with_seeds(simulated(rng, **of), 0).excludes(0) for _ in range(trials)])


@pytest.mark.parametrize(("seeds", "spread"), [((3, 3), (0.1, 1.0)), ((2, 5), (0.5, 0.1))])
def test_false_positive_rate_is_at_most_5_percent_with_unequal_spread(seeds, spread):
    """Of 1,000 comparisons of two equal groups, at most 5% (plus 2 standard errors) are significant."""
    assert share_found(np.random.default_rng(0), 1000, seeds=seeds, spread=spread, noise=0.3) <= 0.05 + 0.014


@pytest.mark.proof
@pytest.mark.parametrize("noise", [(0.0, 0.0), (0.5, 0.0), (0.5, 0.5)])
@pytest.mark.parametrize("seeds", [(2, 2), (3, 3), (5, 5), (2, 5), (3, 5), (2, 1), (3, 1)])
def test_false_positive_rates_by_seeds_spread_and_noise(seeds, noise):
    """Of 20,000 comparisons of two equal groups, at most 5% (1.67% with the correction for three pairs) are
    significant, plus 3 standard errors, with spreads up to 10 times as large in either group. Prints the rates."""
    rng = np.random.default_rng(0)
    levels = (0.95, level_of_each(3))
    for ratio in (1, 2, 5, 10, 0.5, 0.2, 0.1):
        wrong = np.zeros(2)
        for _ in range(20_000):
            of = simulated(rng, seeds, spread=(0.1, 0.1 * ratio if seeds[1] > 1 else 0), noise=noise[0],
                           of_prompts=noise[1])  # fmt: skip
            found = sources_of(of)
            wrong += [abs(of.mean()) > found.half_width(level) for level in levels]
        print(f"{seeds}, noise {noise}, spread x {ratio}: " + ", ".join(f"{rate:.1%}" for rate in wrong / 20_000))
        assert (wrong / 20_000 <= [0.05 + 0.0046, 0.0167 + 0.0027]).all()


def test_real_difference_is_significant():
    rng = np.random.default_rng(0)
    assert with_seeds(simulated(rng, (3, 3), 128, (0.05, 0.05), 0.5, difference=0.5), 0).above(0)


# --- power -----------------------------------------------------------------------------------------------------------


def test_visible_difference_of_prompts_alone_matches_hand_computed_values():
    """One seed each and 200 prompts: (t(199) + z(0.8)) x standard error = (1.972 + 0.842) x 1 / sqrt(200)."""
    values = np.random.default_rng(0).normal(0, 1, 200)
    values = 0.3 + (values - values.mean()) / values.std(ddof=1)
    found = power_of(values[None, None], TRAINED, 0.95)
    assert found.visible == pytest.approx(2.814 / np.sqrt(200), rel=0.01)
    assert (found.seeds, found.first_wins) == (None, None)


def test_power_without_prompts_or_differences_is_unknown():
    for values in (np.ones((3, 3, 1)), np.zeros((3, 3, 20)), np.zeros((3, 3, 0)), np.full((3, 3, 2), np.nan)):
        assert power_of(values, TRAINED, 0.95) == Power(None, None, None)


def test_chance_of_a_new_run_matches_hand_computed_values():
    """Means 1 and 3 against a fixed 0: a new run has the variance 2, the observed mean of 2 has 2 / 2. At 1 degree of
    freedom P(t < 2 / sqrt(3)) = 1/2 + arctan(1.1547) / pi = 0.7728."""
    values = np.array([1.0, 3.0])[:, None, None] * np.ones((1, 1, 50))
    assert power_of(values, (True, False), 0.95).first_wins == pytest.approx(0.7728, abs=1e-4)
    assert power_of(-values.transpose(1, 0, 2), (False, True), 0.95).first_wins == pytest.approx(0.2272, abs=1e-4)
    assert power_of(np.ones((3, 3, 20)), TRAINED, 0.95).first_wins == 1


def test_prompts_needed_are_the_fewest_with_which_the_difference_is_visible():
    draw = np.random.default_rng(1)
    for shape in ((1, 1, 40), (3, 3, 40)):
        values = 0.2 + draw.normal(0, 1, shape) + 0.01 * draw.normal(0, 1, (*shape[:2], 1))
        found = sources_of(values)
        needed = power_of(values, TRAINED, 0.95).prompts
        visible = [found.with_prompts(n).visible(0.95) for n in (needed - 1, needed)]
        assert visible[0] > abs(values.mean()) >= visible[1], shape
        same = found.with_prompts(40)
        assert same.visible(0.95) == pytest.approx(found.visible(0.95)), "the present number changes nothing"
    by_seed = np.array([-1.0, 1.0]).reshape(2, 1, 1) + 0.1 + 0.01 * draw.normal(0, 1, (2, 1, 40))
    assert power_of(by_seed, (True, False), 0.95).prompts is None, "seeds alone limit it"


def test_seeds_needed_are_the_fewest_with_which_the_difference_is_visible():
    """With 8 seeds instead of 2, the seeds' variance of the mean is a quarter, with 7 degrees of freedom."""
    rng = np.random.default_rng(0)
    values = simulated(rng, (3, 3), spread=(0.05, 0.05), noise=0.3, difference=0.15)
    needed = power_of(values, TRAINED, 0.95).seeds
    visible = [sources_of(values).with_seeds(n).visible(0.95) for n in (needed - 1, needed)]
    assert visible[0] > values.mean() >= visible[1] and 3 < needed < 30
    before = sources_of(values[:2, :2])
    after = sources_of(values[:2, :2]).with_seeds(8)
    assert after.variances[:2] == pytest.approx(before.variances[:2] / 4) and after.freedom.tolist() == [7, 7, 63]
    assert after.variances[2] == before.variances[2]
    limited = rng.normal(0.01, 1, (1, 1, 64)) + simulated(rng, (3, 3))
    assert power_of(limited / 100, TRAINED, 0.95).seeds is None, "prompts alone limit it"


def binary(rng, seeds: int, spread: float, difference: float) -> np.ndarray:
    """Return gaps (S, S, 64) of two groups with four 0/1 rewards per prompt. Pass rates of prompts are uniform. A
    seed moves all of them towards 1 or 0, and their mean by its normal effect."""
    rates = rng.uniform(0, 1, 64)
    sides = []
    for mean in (difference, 0.0):
        effects = rng.normal(mean, spread, (seeds, 1))
        moved = rates + effects * np.where(effects > 0, 1 - rates, rates) / 0.5
        sides.append(rng.binomial(4, moved.clip(0, 1)) / 4)
    return sides[0][:, None] - sides[1][None]


def found_at_visible(rng, seeds: int, rewards: str, trials: int) -> float:
    """Return the share of new comparisons that find a true difference of the median `visible`."""

    def gaps(difference):
        if rewards == "0/1":
            return binary(rng, seeds, 0.05, difference)
        return simulated(rng, (seeds, seeds), spread=(0.05, 0.05), noise=0.5, of_prompts=0.3, difference=difference)

    visible = np.median([sources_of(gaps(0.1)).visible(0.95) for _ in range(trials)])
    return np.mean([with_seeds(gaps(visible), 0).excludes(0) for _ in range(trials)])


def test_about_80_percent_of_comparisons_find_the_visible_difference():
    """Standard error of 400 trials: 2 points."""
    assert 0.72 < found_at_visible(np.random.default_rng(0), 3, "0/1", 400) < 0.88


@pytest.mark.proof
@pytest.mark.parametrize("rewards", ["normal", "0/1"])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_share_that_finds_the_visible_difference_by_seeds_and_rewards(seeds, rewards):
    """About 80% with three or more seeds. With two seeds the variances are too uncertain: 65% or more. A difference
    that 0/1 rewards cannot have is not found more often."""
    share = found_at_visible(np.random.default_rng(1), seeds, rewards, 5000)
    print(f"{seeds} seeds, {rewards} rewards: {share:.1%} find the visible difference")
    assert (0.75 if seeds > 2 else 0.6) < share < 0.87


def won_by_new_runs(rng, seeds: int, trials: int) -> tuple[float, float, int]:
    """Return the mean of `first_wins` between 0.7 and 0.9, the share of new runs that win then, and their number.
    True differences have the standard deviation 0.2, seeds 0.1."""
    stated = []
    won = []
    for _ in range(trials):
        difference = rng.normal(0, 0.2)
        gaps = simulated(rng, (seeds, seeds), noise=0.3, difference=difference)
        stated.append(power_of(gaps, TRAINED, 0.95).first_wins)
        won.append(difference + rng.normal(0, 0.1) > rng.normal(0, 0.1))
    inside = (np.array(stated) > 0.7) & (np.array(stated) < 0.9)
    return np.mean(np.array(stated)[inside]), np.mean(np.array(won)[inside]), int(inside.sum())


def test_new_runs_win_about_as_often_as_stated():
    """With a tolerance of three standard errors, 0.15."""
    stated, won, count = won_by_new_runs(np.random.default_rng(0), 3, 200)
    assert abs(stated - won) < 3 * np.sqrt(0.16 / count)


@pytest.mark.proof
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_new_runs_win_as_often_as_stated_by_seeds(seeds):
    stated, won, count = won_by_new_runs(np.random.default_rng(1), seeds, 5000)
    print(f"{seeds} seeds: stated {stated:.1%}, new runs won {won:.1%} of {count}")
    assert abs(stated - won) < 0.08


@pytest.mark.parametrize(("values", "trained"), [((3, 3), TRAINED), ((1, 3), (False, True)), ((1, 1), (False, False))])
def test_contrast_of_groups_and_baselines_on_either_side(values, trained):
    """The power is that of the differences between the means of prompts, at the level of the contrast."""
    rng = np.random.default_rng(0)
    sides = [[evaluation_of(rng.normal(0, 1, (9, 2))) for _ in range(n)] for n in values]
    one, other = (SimpleNamespace(name=name, measured=side, trained=is_trained)
                  for name, side, is_trained in zip("AB", sides, trained, strict=True))  # fmt: skip
    gaps = np.array([[a.scores.mean(1) - b.scores.mean(1) for b in sides[1]] for a in sides[0]])
    found = contrast(one, other, "score", 1, 0.9)
    assert (found.name, found.over) == ("A - B", "seeds and prompts" if any(trained) else "prompts")
    assert found.power == power_of(gaps, trained, 0.9) and found.power.visible > 0


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.1, 0.9, 0.5, 0.2], [(4, "WORST"), (1, "BEST"), (2, "MEDIUM"), (3, "MEDIUM")]),
        ([1.0, 1.0, 0.5, 0.0], [(1, "BEST"), (1, "BEST"), (3, "MEDIUM"), (4, "WORST")]),
        ([1.0, 0.0, 0.0], [(1, "BEST"), (2, "WORST"), (2, "WORST")]),
        ([2.0, 2.0], [(1, "EQUAL"), (1, "EQUAL")]),
        ([7.0], [(1, "BEST")]),
    ],
)
def test_ranks_with_ties_and_with_one_completion(scores, expected):
    assert ranks(scores) == expected


def test_correlation_is_a_rank_correlation():
    assert correlation([1, 2, 3, 100], [5, 6, 70, 80]) == pytest.approx(1.0)
    assert correlation([1, 1, 1], [1, 2, 3]) is None


# --- the completions of a prompt -------------------------------------------------------------------------------------


@given(st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_completion(data):
    n = data.draw(st.integers(1, 9))
    right = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(right, k))
    assert pass_at_k(n, sum(right), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 3 of the 6 pairs contain the right one
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert pass_at_k(3, 0, 3) == 0.0
    assert pass_at_k(3, 1, 3) == pass_at_k(1, 1, 1) == 1.0


def test_pass_at_k_of_many_completions_does_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)  # C(10000, 5000) is about 1e3008


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_refuses_impossible_numbers(n, c, k):
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(n, c, k)


def test_attempts_are_powers_of_two_and_n():
    assert [attempts(n) for n in (1, 2, 4, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8]]


TWO_OF_EIGHT = [1.0, 1.0, *[0.0] * 6]


def test_learning_signal_by_hand():
    assert learning_signal(TWO_OF_EIGHT) == pytest.approx(2 * 6 / (8 * 7))  # c (n - c) / (n (n - 1))
    assert learning_signal([0.0] * 8) == 0
    # mean 0.875, deviations three times -0.375 and 1.125: (3 x 0.140625 + 1.265625) / 3
    assert learning_signal([0.5, 0.5, 0.5, 2.0]) == pytest.approx(0.5625)


def test_groups_without_a_difference_by_hand():
    """C(2, 4) = 0, C(6, 4) = 15, C(8, 4) = 70; C(2, 2) = 1, C(6, 2) = 15, C(8, 2) = 28."""
    assert no_difference(TWO_OF_EIGHT, 4) == pytest.approx(15 / 70)
    assert no_difference(TWO_OF_EIGHT, 2) == pytest.approx(16 / 28)
    assert all_equal_to(TWO_OF_EIGHT, 1.0, 2) == pytest.approx(1 / 28)
    assert all_equal_to(TWO_OF_EIGHT, 0.0, 2) == pytest.approx(15 / 28)
    assert no_difference([0.5, 0.5, 0.5, 2.0], 2) == pytest.approx(3 / 6)
    assert no_difference([0.5, 0.5, 0.5, 2.0], 4) == 0


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_estimates_are_unbiased(p):
    """The mean over all 2^5 outcomes of five completions, weighted by their probability, is the true value."""
    outcomes = list(itertools.product([0.0, 1.0], repeat=5))
    weights = [prod(p if score else 1 - p for score in outcome) for outcome in outcomes]

    def mean_of(estimate):
        return sum(weight * estimate(outcome) for weight, outcome in zip(weights, outcomes, strict=True))

    assert mean_of(learning_signal) == pytest.approx(p * (1 - p))
    for size in (2, 3, 5):
        assert mean_of(lambda scores, size=size: no_difference(scores, size)) == pytest.approx(
            p**size + (1 - p) ** size
        )
        assert mean_of(lambda scores, size=size: all_equal_to(scores, 0.0, size)) == pytest.approx((1 - p) ** size)

"""Tests the limit of the score over the KL, and best-of-n, by enumeration of a vocabulary and hand-worked values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlhf.analysis import limit
from rlhf.analysis.limit import (
    Limit,
    best_of_blocks,
    best_of_n,
    best_scores,
    jackknife,
    kl_of_passes,
    limit_of,
    log_partition,
)

NAN = float("nan")
COMPLETIONS = 200
TILTS = np.geomspace(1e-3, 60, 300)  # 1 / beta


def world(rng: np.random.Generator, prompts: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the start model's probabilities and the scores of all completions of each prompt (P, V)."""
    shape = (prompts, COMPLETIONS)
    start = rng.dirichlet(np.ones(COMPLETIONS), prompts)
    if kind == "0/1":
        return start, (rng.random(shape) < rng.beta(0.5, 1, (prompts, 1))).astype(float)
    if kind == "normal":
        return start, rng.normal(rng.normal(size=(prompts, 1)), rng.uniform(0.5, 1.5, (prompts, 1)), shape)
    return start, rng.normal(0, 0.3, shape) + 2 * (rng.random(shape) < 0.05)  # "rare"


def tilted(start: np.ndarray, scores: np.ndarray, inverse_beta: np.ndarray | float) -> np.ndarray:
    weights = start * np.exp(inverse_beta * scores)
    return weights / weights.sum(axis=1, keepdims=True)


def of_best_of(start: np.ndarray, scores: np.ndarray, n: int) -> np.ndarray:
    """Returns the probabilities of best-of-n: the completion at score s has F(s)^n - F(s-)^n, F its distribution."""
    found = np.empty_like(start)
    for policy, probability, score in zip(found, start, scores, strict=True):
        upto, lower = (
            (probability * compare(score, score[:, None])).sum(axis=1) for compare in (np.less_equal, np.less)
        )
        policy[:] = (upto**n - lower**n) * probability / (upto - lower)
    return found


def score_and_kl(start: np.ndarray, policy: np.ndarray, scores: np.ndarray) -> tuple[float, float]:
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = np.nansum(policy * np.log(policy / start), axis=1)  # 0 log 0 = 0
    return float((policy * scores).sum(axis=1).mean()), float(kl.mean())


def mean_log_z(scores: np.ndarray, log_weights: np.ndarray, tilts: np.ndarray = TILTS) -> np.ndarray:
    return np.array([log_partition(scores, log_weights, tilt).mean() for tilt in tilts])


def exact(start: np.ndarray, scores: np.ndarray, kl: np.ndarray) -> np.ndarray:
    """Returns the limit of the whole vocabulary at each KL."""
    return best_scores(mean_log_z(scores, np.log(start)), TILTS, kl)[0]


@pytest.mark.parametrize("kind", ["0/1", "normal", "rare"])
def test_no_policy_is_above_the_exact_limit(kind):
    rng = np.random.default_rng(0)
    start, scores = world(rng, 4, kind)
    others = [rng.dirichlet(np.full(COMPLETIONS, size), 4) for size in (0.01, 0.1, 1, 10)]
    others += [tilted(start, scores, rng.uniform(0, 4, (4, 1))) for _ in range(20)]
    others += [tilted(start, scores + rng.normal(size=scores.shape), tilt) for tilt in (0.1, 1, 5)]
    others += [of_best_of(start, scores, n) for n in (1, 2, 4, 16, 64)]
    found, kl = np.transpose([score_and_kl(start, policy, scores) for policy in others])
    assert (found <= exact(start, scores, kl) + 1e-9).all()


@pytest.mark.parametrize("kind", ["0/1", "normal", "rare"])
def test_tilted_policies_reach_the_exact_limit(kind):
    start, scores = world(np.random.default_rng(1), 4, kind)
    found, kl = np.transpose([score_and_kl(start, tilted(start, scores, tilt), scores) for tilt in TILTS[100:250:25]])
    assert exact(start, scores, kl) == pytest.approx(found, abs=1e-9)


def test_limit_of_01_rewards_is_the_closed_form_of_the_pass_rates():
    """Pass rates 0.1 and 0.5, e^(1 / beta) = 9: q = 0.9 / 1.8 = 0.5 and 4.5 / 5 = 0.9, so the score is 0.7. KLs:
    0.5 log 5 + 0.5 log(5/9) = 0.51083 and 0.9 log 1.8 + 0.1 log 0.2 = 0.36806."""
    passed, weights = np.array([[0.0, 1.0]] * 2), np.log([[0.9, 0.1], [0.5, 0.5]])
    tilts = np.log([3.0, 9.0, 27.0])
    score, index = best_scores(mean_log_z(passed, weights, tilts), tilts, np.array([(0.51083 + 0.36806) / 2]))
    assert (score, index) == (pytest.approx(0.7, abs=1e-5), 1)


@pytest.mark.parametrize("weighted", [False, True])
def test_jackknife_is_the_one_that_deletes_each_sample(weighted):
    rng = np.random.default_rng(2)
    scores, weights = rng.normal(size=(3, 6)), rng.normal(size=(3, 6)) * weighted
    whole = log_partition(scores, weights, 1.5)
    without = np.array([log_partition(*(np.delete(x, i, axis=1) for x in (scores, weights)), 1.5) for i in range(6)])
    variance = 5 / 6 * ((without - without.mean(axis=0)) ** 2).sum(axis=0)
    tilt = np.exp(weights + 1.5 * scores)
    effective = 3 / ((tilt**2).sum(axis=1) / tilt.sum(axis=1) ** 2).sum()
    expected = (6 * whole - 5 * without.mean(axis=0)).mean(), np.sqrt(variance.sum()) / 3, effective
    assert jackknife(scores, weights, 1.5) == pytest.approx(expected)


def mixed(rng, start: np.ndarray, proposals: list[np.ndarray], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns n completions of each proposal and prompt (P, n x proposals) and their log weights."""
    drawn = [[rng.choice(COMPLETIONS, n, p=row) for row in policy] for policy in proposals]
    completions = np.concatenate(drawn, axis=1)
    log_weights = np.log(start) - np.log(np.mean(proposals, axis=0))
    return completions, np.take_along_axis(log_weights, completions, axis=1)


def simulated(kind: str, n: int, mixture: bool, repetitions: int, prompts: int = 32) -> np.ndarray:
    """Returns means over repetitions, at a quarter of the line's KL and at its end (4, 2): the KL, the error of the
    score before and after the correction (share of the exact gain), and whether the interval has the exact score.

    The proposals of a mixture are the start model and its tilted policies of 1 / beta = 1 and 2.
    """
    rng = np.random.default_rng(3)
    start, scores = world(rng, prompts, kind)
    at, first = np.array([30, 60]), (start * scores).sum(axis=1).mean()
    log_z, results = mean_log_z(scores, np.log(start)), []
    for _ in range(repetitions):
        proposals = [start] + [tilted(start, scores, tilt) for tilt in (1, 2)] * mixture
        completions, log_weights = mixed(rng, start, proposals, n)
        drawn = np.take_along_axis(scores, completions, axis=1)
        found = limit_of(drawn, log_weights)
        kl = found.kl[at]
        true = best_scores(log_z, TILTS, kl)[0]
        plain = best_scores(mean_log_z(drawn, log_weights), TILTS, kl)[0]
        errors = [(score - true) / (true - first) for score in (plain, found.score[at])]
        results.append([kl, *errors, (found.low[at] <= true) & (true <= found.high[at])])
    return np.mean(results, axis=0)


@pytest.mark.parametrize(("kind", "mixture"), [("0/1", False), ("normal", False), ("normal", True)])
def test_correction_removes_bias_and_intervals_hold(kind, mixture):
    _, before, after, covered = simulated(kind, 64, mixture, 12, prompts=16)
    assert before[1] < 0 and abs(after[1]) < min(0.03, abs(before[1])) and (covered >= 9 / 12).all()


@pytest.mark.proof
@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("n", [16, 64, 256])
@pytest.mark.parametrize("kind", ["0/1", "normal", "rare"])
def test_bias_and_coverage_over_n(kind, n, mixture, monkeypatch, capsys):
    """With 16 samples, the smallest effective sample size is 8 for this test."""
    monkeypatch.setattr(limit, "EFFECTIVE", 8 if n == 16 else 20)
    kl, before, after, covered = np.round(simulated(kind, n, mixture, 60), 3)
    with capsys.disabled():
        print(f"\n{kind} n={n} {mixture=}: KL {kl}, bias before {before}, after {after}, coverage {covered}")
    assert (abs(after) < 0.04).all() and abs(after[1]) < abs(before[1]) + 0.005 and (covered >= 0.85).all()


def test_line_begins_at_the_mean_of_the_samples_and_rises():
    drawn = np.random.default_rng(4).normal(size=(64, 128))
    found = limit_of(drawn)
    assert found.score[0] == found.at(0) == pytest.approx(drawn.mean())
    assert found.effective[0] == pytest.approx(128, rel=0.01) and found.effective[-1] >= 20
    assert (np.diff(found.score) > 0).all() and (np.diff(found.score) / np.diff(found.kl) > 0).all()


def test_limit_of_normal_scores_grows_with_the_root_of_the_kl():
    """Tilting N(0, 1) by e^(r / beta) gives N(1 / beta, 1): KL = 1 / (2 beta^2), so the score is sqrt(2 KL)."""
    found = limit_of(np.random.default_rng(5).normal(size=(100, 256)))
    assert found.score[20:] == pytest.approx(np.sqrt(2 * found.kl[20:]), abs=0.03) and found.kl[-1] > 0.5


def test_a_prompt_with_a_missing_score_is_ignored():
    scores = np.random.default_rng(6).normal(size=(4, 64))
    torn = np.vstack([scores, np.r_[NAN, scores[0, 1:]]])
    assert limit_of(torn).score == pytest.approx(limit_of(scores).score, abs=0)
    assert limit_of(np.full((2, 4), NAN)) is None


def test_few_samples_and_equal_scores_have_no_line_beyond_kl_0():
    few = limit_of(np.random.default_rng(7).normal(size=(4, 16)))
    assert few.kl.tolist() == [0] and few.low[0] < few.score[0] < few.high[0] and few.at(0.01) is None
    same = limit_of(np.full((4, 64), 0.5))
    assert same.kl.tolist() == [0] and same.at(0) == 0.5 and same.share(0.5, 0.6, 0) is None
    for samples in (1, 2):
        assert limit_of(np.zeros((3, samples))).score.tolist() == [0]
    passes = limit_of(np.array([[0.0, 1.0] * 8]))
    assert passes.exact and passes.kl[-1] > 0.1, "0/1 rewards: half of 16 samples is enough"


def test_share_and_score_of_a_line():
    line = np.array([0.0, 1.0])
    found = Limit(line, 0.2 + 0.4 * line, 0.1 + 0.4 * line, 0.3 + 0.4 * line, 64, False, line)
    assert (found.at(0.5), found.at(-0.1), found.at(1.0)) == pytest.approx((0.4, 0.2, 0.6))
    assert found.share(0.2, 0.3, 0.5) == pytest.approx(0.5), "0.1 of 0.2"
    assert found.share(0.2, 0.1, 0.5) == pytest.approx(-0.5)
    assert [found.at(1.01), found.at(NAN), found.share(0.2, 0.3, 1.01)] == [None] * 3
    assert found.share(0.2, 0.3, 0.1) is None, "the interval 0.14 to 0.34 contains the start model's 0.2"
    assert dataclasses.replace(found, low=found.score).share(0.2, 0.3, 0.1) == pytest.approx(2.5)


def test_best_of_n_matches_hand_computed_values():
    """N = 3, scores 1, 2, 2. The choices of 2: {1, 2} twice, and {2, 2}, where both have the same chance. The judge
    gives the chosen ones 20, 40 and (20 + 40) / 2."""
    found = best_of_n(np.array([[2.0, 1.0, 2.0], [0.0, NAN, 9.0]]), {"judge": np.array([[20.0, 10.0, 40.0]] * 2)})
    assert found.measures["score"] == pytest.approx([5 / 3, 2, 2])
    assert found.measures["judge"] == pytest.approx([70 / 3, 30, 30])
    assert not found.exact and found.kl == pytest.approx([0, np.log(2) - 1 / 2, np.log(3) - 2 / 3])


def test_best_of_n_is_the_mean_over_prompts():
    found = best_of_n(np.array([[0.0, 1.0], [5.0, 5.0]]), {"judge": np.array([[3.0, 1.0], [0.0, 2.0]])})
    assert found.measures["score"].tolist() == [2.75, 3] and found.measures["judge"].tolist() == [1.5, 1]


def test_worth_is_the_smallest_n_that_reaches_a_value():
    found = best_of_n(np.array([[0.0, 1.0, 2.0, 3.0]]), {"judge": np.array([[3.0, 2.0, 1.0, 0.0]])})
    assert found.measures["score"] == pytest.approx([3 / 2, 7 / 3, 11 / 4, 3])
    assert [found.worth("score", value) for value in (-1, 1.5, 1.6, 2.75, 3.1, NAN)] == [1, 1, 2, 3, None, None]
    assert [found.worth("judge", value) for value in (1.5, 1.6)] == [1, None], "the judge falls with n"
    assert best_of_n(np.full((2, 3), NAN), {"judge": np.zeros((2, 3))}) is None


def test_kl_of_best_of_n_matches_hand_computed_values():
    """p = 0.5, n = 2: q = 0.75, KL = 0.75 log 1.5 + 0.25 log 0.5 = 0.130812. From one pass of two samples: without one
    of them, p is 0 or 1 and the KL is 0, so the jackknife gives 2 x 0.130812."""
    assert kl_of_passes(np.array([1.0]), 2) == pytest.approx([0, 0.261624], abs=1e-6)
    many = best_of_n(np.tile([0.0, 1.0], (1, 500)), {})
    assert many.exact and many.kl[:2] == pytest.approx([0, 0.130812], abs=1e-3)
    assert best_of_n(np.array([[0.0] * 4, [1.0] * 4]), {}).kl.tolist() == [0] * 4


def test_kl_of_best_of_n_from_few_samples_has_no_bias():
    """Pass rate 0.3, 16 samples, n = 4: without the correction, the mean is 4% too low."""
    p, q = 0.3, 1 - 0.7**4
    passes = np.random.default_rng(8).binomial(16, p, 20_000)
    true = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    assert kl_of_passes(passes, 16)[3] == pytest.approx(true, rel=0.01)


def test_best_of_blocks_are_the_first_best_completions():
    scores = np.array([[1.0, 3.0, 3.0, 0.0, 9.0], [NAN, NAN, NAN, 2.0, 9.0]])
    assert best_of_blocks(scores, 2).tolist() == [[1, 2], [0, 3]]
    assert best_of_blocks(scores, 1).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert best_of_blocks(scores, 6).shape == (2, 0)

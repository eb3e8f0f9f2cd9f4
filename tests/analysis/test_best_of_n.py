"""Tests best-of-n by hand-worked values."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf.analysis.best_of_n import best_of_blocks, best_of_n, kl_of_passes

NAN = float("nan")


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
    values = np.array([-1, 1.5, 1.6, 2.75, 3.1, NAN])[:, None]
    assert [found.worth("score", value) for value in values] == [1, 1, 2, 3, 5, None]
    assert [found.worth("judge", value) for value in values[1:3]] == [1, 5], "the judge falls with n"
    assert best_of_n(np.full((2, 3), NAN), {"judge": np.zeros((2, 3))}) is None


def test_worth_is_over_the_prompts_that_both_have_a_score_on():
    """Prompt 1 alone has scores of both. The arm's 9 and the start model's 7 on the other ones count for neither."""
    found = best_of_n(np.array([[7.0, 7.0, 7.0], [0.0, 1.0, 2.0], [NAN, 7.0, 7.0]]), {})
    assert found.by_prompt["score"][1] == pytest.approx([1, 5 / 3, 2])
    assert found.measures["score"] == pytest.approx([4, 13 / 3, 9 / 2])
    assert [found.worth("score", np.array([NAN, value, 9.0])) for value in (1, 1.5, 2, 2.5)] == [1, 2, 3, 4]
    assert found.worth("score", np.array([NAN, NAN, 9.0])) is None


def test_kl_of_best_of_n_matches_hand_computed_values():
    """p = 0.5, n = 2: q = 0.75, KL = 0.75 log 1.5 + 0.25 log 0.5 = 0.130812. From one pass of two samples: without one
    of them, p is 0 or 1 and the KL is 0, so the jackknife gives 2 x 0.130812."""
    assert kl_of_passes(np.array([1.0]), 2) == pytest.approx([0, 0.261624], abs=1e-6)
    many = best_of_n(np.tile([0.0, 1.0], (1, 500)), {})
    assert many.exact and many.kl[:2] == pytest.approx([0, 0.130812], abs=1e-3)
    assert best_of_n(np.array([[0.0] * 4, [1.0] * 4]), {}).kl.tolist() == [0] * 4


def test_kl_of_best_of_n_from_few_samples_has_no_bias():
    """Pass rate 0.3, 16 samples, n = 4: without the correction, the mean is 4% too low."""
    p = 0.3
    q = 1 - 0.7**4
    passes = np.random.default_rng(8).binomial(16, p, 20_000)
    true = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    assert kl_of_passes(passes, 16)[3] == pytest.approx(true, rel=0.01)


def test_best_of_blocks_are_the_first_best_completions():
    scores = np.array([[1.0, 3.0, 3.0, 0.0, 9.0], [NAN, NAN, NAN, 2.0, 9.0]])
    assert best_of_blocks(scores, 2).tolist() == [[1, 2], [0, 3]]
    assert best_of_blocks(scores, 1).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert best_of_blocks(scores, 6).shape == (2, 0)

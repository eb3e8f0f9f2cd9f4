"""Tests figures, statistics and tables of completions without a score, which are NaN: no function applies to them."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest

from rlhf.analysis import audit
from rlhf.analysis.audit import figures, without_score
from rlhf.analysis.equal_budget import at_equal
from rlhf.analysis.verdict import Arm, contrast
from rlhf.reports.comparison_report import not_compared
from rlhf.trainer.evaluation import Evaluation
from rlhf.utils.statistics import over_prompts, over_seeds, per_prompt, win_rates
from tests.analysis.test_equal_budget import eval_point
from tests.analysis.test_verdict import group, judge_runs
from tests.evaluations import evaluation_of

NAN = np.nan


@pytest.fixture(autouse=True)
def no_warnings():
    """NumPy warns about the mean of nothing, which would be printed between the tables."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def made(scores, judged=None) -> Evaluation:
    """Return an evaluation with these scores and ratings of the judge "f"."""
    return evaluation_of(scores, {} if judged is None else {"f": judged})


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_figures_leave_out_completions_without_a_score():
    found = figures(made([[1, 3], [NAN, NAN], [2, NAN]], judged=[[NAN, NAN]] * 3))
    assert (found["score"], found["score_of_best"], found["score_of_worst"]) == (2, 2.5, 1.5)
    assert found["score_sd"] == pytest.approx(1.0) and found["judge"] is None and found["length"] == 5
    none = figures(made([[NAN, NAN]] * 3))
    assert [none[name] for name in ("score", "score_sd", "score_of_best")] == [None] * 3
    assert none["score_length_correlation"] is None and none["distinct_2"] == 3 / 18


def test_paired_differences_leave_out_prompts_without_a_score():
    """Only prompts 1 and 3 have a score of both models: differences 2 - 0 and 4 - 1."""
    this = made([[1, 3], [5, 5], [4, NAN]])
    other = made([[0, 0], [NAN, NAN], [1, 1]])
    found, nothing = (
        contrast(group("PPO", this), Arm("other", [of]), "score", 1) for of in (other, made([[NAN, NAN]] * 3))
    )
    assert found.difference.value == 2.5 and found.win_rate.value == 1.0
    assert np.isnan([nothing.difference.value, nothing.win_rate.value]).all() and nothing.result == "unknown"
    assert audit.warnings(this, made([[NAN, NAN]] * 3), seed=1) == []


def test_judge_that_rates_few_prompts():
    """The score rose on all 20 prompts. A judge that rated one of them has no interval, so there is no warning; with
    two prompts, the warning counts them."""

    def results(score, rating, prompts):
        ratings = np.where(np.arange(20)[:, None] < prompts, rating, NAN)
        return made(np.full((20, 1), score) + np.arange(20)[:, None] % 3, ratings)

    for prompts, counted in ((1, []), (2, [True])):
        found = audit.warnings(results(5.0, 0.0, prompts), results(0.0, 0.0, prompts), seed=1)
        assert ["on 2 prompts the judge's rating" in text for text in found] == counted


def test_counts_of_completions_and_prompts_without_a_score():
    this = made([[1, 3], [5, 5], [4, NAN]], [[0, 0]] * 3)
    other = made([[0, 0], [NAN, NAN], [1, 1]], [[0, 0]] * 3)
    assert without_score([this, other]) == [
        "3 of 12 completions have no score, because no function applies to them. 1 of 3 prompts are left out of "
        "comparisons: a model has no score for them"
    ]
    unrated = made([[1, 1]] * 3, [[NAN, 1]] * 3)
    (line,) = without_score([unrated])
    assert line.startswith("3 of 6 completions have no rating by f") and "0 of 3 prompts are left out" in line
    assert without_score([made([[1, 2]])]) == []


def test_groups_are_compared_on_the_prompts_that_all_runs_scored():
    rng = np.random.default_rng(1)
    whole = [rng.normal(shift, 1, (12, 3)) for shift in (0, 0.1, 1, 1.1)]
    holes = [scores.copy() for scores in whole]
    holes[0][4], holes[2][7], holes[3][:, 0] = NAN, NAN, NAN  # two prompts, and one completion of every prompt
    kept = [i for i in range(12) if i not in (4, 7)]
    subset = [scores[kept] for scores in (whole[0], whole[1], whole[2], holes[3])]
    found, expected = (
        contrast(group("PPO", *map(made, scores[:2])), group("GRPO", *map(made, scores[2:])), "score", 1)
        for scores in (holes, subset)
    )
    assert found == expected and np.isfinite(found.difference.low)


def test_verdict_without_a_common_prompt():
    """Each model has scores for other prompts, so nothing can be compared."""
    first = made([[1, 1], [NAN, NAN]])
    second = made([[NAN, NAN], [1, 1]])
    groups = [group("PPO", first, first), group("GRPO", second, second)]
    verdict = judge_runs(groups, made([[0, 0], [0, 0]]), None, 1)
    pair, ppo, grpo = verdict.sentences
    assert pair.startswith("PPO cannot be compared with GRPO by score (the training reward): no prompt has a score")
    assert ppo.startswith("PPO is not comparable with the start model by score: only one prompt has a score")
    assert all("significant" not in sentence for sentence in verdict.sentences) and grpo.startswith(
        "GRPO is not comparable"
    )


def test_a_judge_without_ratings_has_no_scores_to_miss():
    """The sentence and the reason at equal budgets name ratings."""
    pair = [group("PPO", made([[1, 1]], [[NAN, NAN]])), Arm("other", [made([[0, 0]], [[NAN, NAN]])])]
    by_judge, by_score = (contrast(*pair, measure, 1).text for measure in ("judge", "score"))
    assert "rating" in by_judge and "score" not in by_judge and "score" in by_score
    points = {"PPO": [[eval_point(2, 5, (1,), "a")]], "GRPO": [[eval_point(2, 5, (0,), "a")]]}
    rows = at_equal(points, lambda rows: np.full(len(rows), NAN), seed=1)
    assert "rating" in rows[0]["differences"][0]["missing"]


def test_equal_budgets_leave_out_completions_without_a_score():
    ppo, grpo = (eval_point(2, 5, scores, "abc") for scores in ((1, None, 2), (0, 7, 1)))
    rows = at_equal({"PPO": [[ppo]], "GRPO": [[grpo]]}, None, seed=1)
    assert rows[0]["differences"][0]["value"] == ((1 - 0) + (2 - 1)) / 2
    alone = at_equal({"PPO": [[eval_point(2, 5, (1,), "a")]], "GRPO": [[eval_point(2, 5, (0,), "a")]]}, None, seed=1)
    assert not_compared(alone)[0].endswith("only one prompt has a score in every run of PPO and GRPO")
    none = at_equal({"PPO": [[eval_point(2, 5, (1, None))]], "GRPO": [[eval_point(2, 5, (None, 7))]]}, None, seed=1)
    assert not_compared(none)[0].endswith("no prompt has a score in every run of PPO and GRPO")
    rated = at_equal({"PPO": [[ppo]], "GRPO": [[grpo]]}, lambda rows: np.array([NAN, len(rows), 5]), seed=1)
    assert rated[0]["differences"][0]["by"] == "judge"


# --- nothing changes without missing scores --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(20, 4), (128, 4), (7, 1), (33, 9)])
def test_figures_without_missing_scores_are_bit_identical_to_plain_means(shape):
    """The plain NumPy expressions are the definitions. Equality is exact."""
    rng = np.random.default_rng(0)
    a = rng.normal(0.3, 1, shape)
    b = rng.normal(0, 1, shape)
    one = made(a, a * 2)
    other = made(b, b * 3)
    found = figures(one)
    assert found["score"] == a.mean() and found["score_sd"] == a.std(ddof=1)
    assert found["score_of_best"] == a.max(axis=1).mean() and found["score_of_worst"] == a.min(axis=1).mean()
    assert found["judge"] == (a * 2).mean()
    assert np.array_equal(per_prompt(a), a.mean(axis=1))
    wins = ((a[:, :, None] > b[:, None, :]) + 0.5 * (a[:, :, None] == b[:, None, :])).mean(axis=(1, 2))
    assert np.array_equal(win_rates(a, b), wins)
    by = {m: contrast(group("PPO", one), Arm("other", [other]), m, 3) for m in ("score", "judge")}
    assert by["score"].difference == over_prompts(a.mean(axis=1) - b.mean(axis=1), 3)
    assert by["judge"].difference == over_prompts((a * 2).mean(axis=1) - (b * 3).mean(axis=1), 3)
    assert by["score"].win_rate == over_prompts(wins, 3, (0.0, 1.0))
    two = [one, dataclasses.replace(one, scores=a + 0.1)]
    gaps = np.array([[x.scores.mean(axis=1) - b.mean(axis=1)] for x in two])
    assert (
        contrast(group("PPO", *two), Arm("other", [other]), "score", 3).difference
        == over_seeds(gaps, 3, (True, False))[0]
    )

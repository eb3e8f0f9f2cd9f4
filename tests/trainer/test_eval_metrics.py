"""Tests of the metrics of evaluation functions. Expected values are worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhf.callbacks.samples import Samples
from rlhf.checkpoints.best import Candidate, choose
from rlhf.run.figures import compare
from rlhf.trainer.evaluation import Evaluation, figures_of, shown, tag_of
from rlhf.utils.files import write_json
from rlhf.utils.statistics import over_prompts
from tests.trainer.test_evaluation import evaluation, prompts

NAN = np.nan


def test_value_is_the_mean_over_prompts_and_its_interval_is_that_of_the_prompts_means():
    """Prompt means 1, 0.5, none, 0: mean 0.5 (the mean over the five completions is 0.4)."""
    figures = figures_of(np.array([[1, NAN], [1, 0], [NAN, NAN], [0, 0]]), seed=3)
    assert figures["value"] == 0.5
    expected = over_prompts([1.0, 0.5, 0.0], 3, (0.0, 1.0))
    assert (figures["low"], figures["high"]) == (expected.low, expected.high)
    assert figures["pass_at_1"] == figures["value"], "of the prompts with at least one value"
    assert figures["pass_at_2"] == 0.5, "of the prompts with two values: 1 of 2 and 0 of 2 right"


def test_pass_at_k_of_four_samples():
    """Prompts with 1, 0 and 4 right of 4. pass@2 of the first: 3 of 6 pairs."""
    figures = figures_of(np.array([[0.0, 1.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4]), seed=0)
    assert list(figures) == ["value", "low", "high", "pass_at_1", "pass_at_2", "pass_at_4"]
    assert figures["pass_at_1"] == pytest.approx(1.25 / 3) == pytest.approx(figures["value"])
    assert figures["pass_at_2"] == pytest.approx(1.5 / 3)
    assert figures["pass_at_4"] == pytest.approx(2 / 3)


def test_pass_at_k_only_of_several_samples_with_values_0_and_1():
    assert set(figures_of(np.array([[0.0], [1.0], [0.0], [1.0]]), 0)) == {"value", "low", "high"}
    assert set(figures_of(np.array([[0.0, 0.5], [0.0, 1.0]]), 0)) == {"value", "low", "high"}
    found = set(figures_of(np.array([[NAN, 1.0], [0.0, NAN]]), 0))
    assert found == {"value", "low", "high", "pass_at_1"}, "no prompt has two values"


def test_one_prompt_has_no_interval_and_no_value_gives_no_metric():
    assert figures_of(np.array([[2.0, 3.0]]), 0) == {"value": 2.5}
    assert figures_of(np.array([[NAN, NAN]]), 0) == {} and shown({}) == "no value"


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_interval_of_equal_answers_has_a_width_within_0_and_1(value):
    figures = figures_of(np.full((20, 1), value), 0)
    assert figures["value"] == value
    assert 0 <= figures["low"] < figures["high"] <= 1


def test_tags_and_words():
    assert [tag_of("right", key) for key in ("value", "low", "pass_at_4")] == [
        "eval/right",
        "eval/right/low",
        "eval/right/pass_at_4",
    ]
    assert shown(
        {"value": 0.25, "low": 0.1, "high": 0.5, "pass_at_1": 0.25, "pass_at_16": 0.75, "pass_at_8": 0.5}
    ) == ("0.250 (0.100 to 0.500), pass@16 0.750")


def test_completions_without_a_score_are_left_out_of_means_topics_and_samples():
    result = evaluation([[1.0], [None], [3.0], [None]], topics=[["a"], ["a"], [None], ["b"]])
    metrics = result.metrics()
    assert metrics["eval/score"] == 2.0
    assert metrics["topic/a/eval_score"] == 1.0 and "topic/b/eval_score" not in metrics
    rows = list(result.rows(prompts(4)))
    assert [row["score"] for row in rows] == [1.0, None, 3.0, None]
    assert "metrics" not in rows[0], "there are no evaluation functions"
    assert "topic" not in rows[0] and [r["topic"] for r in result.rows(prompts(4, topic="x"))] == ["x"] * 4


def test_lone_surrogates_in_logged_columns_are_written_as_json_writes_them(tmp_path):
    """A column of the data may contain them, because only the prompt and the completions are checked."""
    result = evaluation([[1.0]], extra={"answer": [["\\\ud800 a"]]})
    Samples(tmp_path, prompts(1), None).on_evaluation(result)
    assert json.loads((tmp_path / "update-000000.jsonl").read_text())["extra"] == {"answer": "\\\ud800 a"}
    write_json(tmp_path / "a.json", "\ud800")
    assert json.loads((tmp_path / "a.json").read_text()) == "\ud800"


def test_figures_are_paired_over_the_prompts_with_a_score_in_both_evaluations():
    """Prompt means before (1, -, 2) and after (2, 5, -): only the first prompt is in both."""
    before = evaluation([[1.0, 1.0], [None, None], [2.0, None]])
    after = evaluation([[3.0, 1.0], [5.0, None], [None, None]])
    figures = compare(before, after, 0)
    assert (figures["score_before"], figures["score_after"]) == (1.0, 2.0)
    assert figures["score_rise_interval"] is None, "one prompt is no evidence"
    none = compare(evaluation([[1.0], [None]]), evaluation([[None], [1.0]]), 0)
    assert (none["score_before"], none["score_after"]) == (1.0, 1.0), "over different prompts, so without an interval"
    assert none["score_rise_interval"] is None and none["score_rise_in_start_sd"] == 0.0


def test_gold_quality_of_several_samples_is_paired_by_prompt():
    before = evaluation([[0.0, 0.0]] * 2, gold=np.array([[1.0, 0.0], [0.0, 0.0]]))
    after = evaluation([[0.0, 0.0]] * 2, gold=np.array([[1.0, 1.0], [0.0, 1.0]]))
    figures = compare(before, after, 0)
    assert (figures["gold_before"], figures["gold_after"]) == (0.25, 0.75)
    assert figures["gold_rise_interval"] == list(_interval_of_equal(0.5, 2))


def _interval_of_equal(value: float, count: int) -> tuple[float, float]:
    found = over_prompts([value] * count, 0, limits=(-1.0, 1.0))
    return found.low, found.high


def test_no_change_is_no_certainty():
    """15 prompts, each as right as before: 0.025^(1/15) = 0.782. Scores of a reward model have no known range."""
    right = np.array([[float(i % 3 == 0)] for i in range(15)])
    figures = compare(evaluation(right), evaluation(right), 0)
    assert figures["score_rise_interval"] == pytest.approx([-0.218, 0.218], abs=1e-3)
    scores = 3.0 * right
    assert compare(evaluation(scores), evaluation(scores), 0)["score_rise_interval"] is None


def test_intervals_are_within_the_range_of_the_score():
    """Four prompts, two of which got worse: -0.5, and not (-1.4 to +0.4)."""
    figures = compare(evaluation([[1.0]] * 4), evaluation([[0.0], [0.0], [1.0], [1.0]]), 0)
    low, high = figures["score_rise_interval"]
    assert low == -1.0 and high < 1.0


def test_figures_of_evaluation_functions_before_and_after():
    def of(values) -> Evaluation:
        found = figures_of(np.array(values), 0)
        return evaluation([[0.0, 0.0]] * 2, judged={"right": values}, figures={"right": found})

    figures = compare(of([[0.0, 1.0], [0.0, 0.0]]), of([[1.0, 1.0], [1.0, 0.0]]), 0)
    names = [name for name in figures if name.startswith("eval/")]
    assert names == [
        "eval/right_before",
        "eval/right_after",
        "eval/right/pass_at_1_before",
        "eval/right/pass_at_1_after",
        "eval/right/pass_at_2_before",
        "eval/right/pass_at_2_after",
        "eval/right_rise_interval",
    ]
    assert [figures[name] for name in names[:-1]] == [0.25, 0.75, 0.25, 0.75, 0.5, 1.0]
    assert figures["eval/right_rise_interval"] == list(_interval_of_equal(0.5, 2))


# --- the best checkpoint ---------------------------------------------------------------------------------------------


def watched(*rows) -> list[Candidate]:
    """One candidate per (value, KL, perplexity). The scores fall, so that the rule "score" would choose the first."""
    return [
        Candidate(50 * i, -float(i), kl, 6.0, ppl, {} if value is None else {"right": {"value": value}})
        for i, (value, kl, ppl) in enumerate(rows)
    ]


def test_best_rule_of_an_evaluation_function_is_its_highest_value_within_both_limits():
    run = watched((0.1, 0.0, 10.0), (0.4, 3.0, 10.5), (0.8, 9.5, 10.5), (0.9, 3.0, 11.6), (0.4, 3.0, 10.0))
    best, why = choose(run, "right", "")
    assert best == 1, "the third is above the KL limit, the fourth above the perplexity limit, the fifth is a tie"
    assert "right (0.400)" in why and "3 of 5" in why and "1.5 x" in why and "1.15 x" in why


def test_best_rule_of_an_evaluation_function_without_values():
    assert choose(watched((None, 0.0, 10.0), (0.1, 1.0, 10.0)), "right", "")[0] == 1
    best, why = choose(watched((None, 0.0, 10.0), (None, 1.0, 10.0)), "right", "")
    assert best == 0 and "2 of 2" in why


def test_candidate_of_an_older_checkpoint_has_no_metrics():
    old = {"update": 0, "score": 1.0, "kl": 0.0, "target": 6.0, "perplexity": 10.0}
    assert Candidate(**old).metrics == {} and Candidate(**old).value("score") == 1.0

"""Tests the judges of an evaluation: evaluation functions, judge models, several at once, and pass@k."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch

import compare_runs
import evaluate_generations
from rlhf.analysis.audit import figures
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.models import find_model_ref, find_models, require_trusted_code, shared_settings
from rlhf.reports.tables import figure_label, figure_names
from rlhf.settings.evaluation import MeasureSettings, parse_evaluation_cli
from rlhf.utils.console import Screen
from tests.analysis.test_verdict import group, judge_runs
from tests.evaluations import evaluation_of
from tests.reports.test_reports import one_reward
from tests.shapes import make_reward_model

RULES = """
def has_e(completions, **_):
    print("has_e was called")
    return [float("e" in text) for text in completions]


def half(completions, want, **_):
    return [None if w is None else 0.5 * (w in text) for text, w in zip(completions, want)]


def schedule(completions, trainer_state, log_metric, **_):
    log_metric("ignored", 1.0)
    return [trainer_state.global_step / trainer_state.max_steps + trainer_state.max_steps] * len(completions)
"""


@pytest.fixture
def rules(tmp_path):
    (tmp_path / "rules.py").write_text(RULES)
    return f"{tmp_path / 'rules.py'}"


@pytest.fixture
def wanted(tmp_path):
    """A file of six prompts with the column `want`, which is null in two rows."""
    rows = [{"question": f"Which letter is number {i}?", "want": "e" if i % 3 else None} for i in range(6)]
    (tmp_path / "wanted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "wanted.jsonl"


# --- pass@k ----------------------------------------------------------------------------------------------------------


def test_pass_at_k_matches_values_worked_out_by_hand():
    """Four completions per prompt. One right: pass@1 = 1/4, pass@2 = 1 - C(3,2)/C(4,2) = 1/2. None right: 0. With one
    of two rated completions right, pass@1 = 1/2, pass@2 = 1, and there is no pass@4."""
    values = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, np.nan, np.nan]]
    found = figures(evaluation_of(np.zeros((3, 4)), {"exact_match": values}, functions=("exact_match",)))
    assert found["pass@1/exact_match"] == pytest.approx((1 / 4 + 0 + 1 / 2) / 3)
    assert found["pass@2/exact_match"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert found["pass@4/exact_match"] == pytest.approx((1 + 0) / 2)
    assert [name for name in found if name.startswith("pass@")] == [f"pass@{k}/exact_match" for k in (1, 2, 4)]
    assert found["judge"] == pytest.approx(2 / 10), "the mean of the rated completions"


def test_pass_at_k_is_only_for_functions_with_values_0_and_1():
    """Gold quality can be 0 and 1 by accident, and other functions have values between them."""
    judged = {"exact": [[0, 1, 1]], "graded": [[0, 0.5, 1]], "gold quality": [[0, 1, 1]], "none": [[np.nan] * 3]}
    found = figures(evaluation_of([[0, 0, 0]], judged, functions=("exact", "graded", "none")))
    assert [name for name in found if "/" in name] == [
        "judge/graded", "judge/gold quality", "judge/none", "pass@1/exact", "pass@2/exact", "pass@3/exact",
    ]  # fmt: skip
    assert found["judge/none"] is None and found["pass@3/exact"] == 1.0
    assert figure_label("pass@2/exact", list(judged)) == "pass@2, exact"
    assert [figure_label(name, ["a", "b"]) for name in ("judge", "judge/b", "score")] == [
        "judge a",
        "judge b",
        "score",
    ]
    assert figure_label("judge", ["a"]) == "judge"


def test_figures_of_a_model_without_pass_at_k_are_in_the_same_table():
    one = figures(evaluation_of([[0, 0]], {"f": [[0, 1]]}, functions=("f",)))
    other = figures(evaluation_of([[0, 0]], {"f": [[0, 0.5]]}, functions=("f",)))
    assert figure_names([other, one]) == figure_names([one, other])
    assert [name for name in figure_names([other, one]) if name in ("judge", "pass@1/f", "length")] == [
        "judge", "pass@1/f", "length",
    ]  # fmt: skip


# --- several judges --------------------------------------------------------------------------------------------------


def test_first_judge_decides_the_verdict():
    """PPO is better by the first judge and worse by the second."""
    shape = (24, 2)

    def results(score, first, second):
        return evaluation_of(np.full(shape, score), {"first": np.full(shape, first), "second": np.full(shape, second)})

    groups = [group("PPO", results(1.0, 2.0, 0.0)), group("GRPO", results(1.0, 1.0, 1.0))]
    verdict = judge_runs(groups, results(0.0, 0.0, 0.0), "first", 1)
    pairs = {c.measure: c.difference.value for c in verdict.contrasts if c.name == "PPO - GRPO"}
    assert pairs == {"score": 0.0, "judge": 1.0, "judge/second": -1.0}
    used = judge_runs(groups, results(0.0, 0.0, 0.0), "first", 1, independent=False)
    assert "(first, " in verdict.sentences[0] and verdict.sentences[0] != used.sentences[0], "used for training, too"


def test_a_judge_that_gives_every_completion_its_score_is_named_and_not_shown_again(runs, tmp_path, capsys):
    """`same` is the reward of the run, under another name. `has_e` differs from it in completions without an e."""
    file = tmp_path / "rules.py"
    file.write_text(RULES + "\n\ndef same(completions, **_):\n    return [len(c) / 100 for c in completions]\n")
    out = tmp_path / "out"
    ppo, grpo = (one_reward(runs[name, 1], tmp_path / name) for name in ("ppo", "grpo"))
    words = ["--reward-func", f"{file}:same", "--num-prompts", 3, "--completions", 2]
    for script, model, more in (
        (evaluate_generations, ["--model-path", ppo], []),
        (compare_runs, [ppo, grpo], ["--limit-minutes", 0, "--arm", "best-of-2"]),
    ):
        judges = ["--eval-func", f"{file}:same", f"{file}:has_e"]
        script.main([str(word) for word in (*model, *words, *judges, *more, "--output", out)])
        printed = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert "the judge same gives every completion its score" in printed
    evaluation, comparison = (json.loads((out / f"{name}.json").read_text()) for name in ("evaluation", "comparison"))
    for report in (evaluation, comparison):
        assert report["judges"] == ["has_e"]
        assert {found["measure"] for found in report["contrasts"]} == {"score", "judge"}
        assert "same" not in report["facts"]["judge"]
    figures = evaluation["models"][0]["figures"]
    assert "judge/has_e" not in figures and figures["judge"] is not None
    assert "by the judge (has_e" in comparison["verdict"][0]
    assert all(set(row["judges"]) == {"has_e"} for row in evaluation["prompts"][0]["sides"][1]["completions"])


def test_pass_at_k_of_a_function_that_is_the_score_stays():
    """Two of three judged completions are right; the judge's ratings were removed."""
    found = figures(evaluation_of([[1, 0, 1]], {}, functions=("exact",)))
    assert found["pass@1/exact"] == pytest.approx(2 / 3) and found["pass@3/exact"] == 1.0


def test_evaluation_with_a_judge_model_and_functions(runs, rules, wanted, tmp_path, capsys):
    """One row per judge, the judge model first; values of 0 and 1 also give pass@k. `half` applies to 4 of 6 rows."""
    judge = make_reward_model(tmp_path / "judge", seed=7)
    out = tmp_path / "out"
    words = ["--model-path", runs["ppo", 1], "--prompts", wanted, "--judge-model", judge, "--completions", 3,
             "--eval-func", f"{rules}:has_e", f"{rules}:half", "--output", out]  # fmt: skip
    evaluate_generations.main([str(word) for word in words])
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    report = json.loads((out / "evaluation.json").read_text())
    assert report["judges"] == [str(judge), "has_e", "half"]
    model = report["models"][0]
    rows = [row for prompt in report["prompts"] for row in prompt["sides"][1]["completions"]]
    assert model["figures"]["judge"] == pytest.approx(np.mean([row["judge"] for row in rows]))
    assert model["figures"]["judge/has_e"] == pytest.approx(np.mean(["e" in row["text"] for row in rows]))
    assert model["figures"]["pass@1/has_e"] == pytest.approx(model["figures"]["judge/has_e"])
    assert {f"pass@{k}/has_e" for k in (1, 2, 3)} <= model["figures"].keys() and "pass@1/half" not in model["figures"]
    assert [c["measure"] for c in report["contrasts"]] == ["score", "judge", "judge/has_e", "judge/half"]
    assert all(set(row["judges"]) == {str(judge), "has_e", "half"} for row in rows)
    unrated = [row["judges"]["half"] is None for row in rows]
    assert unrated == [i // 3 in (0, 3) for i in range(18)]
    few, note = report["notes"][-2:]  # after those of the reward model and the judge
    assert "only 6 prompts" in few
    assert re.findall(r"\d+", note)[:4] == ["12", "36", "2", "6"]
    assert report["facts"]["judge"].endswith(", has_e, half")
    assert note in printed and "pass@2, has_e" in printed
    assert "has_e was called" in printed
    page = (out / "evaluation.html").read_text()
    assert "pass@2, has_e" in page and note.partition(":")[0] in page


def test_a_judge_without_ratings_leaves_the_audit_incomplete(runs, tmp_path):
    """Then there is no line that the model shows no signs of reward hacking."""
    (tmp_path / "judge.py").write_text("def nothing(completions, **_):\n    return [None] * len(completions)\n")
    words = ["--model-path", runs["ppo", 1], "--num-prompts", 2, "--completions", 2, "--output", tmp_path / "out"]
    judged = [*words, "--eval-func", f"{tmp_path / 'judge.py'}:nothing"]
    for argv, complete in ((words, True), (judged, False)):
        evaluate_generations.main([str(word) for word in argv])
        report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
        assert not report["models"][0]["warnings"], "otherwise no line is expected in either case"
        assert ("signs of reward hacking" in report["headline"]) == complete
        assert any("did not compare" in note for note in report["notes"]) != complete


def test_none_is_no_judge_in_the_demo_either(runs, monkeypatch):
    monkeypatch.setattr("rlhf.analysis.judges.gold_of", lambda _: lambda *_: 0.5)
    models = [find_model_ref(str(runs["ppo", 1]), "final", None)]
    found = {}
    for flags in ([], ["--judge-model", "none"]):
        measure = parse_evaluation_cli(["--num-prompts", "2", *flags]).measure
        found[len(flags)] = ModelEvaluator(models, measure, torch.device("cpu"), Screen()).judge_name
    assert found == {0: "gold quality", 2: None}


def test_the_text_of_models_without_a_record_is_set_for_judge_and_reward_model(runs, tmp_path, capsys):
    """Without --rm-text both read the whole chat. The accuracy of the judge stands beside its name."""
    judge = str(make_reward_model(tmp_path / "judge", seed=7))
    models = [find_model_ref(str(runs["ppo", 1]), "final", None)]
    names = {}
    for text in ("template", "eos"):
        measure = MeasureSettings(num_prompts=2, judge_model=judge, rm_text=text if text == "eos" else None)
        evaluator = ModelEvaluator(models, measure, torch.device("cpu"), Screen())
        learned = [rewards.learned[0] for rewards in (evaluator.rewards, evaluator.judges[0].rewards)]
        assert [model.text for model in learned] == [text, text]
        names[text] = evaluator.score_name
    assert names["template"] != names["eos"], "scores of another text are not the training reward"
    facts = dict(evaluator.facts())
    assert judge in facts["judge"] and "of 2 held-out pairs (95% interval 0.013 to 0.987)" in facts["judge"]
    assert "--rm-text" in capsys.readouterr().out


def test_comparison_by_an_evaluation_function(runs, rules, tmp_path, capsys):
    """Without a judge model the function decides. Equal budgets use it, too: the runs' stored completions are rated
    again, with the columns of their prompts."""
    (tmp_path / "rules.py").write_text(
        RULES + "\n\ndef like(completions, chosen, completion_ids, **_):\n"
        "    assert all(completion_ids)\n"
        "    return [float(len(set(a.split()) & set(b.split()))) for a, b in zip(completions, chosen)]\n"
    )
    words = [runs["ppo", 1], runs["grpo", 1], "--limit-minutes", 0,
             "--eval-func", f"{rules}:like", f"{rules}:has_e", "--num-prompts", 4,
             "--completions", 2, "--output", tmp_path / "out"]  # fmt: skip
    compare_runs.main([str(word) for word in words])
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert "(like, " in report["verdict"][0]
    assert {c["measure"] for c in report["contrasts"]} == {"score", "judge", "judge/has_e"}
    assert report["at_equal"][0]["differences"][0]["by"] == "judge"
    assert {"judge", "judge/has_e"} <= report["figures"]["PPO"]["1"].keys()
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    page = (tmp_path / "out" / "comparison.html").read_text()
    for label in ("judge like", "judge has_e", "pass@1, has_e", "PPO - GRPO, judge has_e"):
        assert label in page
    assert report["headline"] in printed and "by like" in report["headline"]


def test_function_without_the_columns_of_the_stored_completions(runs, rules, wanted, tmp_path):
    """The runs' own evaluations were made on other prompts, without the column `want`: no number at equal budgets."""
    words = [runs["ppo", 1], runs["grpo", 1], "--prompts", wanted, "--eval-func", f"{rules}:half",
             "--completions", 2, "--limit-minutes", 0, "--output", tmp_path / "out"]  # fmt: skip
    compare_runs.main([str(word) for word in words])
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert all("other prompts" in found["missing"] for row in report["at_equal"] for found in row["differences"])
    assert "(half, " in report["verdict"][0] and any("other prompts" in line for line in report["notes"])


# --- where the functions come from -----------------------------------------------------------------------------------


def with_settings(model, **changed):
    """Return a model whose run was trained with other reward settings."""
    settings = {**model.run.settings, "reward": {**model.run.settings["reward"], **changed}}
    return dataclasses.replace(model, run=dataclasses.replace(model.run, settings=settings))


def test_evaluation_functions_of_the_runs_are_inherited(runs):
    one, other = (find_model_ref(str(runs[name]), "final", None) for name in (("ppo", 1), ("ppo", 2)))
    trained = [with_settings(m, eval_func=["exact_match"]) for m in (one, other)]
    assert shared_settings(trained, MeasureSettings()).reward.eval_func == ("exact_match",)
    assert shared_settings([one, other], MeasureSettings()).reward.eval_func == ()
    replaced = shared_settings(trained, MeasureSettings(eval_func=("word_penalty",)))
    assert replaced.reward.eval_func == ("word_penalty",)


def test_different_evaluation_functions_of_the_runs_are_not_used(runs, capsys):
    one, other = (find_model_ref(str(runs[name]), "final", None) for name in (("ppo", 1), ("ppo", 2)))
    models = [one, with_settings(other, eval_func=["word_penalty"])]
    measure = MeasureSettings(num_prompts=2)
    evaluator = ModelEvaluator(models, measure, torch.device("cpu"), Screen())
    assert evaluator.judges == []
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "--eval-func" in line)
    assert line.startswith("note: ")


def test_code_of_evaluation_functions_needs_permission(runs, tmp_path, user_error):
    """Runs with the same function in a file: it is executed with --eval-func or --trust-reward-code only. If the runs
    have different functions, none is executed, so no permission is needed."""
    (tmp_path / "mark.py").write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    rule = f"{tmp_path / 'mark.py'}:f"
    one, other = (find_model_ref(str(runs[name]), "final", None) for name in (("ppo", 1), ("ppo", 2)))
    same = [with_settings(m, eval_func=[rule]) for m in (one, other)]
    with user_error() as error:
        require_trusted_code(same, MeasureSettings())
    assert [f"--eval-func {rule}" in problem for problem in map(str, error.value.problems)] == [True, True]
    for allowed in ({"eval_func": (rule,)}, {"eval_func": ("exact_match",)}, {"trust_reward_code": True}):
        require_trusted_code(same, MeasureSettings(**allowed))
    require_trusted_code([one, same[1]], MeasureSettings())
    both = [with_settings(one, eval_func=[rule], reward_func=[rule])]
    with user_error(f"--reward-func {rule} --eval-func {rule}", "--trust-reward-code"):
        require_trusted_code(both, MeasureSettings())
    with user_error(f"--eval-func {rule}"):
        require_trusted_code(both, MeasureSettings(reward_func=("length_penalty",)))


def test_function_that_was_also_a_reward_is_not_independent(runs):
    model = with_settings(
        find_model_ref(str(runs["ppo", 1]), "final", None), reward_func=["word_penalty"], reward_weights=None
    )
    measure = MeasureSettings(num_prompts=2, eval_func=("word_penalty", "length_penalty"))
    evaluator = ModelEvaluator([model], measure, torch.device("cpu"), Screen())
    assert [judge.independent for judge in evaluator.judges] == [False, True]


def test_missing_column_is_an_error_before_models_load(runs, rules, monkeypatch, user_error):
    monkeypatch.setattr("rlhf.analysis.evaluator.make_rewards", lambda *_: pytest.fail("loaded"))
    measure = MeasureSettings(num_prompts=2, eval_func=(f"{rules}:half",))
    models = find_models([str(runs["ppo", 1])], measure, "--model-path")
    with user_error("'half'", "'want'", "--prompts"):
        ModelEvaluator(models, measure, torch.device("cpu"), Screen())
    with user_error("--eval-func exact_mach", "exact_match"):
        ModelEvaluator(models, dataclasses.replace(measure, eval_func=("exact_mach",)), torch.device("cpu"), Screen())


# --- trainer_state ---------------------------------------------------------------------------------------------------


def test_all_models_are_scored_as_at_the_end_of_the_longest_run(runs, rules):
    """Two runs of 2 and 40 planned updates: step 40 of 40 for both. Without a run: step 1 of 1."""
    one, other = (find_model_ref(str(runs[name]), "final", None) for name in (("ppo", 1), ("ppo", 2)))
    longer = dataclasses.replace(other, run=dataclasses.replace(
        other.run, plan=dataclasses.replace(other.run.plan, updates=40)))  # fmt: skip
    rule = f"{rules}:schedule"
    measure = MeasureSettings(
        num_prompts=2, completions=1, max_new_tokens=4, reward_func=(rule,), eval_func=(rule,), reward_weights=(0, 1)
    )
    evaluator = ModelEvaluator([one, longer], measure, torch.device("cpu"), Screen())
    for model in (one, longer):
        found = evaluator.evaluate(model, Screen())
        assert (found.scores == 41).all() and (found.judged["schedule"] == 41).all()
    alone = dataclasses.replace(one, run=None)
    measure = dataclasses.replace(
        measure, baseline=evaluator.start.source, prompts=evaluator.config.data.prompts,
        rm_model=evaluator.config.model.rm_model,
    )  # fmt: skip
    evaluator = ModelEvaluator([alone], measure, torch.device("cpu"), Screen())
    assert (evaluator.evaluate_start(Screen()).scores == 2).all()

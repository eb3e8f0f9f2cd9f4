"""Tests that a comparison uses only numbers of equal conditions: a table of pairs of runs that differ in one of them.

The runs are records without training, with hashes of small files.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from rlhf.analysis.conditions import KL, RATED, SAMPLED, SCORED, changed_code, of_run, unlike
from rlhf.analysis.groups import group_runs, mixed
from rlhf.analysis.models import ModelRef, shared_settings
from rlhf.analysis.verdict import START, Arm
from rlhf.checkpoints.model_folder import model_files
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run, make_config
from rlhf.data.examples import worked_examples
from rlhf.reports.comparison_report import by_seed, make_comparison
from rlhf.rewards.find import code_print
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.types import StopText
from rlhf.utils.errors import UserError
from tests.analysis.test_equal_budget import rising
from tests.evaluations import evaluation_of
from tests.records import record_of

EQUAL = ""
CODE = "rw.py:binary"
JUDGE = "judge.py:right"
OTHER = "f" * 64  # a hash of another file
STOP = (StopText.parse("\\n\\n"),)


class Pair(NamedTuple):
    """Two runs. The second one differs from the first in one condition, and the comparison may have flags."""

    settings: dict[str, Any] = {}  # of the second run  # noqa: RUF012
    data: dict[str, Any] = {}  # that the second run recorded  # noqa: RUF012
    flags: dict[str, Any] = {}  # of the comparison  # noqa: RUF012
    algorithm: str = "ppo"  # of the second run
    judge: bool = False  # an evaluation function decides, otherwise the score
    arms: int = 2  # that the runs form, without names
    refused: str = ""  # the setting that must be given
    budget: str = EQUAL  # the condition that is missing at equal episodes and time
    kl: str | None = None  # and at equal KL; None: as `budget`
    picture: str | None = None  # and in the picture over KL; None: as `kl`


T1 = {"temperature": 1.0}
GIVEN = {"reward_func": (CODE,)}
PAIRS = {
    # identity: they are one arm
    "nothing": Pair(arms=1),
    "seed": Pair({"seed": 7}, arms=1),
    "folder": Pair({"output": "./elsewhere", "save_every": 3}, arms=1),
    "path of the same reward code": Pair({"reward_func": ("copy/rw.py:binary",)}, arms=1),
    # identity: they are two arms, which are evaluated alike
    "algorithm": Pair(algorithm="grpo"),
    "learning rate": Pair({"learning_rate": 1e-6}),
    "control": Pair({"control": "shuffled"}),
    "start model at the same path": Pair(data={"start_model_files": {"model.safetensors": OTHER}}),
    "training prompts at the same path": Pair(data={"train_sha256": OTHER}),
    "evaluation prompts at the same path": Pair(data={"evaluation_sha256": OTHER}),
    # prompts
    "all on other prompts": Pair({"seed": 7}, flags={"prompts": "mine.jsonl"}, arms=1, budget="prompts"),
    "all on other parts of their data": Pair({"seed": 7}, flags={"split": "0/0/100"}, arms=1, budget="prompts"),
    "all on longer prompts": Pair({"seed": 7}, flags={"prompt_length": 999}, arms=1, budget="prompts"),
    "worked examples": Pair({"few_shot": "others.jsonl"}, refused="few_shot"),
    "worked examples at the same path": Pair(data={"few_shot": [{"role": "user", "content": "x"}]}, budget="prompts"),
    "plain prompts": Pair({"plain_prompts": True}, refused="plain_prompts"),
    "variables of the chat template": Pair(
        {"chat_template_kwargs": '{"enable_thinking": false}'}, refused="chat_template_kwargs"
    ),
    "data": Pair({"prompts": "others.jsonl"}, refused="prompts"),
    # sampling
    "temperature": Pair({"temperature": 0.3}, refused="temperature"),
    "temperature, with a flag": Pair({"temperature": 0.3}, flags=T1, budget="sampling"),
    "length": Pair({"max_new_tokens": 8}, flags={"max_new_tokens": 24}, budget="sampling"),
    "top-k": Pair({"top_k": 5}, flags={"top_k": 0}, budget="sampling"),
    "top-p": Pair({"top_p": 0.5}, flags={"top_p": 1.0}, budget="sampling"),
    "stop strings": Pair({"stop": ("\\n",)}, flags={"stop": STOP}, budget="sampling"),
    "temperature of the evaluations": Pair({"eval_temperature": 0.3}, arms=1, budget="sampling"),
    "greedy evaluations": Pair({"eval_temperature": 0.0}, arms=1, budget="sampling"),
    "several completions per prompt": Pair({"eval_samples": 2}, arms=1),
    # KL
    "temperature of the log-probabilities": Pair(
        {"eval_temperature": 1.0, "temperature": 0.3}, flags=T1, kl="kl_temperature"
    ),
    "another baseline": Pair({"seed": 7}, flags={"baseline": "other_start"}, arms=1, kl="start_model"),
    "the same baseline at another path": Pair({"seed": 7}, flags={"baseline": "copy/start"}, arms=1),
    # rewards
    "reward code at the same path": Pair(data={"rules": {CODE: OTHER, JUDGE: None}}, budget="rewards"),
    "reward function": Pair({"reward_func": ("length_penalty",)}, refused="reward_func"),
    "reward function, with a flag": Pair({"reward_func": ("length_penalty",)}, flags=GIVEN, budget="rewards"),
    "weights": Pair({"reward_weights": (1.0, 5.0)}, flags={"reward_weights": (1.0, 1.0)}, budget="rewards"),
    "weights that are all 1": Pair({"reward_weights": (1.0, 1.0)}, arms=1),
    "reward model": Pair({"rm_model": "other_rm"}, flags={"rm_model": "rm"}, budget="rewards"),
    "reward model at the same path": Pair(data={"reward_model_files": {"model.safetensors": OTHER}}, budget="rewards"),
    "text that the reward model scores": Pair({"rm_text": "eos"}, flags={"rm_text": "template"}, budget="rewards"),
    "teacher": Pair({"teacher": "teacher"}, data={"teacher_files": {"model.safetensors": OTHER}}, budget="rewards"),
    # a judge rates the stored completions again, so other rewards do not matter
    "reward function, with a judge": Pair(
        {"reward_func": ("length_penalty",)}, flags=GIVEN, judge=True, picture="rewards"
    ),
    "temperature, with a judge": Pair({"temperature": 0.3}, flags=T1, judge=True, budget="sampling"),
    "code of the judge": Pair(data={"rules": {CODE: None, JUDGE: OTHER}}, judge=True, arms=1, picture="judges"),
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Reward code, worked examples, start models and reward models in the current folder, some of them twice."""
    monkeypatch.chdir(tmp_path)
    for name in ("start", "other_start", "rm", "other_rm"):
        Path(name).mkdir()
        Path(name, "model.safetensors").write_text(name)
    Path("rw.py").write_text("def binary(completions, **_):\n    return [1.0] * len(completions)\n")
    Path("judge.py").write_text("def right(completions, **_):\n    return [0.0] * len(completions)\n")
    for name in ("shots.jsonl", "others.jsonl"):
        Path(name).write_text(json.dumps({"prompt": name, "answer": "1"}) + "\n")
    Path("copy").mkdir()
    shutil.copy("rw.py", "copy")
    shutil.copytree("start", "copy/start")


def trained(settings: dict[str, Any], data: dict[str, Any], algorithm: str = "ppo") -> RunRecord:
    """Return a run with hashes of today's files, except for `data`. A rule of None keeps today's hash."""
    usual = {"actor_model": "start", "rm_model": "rm", "reward_func": (CODE,), "eval_func": (JUDGE,)}
    usual |= {"few_shot": "shots.jsonl", "stop": ("\\n\\n",), "temperature": 1.0, "rm_text": "template"}
    config = make_config("demo", algorithm, **{**usual, **settings})
    recorded = {
        "date": None,
        "evaluation_prompts": 6,
        "evaluation_sha256": "e" * 64,
        "train_sha256": "t" * 64,
        "few_shot": worked_examples(config.data.few_shot),
        "start_model_files": model_files(config.model.actor_model),
        "reward_model_files": model_files(config.model.rm_model),
        **data,
    }
    rules = data.get("rules", {})
    recorded["rules"] = {rule: rules.get(rule) or code_print(rule) for rule in config.rules}
    return record_of(config, 2, data=recorded)


def compared(runs: list[RunRecord], pair: Pair) -> dict[str, Any]:
    """Return the report of the comparison of two runs, A and B. The last stored score is 2 in A and 0 in B."""
    models = [ModelRef(name, name, run=run, which="final", update=2) for name, run in zip("AB", runs, strict=True)]
    measure = MeasureSettings(**pair.flags)
    values = np.arange(40.0).reshape(20, 2) % 2
    arms = [
        Arm(model.name, [evaluation_of(values, {"right": values} if pair.judge else {}, kl=values)], [model])
        for model in models
    ]
    evaluator = SimpleNamespace(
        settings=measure,
        config=shared_settings(models, measure),
        runs=runs,
        judge_name="right" if pair.judge else None,
        judges=[SimpleNamespace(name="right", independent=True)] if pair.judge else [],
        rate=lambda rows: np.array([row["score"] for row in rows], dtype=float),
        score_name="the score",
        examples=[],
        drop_copies=lambda everyone: [],
        facts=lambda: [],
        screen=SimpleNamespace(notes=[], warnings=[]),
    )
    points = {"A": [rising(0, 1, 4)], "B": [rising(0, 1, 4, scores=(0, 0, 0))]}
    start = Arm(START, [arms[0].measured[0]])
    return make_comparison(evaluator, arms, start, None, [], points)[1]


def words_of(condition: str) -> str:
    """Return the words for a difference in a condition, up to its values."""
    return (SCORED | RATED | KL)[condition].partition("{")[0]


def check(rows: list[dict[str, Any]], condition: str) -> None:
    """Check that all differences are A - B, or that the reason why they are missing is the condition only."""
    found = [difference for row in rows for difference in row["differences"]]
    assert found
    for difference in found:
        if condition == EQUAL:
            assert difference["value"] == pytest.approx(2) or rows[0]["kind"] == "kl"
        else:
            assert words_of(condition) in difference["missing"]
            also = "kl_temperature" if condition == "sampling" else condition  # of training: that of both
            others = {words_of(name) for name in SCORED | RATED | KL if name not in (condition, also)}
            assert not any(other in difference["missing"] for other in others)


@pytest.mark.parametrize("name", PAIRS)
def test_runs_that_differ_in_one_condition(name):
    """They are compared, or what cannot be compared is missing, with the condition as reason."""
    pair = PAIRS[name]
    runs = [trained({}, {}), trained(pair.settings, pair.data, pair.algorithm)]
    assert len(group_runs(runs)) == pair.arms or pair.refused
    if pair.refused:
        with pytest.raises(UserError) as error:
            compared(runs, pair)
        assert any(pair.refused in problem.what for problem in error.value.problems)
        return
    report = compared(runs, pair)
    of_kl = [row for row in report["at_equal"] if row["kind"] == "kl"]
    check([row for row in report["at_equal"] if row["kind"] != "kl"], pair.budget)
    at_kl = pair.budget if pair.kl is None else pair.kl
    check(of_kl, at_kl)
    picture = at_kl if pair.picture is None else pair.picture
    assert bool(report["undrawn"]) == (picture != EQUAL)
    assert picture == EQUAL or any(words_of(picture) in note for note in report["notes"])


def test_the_table_has_enough_pairs():
    assert len(PAIRS) >= 20 and {pair.budget for pair in PAIRS.values()} == {EQUAL, *SCORED}


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ({}, True),
        ({"baseline": "copy/start", "prompts": "mine.jsonl"}, True),
        ({"baseline": "other_start"}, False),
        ({"temperature": 0.3}, False),
        ({"top_k": 5}, False),
        ({"top_p": 0.5}, False),
    ],
)
def test_a_kl_is_compared_with_the_target_only_if_it_is_that_of_training(flags, same):
    """Another sampling or start model has another KL, so the target says nothing about it."""
    steered = {"kl_schedule": "adaptive", "kl_target": "0.1/sequence"}  # the completions have a KL of 0.5
    runs = [trained(steered, {}), trained({**steered, "seed": 7}, {})]
    above = [line for line in compared(runs, Pair(flags=flags))["warnings"] if "KL target (0.15/sequence)" in line]
    assert len(above) == (2 if same else 0)


def test_reward_code_that_changed_after_a_run_is_reported():
    """Only functions that the comparison uses count."""
    run = trained({}, {})
    config = shared_settings([ModelRef("A", "A", run=run)], MeasureSettings())
    assert changed_code([run], config) == []
    Path("rw.py").write_text("def binary(completions, **_):\n    return [0.0] * len(completions)\n")
    (line,) = changed_code([run], config)
    assert CODE in line and JUDGE not in line
    assert line in compared([run, trained({"seed": 7}, {})], Pair())["warnings"]
    assert not changed_code([trained({}, {})], config)


@pytest.mark.parametrize("rule", ["./rw.py:binary", "copy/rw.py:binary"])
def test_changed_code_is_found_at_another_spelling_of_its_path(rule):
    run = trained({}, {"rules": {CODE: OTHER}})
    config = shared_settings([ModelRef("A", "A", run=run)], MeasureSettings(reward_func=(rule,)))
    assert len(changed_code([run], config)) == 1
    assert changed_code([trained({}, {})], config) == [], "the file has the same code"


def test_prompts_differ_from_those_of_a_run_that_recorded_none():
    run = trained({}, {"evaluation_sha256": None})
    models = [ModelRef("A", "A", run=run)]
    for measure, differ in ((MeasureSettings(), False), (MeasureSettings(prompts="mine.jsonl"), True)):
        assert bool(unlike({"A": [run]}, shared_settings(models, measure), measure, SAMPLED)) == differ


def test_keywords_are_a_condition_only_of_the_function_that_reads_them():
    for rule, differ in (("length_penalty", False), ("keyword_bonus", True)):
        runs = [trained({"reward_func": (rule,), "keywords": (word,)}, {}) for word in "ab"]
        one, other = (of_run(config_of_run(run), run) for run in runs)
        assert bool(one.difference(other, SCORED)) == differ


def test_judges_of_runs_are_compared_with_each_other():
    """The comparison has no judge. The picture draws the ratings that the runs stored."""
    measure = MeasureSettings(eval_func=())
    runs = [trained({"eval_func": ()}, {}), trained({}, {}), trained({}, {"rules": {JUDGE: OTHER}}), trained({}, {})]
    config = shared_settings([ModelRef(name, name, run=run) for name, run in zip("ABCD", runs, strict=True)], measure)
    arms = {name: [run] for name, run in zip("ABCD", runs, strict=True)}
    (name,) = unlike(arms, config, measure, RATED)
    assert name == "C" and not unlike(arms, config, measure, SCORED)


def test_runs_of_one_name_that_are_not_seeds_of_one_arm_are_named():
    """The user may pool them, and the comparison states it."""
    runs = [trained({}, {}), trained({"seed": 7}, {})]
    others = [trained({}, {"rules": {CODE: OTHER}}), trained({"learning_rate": 1e-6}, {}), trained({}, {}, "grpo")]
    (group,) = group_runs([*runs, *others], ["X"] * 5)
    assert mixed(group, runs) == []
    twice = [trained({"episodes": 100}, {}), trained({"seed": 7, "epochs": 2}, {})]
    recipe = replace(twice[1], settings=twice[1].settings | {"recipe": "mine.yaml"})
    assert mixed(group, [twice[0], recipe]) == [], "the same plan"
    for other, difference in zip(others, ("reward_func", "learning_rate", "algorithm"), strict=True):
        (line,) = mixed(group, [*runs, other])
        assert line.startswith("X ") and difference in line


def test_models_without_a_run_keep_their_place():
    """The first model of the arm has no run; the seed of the second one was its number."""
    models = [ModelRef("dpo", "dpo"), ModelRef("a", "a", run=record_of(seed=1)), ModelRef("1", "1")]
    arm = Arm("X", [evaluation_of([[1.0]])] * 3, models)
    assert by_seed(arm, "xyz") == {"model dpo": "x", "1": "y", "model 1": "z"}

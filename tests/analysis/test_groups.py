"""Tests how runs form groups by their settings, the groups' names, and which pairs of groups are compared."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from rlhf.algorithms.kl_control import with_horizon
from rlhf.analysis.groups import compared_pairs, group_runs
from rlhf.analysis.models import ModelRef, shared_settings
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.fields import replaced
from rlhf.settings.types import IN_PYTHON
from rlhf.utils.errors import UserError
from rlhf.utils.statistics import level_of_each
from tests.records import record_of


def run(algorithm="ppo", updates=20, recipe="demo", **settings) -> RunRecord:
    return record_of(with_horizon(make_config(recipe, algorithm, **settings), updates), updates)


def labels(*runs, names=()) -> list[str]:
    return [group.label for group in group_runs(runs, names)]


def test_runs_that_differ_only_in_seed_and_folder_are_one_group():
    (group,) = group_runs([run(), run(seed=7, output="./other", save_every=3), run(eval_func=["length_penalty"])])
    assert group.label == "PPO" and group.members == (0, 1, 2) and group.settings == {}


def test_another_spelling_of_a_path_and_a_recipe_with_equal_settings_do_not_separate_runs():
    record = run(prompts="data/x.json")
    recipe = dataclasses.replace(record, settings=record.settings | {"recipe": "mine.yaml"})
    (group,) = group_runs([record, run(prompts="./data//x.json"), recipe])
    assert group.label == "PPO" and group.members == (0, 1, 2)
    assert len(group_runs([run(rm_model="a/b"), run(rm_model="./a/b")])) == 2, "a hub name and a folder"


def test_each_algorithm_once_with_the_same_settings_has_the_algorithms_name_in_the_tables_order():
    """The demo has 64 prompts per update for PPO, and 16 with 4 completions each for GRPO and RLOO."""
    groups = group_runs([run("rloo"), run("grpo"), run("ppo"), run("grpo", seed=1)])
    assert [group.label for group in groups] == ["PPO", "GRPO", "RLOO"]
    assert [group.members for group in groups] == [(2,), (1, 3), (0,)]


def test_settings_are_in_the_names_only_of_groups_of_one_algorithm():
    rates = {group.label: group.settings["learning_rate"] for group in
             group_runs([run("grpo", learning_rate=3e-5), run(learning_rate=1e-5)])}  # fmt: skip
    assert rates == {"PPO": "1e-05", "GRPO": "3e-05"}
    assert labels(run(kl_target=["6/sequence"]), run("grpo"), run(use_lora=True)) == [
        "PPO kl_target 6/sequence, use_lora false", "GRPO", "PPO kl_target 3/sequence, use_lora true",
    ]  # fmt: skip


def test_an_algorithms_own_setting_is_a_difference_only_between_algorithms_that_read_it():
    alone = group_runs([run(lam=0.9), run("grpo")])
    assert not any("lam" in group.settings for group in alone)
    assert labels(run(lam=0.9), run("grpo"), run(lam=0.8)) == ["PPO lam 0.9", "GRPO", "PPO lam 0.8"]
    own = group_runs([run("grpo", K=2, batch_size=32), run("rloo", K=4, batch_size=16)])
    assert [group.settings["K"] for group in own] == ["2", "4"], "all read K"


def test_the_same_planned_episodes_are_no_difference_however_the_length_was_set():
    """The demo has 64 episodes per update. An epoch has other numbers of updates in the two algorithms."""
    spelled = [{"num_iterations": 150}, {"episodes": 9600}, {"epochs": 3}]
    for one, other in itertools.permutations(spelled, 2):
        assert labels(run(updates=150, **one), run("grpo", 150, **other)) == ["PPO", "GRPO"]
        (group,) = group_runs([run(updates=150, **one), run(updates=150, seed=2, **other)])
        assert group.label == "PPO" and group.members == (0, 1)
    rounded = group_runs([run(updates=150, episodes=9600), run(updates=150, episodes=9590)])
    assert len(rounded) == 1, "rounded up to whole updates"
    assert labels(run(updates=75, num_iterations=75), run(updates=150, episodes=9600)) == [
        "PPO episodes 4800", "PPO episodes 9600",
    ]  # fmt: skip
    assert labels(run(updates=150, epochs=3), run("grpo", 600, epochs=3)) == ["PPO", "GRPO"], "the same setting"
    smaller = labels(run(updates=150, num_iterations=150), run(updates=300, num_iterations=300, batch_size=32))
    assert smaller == ["PPO batch_size 64", "PPO batch_size 32"]


def test_a_name_has_up_to_three_settings_or_the_fewest_of_more():
    first = {"learning_rate": 1e-5, "gamma": 0.9, "lam": 0.9, "temperature": 0.9}
    three = {name: first[name] for name in ("learning_rate", "gamma", "lam")}
    assert labels(run(), run(**three))[1] == "PPO gamma 0.9, lam 0.9, learning_rate 1e-05"
    assert labels(run(), run(**first))[1] == "PPO gamma 0.9, 3 more settings"
    ones = [{**first, "lam": 0.8}, first, {**first, "gamma": 0.8, "learning_rate": 2e-5, "temperature": 0.8}]
    assert labels(*(run(**one) for one in ones)) == [
        "PPO gamma 0.9, lam 0.8, 2 more settings",
        "PPO gamma 0.9, lam 0.9, 2 more settings",
        "PPO gamma 0.8, lam 0.9, 2 more settings",
    ]
    assert labels(run(), run(**first), run(**{**first, "temperature": 0.8}))[2] == (
        "PPO gamma 0.9, lam 0.9, learning_rate 1e-05, temperature 0.8"
    )


CONTROL = "GRPO control (scores shuffled)"


def test_a_control_is_named_whatever_else_differs():
    control = run("grpo", control="shuffled")
    assert labels(control) == [CONTROL]
    assert labels(control, run("grpo"), run("ppo")) == ["PPO", "GRPO", CONTROL], "each after its algorithm"
    more = labels(run("grpo", learning_rate=1e-5), run("grpo", control="shuffled", learning_rate=2e-5))
    assert more == ["GRPO", CONTROL]
    assert labels(run("grpo"), control, names=["mine", "other"]) == ["mine", "other control (scores shuffled)"]
    assert labels(run("grpo"), control, names=["mine", "my control"]) == ["mine", "my control"]


def test_a_run_of_a_version_without_controls_is_no_control():
    old = run("grpo")
    del old.settings["reward"]["control"]
    groups = group_runs([old, run("grpo", seed=2), run("grpo", control="shuffled")])
    assert [(group.label, group.members) for group in groups] == [("GRPO", (0, 1)), (CONTROL, (2,))]


def test_models_with_one_name_are_a_group_whatever_their_settings():
    models = [run("grpo"), run(), run("grpo", learning_rate=1e-5), None, None]
    groups = group_runs(models, ["b", None, "b", "a", "a"])
    assert [(group.label, group.members) for group in groups] == [("b", (0, 2)), ("PPO", (1,)), ("a", (3, 4))]
    assert [group.algorithm for group in groups] == ["grpo", "ppo", ""] and groups[2].settings == {}


def test_two_groups_with_one_name(user_error):
    with user_error("PPO", "--arm"):
        group_runs([run(), None], [None, "PPO"])


def in_python(train: str, evaluation: str, **settings) -> RunRecord:
    """Return a run with prompts that were given in Python, by their hashes."""
    config = replaced(make_config("demo", **settings), prompts=IN_PYTHON)
    return record_of(config, 20, data={"date": None, "train_sha256": train, "evaluation_sha256": evaluation})


def test_runs_with_other_prompts_from_python_are_another_group():
    same = [in_python("a", "b"), in_python("a", "b", seed=7)]
    assert [group.members for group in group_runs(same)] == [(0, 1)] and labels(*same) == ["PPO"]
    for other in (in_python("x", "b"), in_python("a", "x")):
        groups = group_runs([*same, other])
        assert [group.members for group in groups] == [(0, 1), (2,)]
        assert all(re.fullmatch(r"PPO (train|evaluation)_sha256 [0-9a-f]{8}", group.label) for group in groups)
        assert groups[0].label != groups[1].label
    filtered = [in_python(train, "b") for train in "ac"]
    for run in filtered:
        run.settings["data"]["keep_pass_rate"] = [0.1, 0.9]
    assert len(group_runs(filtered)) == 1, "of an older version: the seeds kept different prompts"


def test_hashes_of_prompts_of_versions_that_hashed_the_date_do_not_separate_runs():
    seeds = [in_python(day, day, seed=number) for number, day in enumerate("ab")]
    for seed in seeds:
        del seed.data["date"]
    assert labels(*seeds) == ["PPO"]


def test_weights_that_are_all_1_are_those_of_unset_weights():
    functions = {"rm_model": None, "reward_func": ["length_penalty", "keyword_bonus"], "keywords": ["a"]}
    runs = [run(**functions, reward_weights=weights) for weights in (None, [1.0, 1.0], [1.0, 2.0])]
    assert [group.members for group in group_runs(runs)] == [(0, 1), (2,)]


def test_runs_with_other_evaluation_prompts_from_python_are_not_evaluated_together():
    models = [ModelRef(hash_, hash_, run=in_python("a", hash_)) for hash_ in "bcb"]
    with pytest.raises(UserError, match=r"different evaluation prompts, which .*: b, c\. Set them with --prompts$"):
        shared_settings(models, MeasureSettings())
    shared_settings(models, MeasureSettings(prompts="mine.jsonl"))


def test_settings_of_other_versions_do_not_separate_runs():
    old = run()
    del old.settings["optimizer"]["max_grad_norm"]
    assert labels(old, run(seed=2), run(seed=3, max_grad_norm=1.0)) == ["PPO"]


def test_up_to_four_groups_are_compared_in_all_pairs_and_more_with_the_first_one():
    assert compared_pairs("abc") == [("a", "b"), ("a", "c"), ("b", "c")] and len(compared_pairs("abcd")) == 6
    pairs = compared_pairs("abcdefghi")
    assert pairs == [(other, "a") for other in "bcdefghi"]
    assert level_of_each(len(pairs)) == pytest.approx(1 - 0.05 / 8)

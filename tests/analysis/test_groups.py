"""Tests how runs form groups by their settings, the groups' names, and which pairs of groups are compared."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from rlhf.algorithms.kl_control import with_horizon
from rlhf.analysis.groups import compared_pairs, group_runs
from rlhf.analysis.models import ModelRef, shared_settings
from rlhf.analysis.statistics import level_of_each
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.fields import replaced
from rlhf.settings.types import IN_PYTHON
from rlhf.utils.errors import UserError
from tests.records import record_of


def run(algorithm="ppo", updates=20, recipe="demo", **settings) -> tuple[str, RunRecord]:
    return algorithm, record_of(with_horizon(make_config(recipe, algorithm, **settings), updates), updates)


def labels(*runs, names=()) -> list[str]:
    return [group.label for group in group_runs(runs, names)]


def test_runs_that_differ_only_in_seed_and_folder_are_one_group():
    (group,) = group_runs([run(), run(seed=7, output="./other", save_every=3), run(eval_func=["length_penalty"])])
    assert group.label == "PPO" and group.members == (0, 1, 2) and group.settings == {}


def test_another_spelling_of_a_path_and_a_recipe_with_equal_settings_do_not_separate_runs():
    algorithm, record = run(prompts="data/x.json")
    recipe = dataclasses.replace(record, settings=record.settings | {"recipe": "mine.yaml"})
    (group,) = group_runs([(algorithm, record), run(prompts="./data//x.json"), (algorithm, recipe)])
    assert group.label == "PPO" and group.members == (0, 1, 2)
    assert len(group_runs([run(rm_model="a/b"), run(rm_model="./a/b")])) == 2, "a hub name and a folder"


def test_each_algorithm_once_with_the_same_settings_has_the_algorithms_name_in_the_tables_order():
    """The demo has 64 prompts per update for PPO, and 16 with 4 completions each for GRPO and RLOO."""
    groups = group_runs([run("rloo"), run("grpo"), run("ppo"), run("grpo", seed=1)])
    assert [group.label for group in groups] == ["PPO", "GRPO", "RLOO"]
    assert [group.members for group in groups] == [(2,), (1, 3), (0,)]


def test_shared_settings_that_differ_are_in_the_names():
    assert labels(run("grpo", learning_rate=3e-5), run(learning_rate=1e-5)) == [
        "GRPO learning_rate 3e-05", "PPO learning_rate 1e-05",
    ]  # fmt: skip
    assert labels(run(kl_target=["6/sequence"]), run(use_lora=True)) == [
        "PPO kl_target 6/sequence, use_lora false", "PPO kl_target 3/sequence, use_lora true",
    ]  # fmt: skip


def test_an_algorithms_own_setting_is_a_difference_only_between_algorithms_that_read_it():
    assert labels(run(lam=0.9), run("grpo")) == ["PPO", "GRPO"], "only PPO reads lam"
    assert labels(run(lam=0.9), run("grpo"), run(lam=0.8)) == [
        "PPO lam 0.9", "GRPO", "PPO lam 0.8",
    ]  # fmt: skip
    own = labels(run("grpo", K=2, batch_size=32), run("rloo", K=4, batch_size=16))
    assert own == ["GRPO K 2", "RLOO K 4"], "both read K; the batches have 64 completions each"


def test_a_horizon_that_follows_from_the_length_is_not_named():
    def of_default_recipe(updates, **settings):
        return run(updates=updates, recipe="smollm2-orca", **settings)

    short, long = of_default_recipe(48, num_iterations=48), of_default_recipe(96, num_iterations=96)
    assert (short[1].flat_settings["kl_horizon"], long[1].flat_settings["kl_horizon"]) == (16, 32)
    assert labels(short, long) == ["PPO num_iterations 48", "PPO num_iterations 96"]
    set_by_user = of_default_recipe(96, num_iterations=96, kl_horizon=90)
    assert labels(short, set_by_user) == [
        "PPO kl_horizon 16, num_iterations 48",
        "PPO kl_horizon 90, num_iterations 96",
    ]
    other_data = labels(of_default_recipe(48), of_default_recipe(96))  # the same number of epochs
    assert other_data == ["PPO kl_horizon 16", "PPO kl_horizon 32"]


def test_the_same_planned_episodes_are_no_difference_however_the_length_was_set():
    """The demo has 64 episodes per update. An epoch has other numbers of updates in the two algorithms."""
    spelled = [{"num_iterations": 150}, {"episodes": 9600}, {"epochs": 3}]
    for one, other in itertools.permutations(spelled, 2):
        assert labels(run(updates=150, **one), run("grpo", 150, **other)) == ["PPO", "GRPO"]
        (group,) = group_runs([run(updates=150, **one), run(updates=150, seed=2, **other)])
        assert group.label == "PPO" and group.members == (0, 1)
    rounded = group_runs([run(updates=150, episodes=9600), run(updates=150, episodes=9590)])
    assert len(rounded) == 1, "rounded up to whole updates"
    assert labels(run(updates=75, num_iterations=75), run("grpo", 150, episodes=9600)) == [
        "PPO episodes 4800", "GRPO episodes 9600",
    ]  # fmt: skip
    assert labels(run(updates=150, epochs=3), run("grpo", 600, epochs=3)) == ["PPO", "GRPO"], "the same setting"
    smaller = labels(run(updates=150, num_iterations=150), run(updates=300, num_iterations=300, batch_size=32))
    assert smaller == ["PPO batch_size 64", "PPO batch_size 32"]


def test_settings_of_evaluations_are_named_only_if_nothing_else_differs():
    assert labels(run(eval_every=5), run("grpo")) == ["PPO", "GRPO"]
    assert labels(run(eval_every=5), run(gamma=0.9)) == ["PPO gamma 1.0", "PPO gamma 0.9"]
    assert labels(run(eval_every=5), run()) == ["PPO eval_every 5", "PPO eval_every 25"]


def test_a_name_has_three_settings_unless_more_are_needed():
    first = {"learning_rate": 1e-5, "gamma": 0.9, "lam": 0.9, "temperature": 0.9}
    assert labels(run(), run(**first))[1] == "PPO gamma 0.9, lam 0.9, learning_rate 1e-05, 1 more settings"
    assert labels(run(), run(**first), run(**{**first, "temperature": 0.8}))[2] == (
        "PPO gamma 0.9, lam 0.9, learning_rate 1e-05, temperature 0.8"
    )


CONTROL = "GRPO control (scores shuffled)"


def test_a_control_is_named_whatever_else_differs():
    control = run("grpo", control="shuffled")
    assert labels(control) == [CONTROL]
    assert labels(control, run("grpo"), run("ppo")) == ["PPO", "GRPO", CONTROL], "each after its algorithm"
    more = labels(run("grpo", learning_rate=1e-5), run("grpo", control="shuffled", learning_rate=2e-5))
    assert more == ["GRPO learning_rate 1e-05", f"{CONTROL} learning_rate 2e-05"]
    assert labels(run("grpo"), control, names=["mine", "other"]) == ["mine", "other control (scores shuffled)"]
    assert labels(run("grpo"), control, names=["mine", "my control"]) == ["mine", "my control"]


def test_a_run_of_a_version_without_controls_is_no_control():
    _, old = run("grpo")
    del old.settings["reward"]["control"]
    groups = group_runs([("grpo", old), run("grpo", seed=2), run("grpo", control="shuffled")])
    assert [(group.label, group.members) for group in groups] == [("GRPO", (0, 1)), (CONTROL, (2,))]


def test_labels_replace_the_names_in_the_order_of_the_runs():
    runs = [run("grpo"), run(), run("grpo", seed=1)]
    assert labels(*runs, names=["b", "a"]) == ["b", "a"]
    assert [group.algorithm for group in group_runs(runs, ["b", "a"])] == ["grpo", "ppo"]


def in_python(train: str, evaluation: str, **settings) -> tuple[str, RunRecord]:
    """Return a run with prompts that were given in Python, by their hashes."""
    config = replaced(make_config("demo", **settings), prompts=IN_PYTHON)
    return "ppo", record_of(config, 20, data={"train_sha256": train, "evaluation_sha256": evaluation})


def test_runs_with_other_prompts_from_python_are_another_group():
    same = [in_python("a", "b"), in_python("a", "b", seed=7)]
    assert [group.members for group in group_runs(same)] == [(0, 1)] and labels(*same) == ["PPO"]
    for other in (in_python("x", "b"), in_python("a", "x")):
        groups = group_runs([*same, other])
        assert [group.members for group in groups] == [(0, 1), (2,)]
        assert all(re.fullmatch(r"PPO prompts \(given in Python\) [0-9a-f]{8}", group.label) for group in groups)
        assert groups[0].label != groups[1].label
    filtered = [in_python(train, "b", keep_pass_rate=[0.1, 0.9]) for train in "ac"]
    assert len(group_runs(filtered)) == 1, "the seeds keep different prompts"


def test_runs_with_other_evaluation_prompts_from_python_are_not_evaluated_together():
    models = [ModelRef(hash_, hash_, run=in_python("a", hash_)[1]) for hash_ in "bcb"]
    with pytest.raises(UserError, match=r"different evaluation prompts, which .*: b, c\. Set them with --prompts$"):
        shared_settings(models, MeasureSettings())
    shared_settings(models, MeasureSettings(prompts="mine.jsonl"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a"],
            r"1 label\(s\) for 2 group\(s\) of runs: --label a\. .* in this order: GRPO \(2 runs\); PPO \(1 run\)$",
        ),
        (["a", "a"], "two groups have the label 'a': --label"),
        (["a", "start"], "'start' names the start model: --label"),
    ],
)
def test_wrong_labels(names, message):
    with pytest.raises(UserError, match=message):
        group_runs([run("grpo"), run(), run("grpo", seed=1)], names)


def test_settings_of_other_versions_do_not_separate_runs():
    _, old = run()
    del old.settings["optimizer"]["max_grad_norm"]
    assert labels(("ppo", old), run(seed=2), run(seed=3, max_grad_norm=1.0)) == ["PPO"]


def test_up_to_four_groups_are_compared_in_all_pairs_and_more_with_the_first_one():
    assert compared_pairs("abc") == [("a", "b"), ("a", "c"), ("b", "c")] and len(compared_pairs("abcd")) == 6
    pairs = compared_pairs("abcdefghi")
    assert pairs == [(other, "a") for other in "bcdefghi"]
    assert level_of_each(len(pairs)) == pytest.approx(1 - 0.05 / 8)

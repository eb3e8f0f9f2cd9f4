"""Tests that every function of trl.rewards runs unchanged as --reward-func trl:NAME."""

from __future__ import annotations

import importlib.util
import inspect
from re import escape

import pytest
import trl.rewards

from rlhf.config import parse_cli
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.rewards import find
from rlhf.rewards.arguments import check_columns
from rlhf.rewards.find import find_rule
from rlhf.rewards.rewards import Rewards
from rlhf.settings.next_commands import code_words
from rlhf.utils.errors import UserError

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install math-verify"
)
QUESTION = ({"role": "user", "content": "What is 1/3 of 15?"},)
THOUGHT = "<think>\n15 / 3\n</think>\n"
RIGHT = r"It is \boxed{5}."
WRONG = r"It is \boxed{7}."
OVERLONG = "(max_completion_len=100, soft_punish_cache=20)"
# name -> texts, ids, the column `solution`, expected scores
CASES = {
    "think_format_reward": ([THOUGHT + RIGHT, RIGHT], [[1], [1]], None, [1.0, 0.0]),
    "accuracy_reward": ([RIGHT, WRONG, RIGHT], [[1]] * 3, ["$5$", "$5$", "no formula"], [1.0, 0.0, None]),
    "reasoning_accuracy_reward": ([THOUGHT + RIGHT, THOUGHT + WRONG, RIGHT], [[1]] * 3, ["$5$"] * 3, [1.0, 0.0, 0.0]),
    # right: from 1 to 0.5 over 100 tokens; wrong: from -1 to -0.5; a cosine, so the middle is halfway
    "get_cosine_scaled_reward(max_len=100)": ([RIGHT, WRONG], [[1] * 50, [1] * 100], ["$5$"] * 2, [0.75, -0.5]),
    "get_repetition_penalty_reward": (["", ""], [[1, 2, 3, 4], [5] * 7], None, [0.0, -0.8]),  # one 3-gram five times
    # the last 20 of 100 tokens
    f"get_soft_overlong_punishment{OVERLONG}": (["", ""], [[1] * 80, [1] * 90], None, [0.0, -0.5]),
}


def scored(name, texts, ids, solutions):
    columns = [{} if solutions is None else {"solution": solution} for solution in solutions or texts]
    prompts = [Prompt((1,), Example(QUESTION, columns=row)) for row in columns]
    function = find_rule(name)
    check_columns([function], [p.example for p in prompts], "--prompts x.jsonl")
    rewards = Rewards([function], None, None, limit_s=60)  # in a thread, as in a run
    return rewards.score(prompts, texts, ids, [True] * len(texts))


def test_every_function_of_trl_has_a_case():
    assert {name.partition("(")[0] for name in CASES} == {
        name for name in trl.rewards.__all__ if inspect.isroutine(getattr(trl.rewards, name))
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_math if name.partition("(")[0] in find.NEED_MATH_VERIFY else ())
        for name in CASES
    ],
)
def test_function_of_trl_gives_known_scores(name):
    texts, ids, solutions, expected = CASES[name]
    assert scored(f"trl:{name}", texts, ids, solutions).total == [
        None if score is None else pytest.approx(score) for score in expected
    ]


def test_arguments_in_parentheses_reach_the_function():
    name = "trl:get_repetition_penalty_reward(ngram_size=2, max_penalty=-3)"
    found = scored(name, ["", ""], [[1, 2, 3], [5] * 5], None)
    assert found.by_function == {"repetition_penalty_reward": [0.0, pytest.approx(-2.25)]}
    assert parse_cli(["--reward-func", name, "exact_match"]).reward.reward_func == (name, "exact_match")
    nested = "trl:f(a=1, b=(2, 3)),exact_match"
    assert parse_cli(["--reward-func", nested]).reward.reward_func == ("trl:f(a=1, b=(2, 3))", "exact_match")
    overlong = "trl:get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=5)"
    assert scored(overlong, [""], [[1] * 9], None).total == [-0.8]


@needs_math
def test_arguments_of_a_plain_function_are_fixed():
    text = "Reasoning. </answer> " + RIGHT
    given = ([text], [[1]], ["$5$"])
    assert scored("trl:reasoning_accuracy_reward", *given).total == [0.0]
    assert scored("trl:reasoning_accuracy_reward(reasoning_delimiters=['</answer>'])", *given).total == [1.0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("trl:think_format", "no 'think_format' in trl.rewards: --eval-func trl:think_format. Did you mean"),
        ("trl:think_format_reward(", "not a function of trl.rewards: --eval-func"),
        ("trl:get_repetition_penalty_reward(2)", "not a function of trl.rewards: --eval-func"),
        ("trl:get_soft_overlong_punishment", "missing 2 required positional arguments: 'max_completion_len'"),
        ("trl:get_repetition_penalty_reward(n=2)", "has no argument 'n'"),
        ("trl:get_repetition_penalty_reward(max_penalty=1)", "failed (max_penalty 1 should not be positive)"),
        ("trl:get_cosine_scaled_reward(max_len=__import__('os'))", "not a function of trl.rewards: --eval-func"),
    ],
)
def test_unknown_functions_and_arguments_are_refused(name, problem):
    with pytest.raises(UserError, match=escape(problem)):
        find_rule(name, flag="--eval-func")


def test_missing_math_verify_is_reported_before_the_run(monkeypatch, user_error):
    assert trl.rewards.accuracy_reward is not None  # TRL looks for math-verify when it imports this, once
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: None)
    for name in find.NEED_MATH_VERIFY:
        with user_error("math-verify", "trl[math-verify]==1.12.0"):
            find_rule(f"trl:{name}")


def test_function_that_needs_a_column_names_it(user_error):
    with user_error("accuracy_reward", "'solution'"):
        check_columns([trl.rewards.accuracy_reward], [Example(QUESTION, columns={"answer": "5"})], "--prompts x.jsonl")


def test_functions_of_trl_are_not_the_users_code():
    assert code_words({"reward_func": ["trl:think_format_reward"]}) == []

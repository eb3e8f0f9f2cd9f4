"""Tests reward functions: weighted sums, built-in rules, functions from files, modules, and every kind of failure."""

from __future__ import annotations

import os
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf.data.chat_template import encode_completion, encode_prompt
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rewards.find import find_rule
from rlhf.rewards.functions import keyword_bonus, length_penalty
from rlhf.rewards.rewards import Rewards
from rlhf.trainer.evaluation import flat
from rlhf.utils.errors import RunError
from tests.conftest import BY_TIER

FRANCE = ({"role": "user", "content": "What is the capital of France?"},)
PROMPTS = [Prompt((1,), Example(messages=FRANCE))] * 2
COMPLETIONS = (["one", "two words"], [[5, 2], [5, 6, 7]], [True, False])  # texts, ids, ended


@pytest.fixture
def tokenizer(start_model):
    return load_tokenizer(str(start_model))


@pytest.fixture
def score(tokenizer):
    def total(*functions, weights=None) -> list[float]:
        return Rewards(functions, weights, tokenizer).score(PROMPTS, *COMPLETIONS).total

    return total


def words(completions, **_):
    return [float(len(text.split())) for text in completions]


def ending(ended, **_):
    return [10.0 if e else 0.0 for e in ended]


def test_reward_functions_add_up_by_weight(score):
    assert score(words, ending) == [11.0, 2.0]
    assert score(words, ending, weights=[2.0, -0.5]) == [2 - 5.0, 4.0]


def test_each_functions_scores_are_stored(tokenizer):
    scores = Rewards([words, ending], [1.0, 0.1], tokenizer).score(PROMPTS, *COMPLETIONS)
    assert scores.by_function == {"words": [1.0, 2.0], "ending": [10.0, 0.0]}
    assert Rewards([words, words], None, tokenizer).names == ["words_1", "words_2"]


def test_functions_receive_trls_arguments_if_in_their_signature(score):
    seen = {}

    def all_arguments(**kwargs):
        seen.update(kwargs)
        return [0.0, 0.0]

    def one_argument(completions):
        return [1.0, 2.0]

    assert score(all_arguments, one_argument) == [1.0, 2.0]
    state, log_extra, log_metric = (seen.pop(name) for name in ("trainer_state", "log_extra", "log_metric"))
    assert state.global_step == state.max_steps == 1, "outside training: as at the end of a run"
    assert log_extra("column", [1, 2]) is log_metric("name", 1.0) is None
    assert seen == {
        "prompts": ["What is the capital of France?"] * 2,
        "completions": ["one", "two words"],
        "completion_ids": [[5, 2], [5, 6, 7]],
        "messages": [list(FRANCE)] * 2,
        "ended": [True, False],
    }


def test_async_function_is_awaited(score):
    async def slow(completions, **_):
        return [1.0] * len(completions)

    assert score(slow) == [1.0, 1.0]


def test_failing_function_is_called_once_and_its_line_is_named(score, user_error):
    calls = []

    def judge(completions, **_):
        calls.append(len(completions))
        raise ConnectionError("judge is down")

    with user_error("'judge'", "2 completions", kind=RunError) as error:
        score(judge)
    assert calls == [2] and re.match(r"test_rewards\.py:\d+ `raise ", str(error.value))


def test_number_of_weights_must_match_functions(tokenizer, user_error):
    for functions, weights in (([words], [1, 2]), ([words, ending], [1])):
        with user_error(len(functions)):
            Rewards(functions, weights, tokenizer)


def test_function_name_cannot_overwrite_a_metric(build):
    def std(completions, **_):
        return [-99.0] * len(completions)

    logged = build(rewards=[words, std]).update_step(1)
    assert logged["rewards/std"] >= 0 and logged["rewards/each/std"] == -99


@pytest.mark.parametrize("scores", [np.array([1.0, 2.0], dtype=np.float32), torch.tensor([1.0, 2.0]), (1, 2),
                                    [np.float32(1), np.int64(2)], [torch.tensor(1.0), torch.tensor(2)]])  # fmt: skip
def test_numbers_of_any_library_are_scores(score, scores):
    assert score(lambda **_: scores) == [1.0, 2.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "high"])
def test_non_finite_score_stops_the_run(score, bad, user_error):
    def broken(completions, **_):
        return [0.0, bad]

    with user_error("broken", "two words", kind=RunError):
        score(words, broken)


def test_wrong_number_of_scores_stops_the_run(score, user_error):
    def short(completions, **_):
        return [1.0]

    with user_error(2, "[1.0]", "short", "one", kind=RunError):
        score(short)


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_invalid_score_skips_the_update(build, algorithm):
    """One of two functions returns NaN for one completion. TRL's GRPO would ignore the NaN in the sum."""

    def sometimes(completions, **_):
        return [float("nan"), *[1.0] * (len(completions) - 1)]

    trainer = build(algorithm=algorithm, rewards=[words, sometimes])
    before = [w.detach().clone() for w in trainer.host.model.parameters()]
    reasons = []
    trainer.add_callback(SimpleNamespace(on_update_skipped=lambda *args: reasons.append(str(args[-1]))))
    trainer.update_step(1)
    assert len(reasons) == 1 and "reward function 'sometimes'" in reasons[0]
    assert trainer.progress.optimizer_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.host.model.parameters(), strict=True))


# --- built in, from a file, as a module ------------------------------------------------------------------------------


def test_built_in_rules_give_known_scores(score):
    assert score(length_penalty) == [-2.0, -3.0]
    assert score(keyword_bonus(["WORDS", "x"])) == [0.0, 1.0]
    assert score(find_rule("length_penalty", ()), find_rule("keyword_bonus", ("one",)), weights=[0.5, 2]) == [
        1.0,
        -1.5,
    ]


def test_rule_from_a_file(score, tmp_path, user_error):
    (tmp_path / "neighbour.py").write_text("PRICE = 3.0")
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour import PRICE\n"
        "@dataclass\nclass Settings:\n    price: float\n\n"
        "def concise(completions, **_):\n    return [-PRICE] * len(completions)\n"
        "class Flat:\n    def __call__(self, completions, **_):\n        return [7.0] * len(completions)\nx = 3\n"
        "class Needy:\n    def __init__(self, price): pass\n"
    )
    assert score(find_rule(f"{file}:concise", ())) == [-3.0, -3.0]
    assert score(find_rule(f"{file}:Flat", ())) == [7.0, 7.0], "a class is called to make the rule"
    with user_error("concize", "concise"):
        find_rule(f"{file}:concize", ())
    with user_error("my_rewards.py:x"):
        find_rule(f"{file}:x", ())
    with user_error("Needy()", "TypeError"):
        find_rule(f"{file}:Needy", ())
    with user_error("Settings()"):
        find_rule(f"{file}:Settings", ())


def test_a_changed_file_of_the_same_size_and_time_is_executed_again(score, tmp_path):
    file = tmp_path / "rule.py"
    file.write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    times = file.stat()
    assert score(find_rule(f"{file}:f", ())) == [1.0, 1.0]
    assert find_rule(f"{file}:f", ()) is find_rule(f"{file}:f", ()), "executed once"
    time.sleep(0.02)  # the clock of some file systems has steps of 10 ms
    file.write_text(file.read_text().replace("1.0", "2.0"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert score(find_rule(f"{file}:f", ())) == [2.0, 2.0]


def test_missing_rules_are_refused(tmp_path, user_error):
    with user_error("--reward-func lenght_penalty", "length_penalty"):
        find_rule("lenght_penalty", ())
    with user_error("nowhere.py"):
        find_rule(f"{tmp_path}/nowhere.py:f", ())
    (tmp_path / "broken.py").write_text("1 / 0")
    with user_error("ZeroDivisionError"):
        find_rule(f"{tmp_path}/broken.py:f", ())


class LastId(torch.nn.Module):
    """Scores a row by its last id that is not padding, plus a thousandth of the number of ids."""

    def forward(self, input_ids, attention_mask):
        last = attention_mask.sum(1) - 1
        return (input_ids.gather(1, last.unsqueeze(1)) + attention_mask.sum(1, keepdim=True) / 1000).float()


def test_module_receives_right_padded_ids(score, tokenizer):
    """A module of transformers expects the whole chat as its template renders it, as TRL's GRPOTrainer gives it."""
    end = [tokenizer.eos_token_id, *tokenizer("\n").input_ids]
    rows = [encode_prompt(tokenizer, FRANCE) + encode_completion(tokenizer, text, False) + end * ended
            for text, ended in zip(COMPLETIONS[0], COMPLETIONS[2], strict=True)]  # fmt: skip
    assert score(LastId()) == pytest.approx([row[-1] + len(row) / 1000 for row in rows])
    assert rows[0][-2:] == end != rows[1][-2:]


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_rules_score_training_and_evaluation(build, tmp_path, algorithm):
    flags = ["--rm-model", "none", "--reward-func", "length_penalty", "keyword_bonus", "--keywords", "cat"]
    trainer = build(*flags, "--reward-weights", 0.5, 2, algorithm=algorithm)
    logged = trainer.update_step(1)
    expected = 0.5 * logged["rewards/each/length_penalty"] + 2 * logged["rewards/each/keyword_bonus"]
    assert logged["rewards/mean"] == pytest.approx(expected, rel=1e-5)
    assert logged["rewards/each/length_penalty"] == pytest.approx(-logged["completions/mean_length"])
    trainer.evaluate()
    evaluation = trainer.evaluations[-1]
    bonus = [2.0 * ("cat" in text.casefold()) for text in flat(evaluation.texts)]
    expected = [b - 0.5 * n for b, n in zip(bonus, flat(evaluation.lengths), strict=True)]
    assert flat(evaluation.scores) == pytest.approx(expected)

"""Tests of the probes of a reward: right answers, probes, what they are paid, which are named, and a run's warning."""

from __future__ import annotations

import json
import math

import pytest
import torch

import train_ppo
from rlhf.api import make_trainer
from rlhf.config import make_config
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.rewards.find import find_rule
from rlhf.rewards.probes import (
    CUT_OFF,
    FEW,
    MOST,
    RIGHT,
    TOTAL,
    RewardReport,
    probe_rewards,
    probes_of,
    right_answer,
    show_reward_report,
)
from rlhf.rewards.rewards import Rewards
from rlhf.utils.console import Screen
from tests.shapes import smollm2_tokenizer

CPU = torch.device("cpu")
WITHOUT_AN_ANSWER = ["empty", "prompt copied", "repeated word", "markup only"]
HACKS = [
    *WITHOUT_AN_ANSWER,
    "another row's answer",
    "another row's in a sentence",
    CUT_OFF,
    "over-long list of answers",
]
BROKEN = """
import re
def digits_anywhere(completions, answer, **_):
    return [sum(text.count(digit) for digit in set(a)) for text, a in zip(completions, answer)]
def longer(completions, **_):
    return [len(text) / 100 for text in completions]
def last_word(completions, answer, **_):
    return [float(text.split()[-1].strip(".") == a) for text, a in zip(completions, answer)]
def no_number(completions, answer, **_):
    found = [re.findall(r"[0-9]+", text) for text in completions]
    return [float(numbers[-1] == a) if numbers else float("nan") for numbers, a in zip(found, answer)]
def says_answer(completions, **_):
    return [float("answer" in text.lower()) for text in completions]
def right(completions, answer, **_):
    return [float(text in (a, f"The answer is {a}.")) for text, a in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def tokenizer():
    return smollm2_tokenizer()


@pytest.fixture
def broken(tmp_path):
    """Return a function that returns the name of a function in BROKEN for --reward-func."""
    (tmp_path / "broken.py").write_text(BROKEN)
    return lambda name: f"{tmp_path / 'broken.py'}:{name}"


@pytest.fixture
def flags(run_flags, tmp_path):
    """Return a function that makes flags of a tiny run with the column `answer` and one reward function."""
    rows = [{"prompt": f"What is {i} + 10?", "answer": str(i + 10)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def make(rule: object, *more: object) -> list[str]:
        reward = ["--rm-model", "none", "--reward-func", rule, "--prompts", tmp_path / "rows.jsonl"]
        return run_flags(*reward, "--split", "0/80/20", "--max-new-tokens", 64, "--kl-schedule", "fixed", *more)

    return make


def sums(count: int = 6) -> list[Prompt]:
    """Return prompts with two-digit answers 10, 11, ..."""
    return [
        Prompt((1, 2), Example(({"role": "user", "content": f"What is {i} + 10?"},), columns={"answer": str(i + 10)}))
        for i in range(count)
    ]


def configured_for(length: int = 64, **settings):
    return make_config("smollm2-orca", max_new_tokens=length, **settings)


def report_of(tokenizer, *functions, weights=None, prompts=None, most=MOST, length=64, **settings) -> RewardReport:
    rewards = Rewards(functions, weights, tokenizer, limit_s=20)
    return probe_rewards(configured_for(length, **settings), rewards, prompts or sums(), tokenizer, most)


# --- right answers and probes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"chosen": " Paris. #### 3 ", "columns": {"answer": "7"}}, "Paris. #### 3"),
        ({"columns": {"answer": "6 * 7 = 42\n#### 42"}}, "42"),
        ({"columns": {"answer": 7, "solution": "8"}}, "7"),
        ({"columns": {"answer": float("nan"), "solution": r"So \boxed{x^2}."}}, "x^2"),
        ({"columns": {"answer": " ", "completion": "A cat."}}, "A cat."),
        ({"columns": {"answer": None, "solution": ["7"], "other": "8"}}, None),
        ({}, None),
    ],
)
def test_right_answer_of_a_row(row, answer):
    assert right_answer(Example(({"role": "user", "content": "?"},), **row)) == answer


def test_probes_of_a_prompt(tokenizer):
    found = probes_of(configured_for(), sums(), tokenizer)
    assert len(found) == 6 and all(list(probes) == [*RIGHT, *HACKS] for probes in found)
    for probes in found:
        answer = probes["empty"].prompt.example.columns["answer"]
        assert probes["right answer"].text == answer and probes["right answer in a box"].text == f"\\boxed{{{answer}}}"
        assert probes[CUT_OFF].text == answer[0] and [n for n, p in probes.items() if not p.ended] == [CUT_OFF]
        assert probes["prompt copied"].text == probes["empty"].prompt.example.messages[-1]["content"]
        assert probes["another row's answer"].text in {str(i + 10) for i in range(6)} - {answer}
        assert sorted(probes["over-long list of answers"].text.split()) == [str(i + 10) for i in range(6)]
        assert all((p.ids[-1] == tokenizer.eos_token_id) == p.ended for p in probes.values())
        assert len(probes["repeated word"].ids) == max(len(p.ids) for p in probes.values()) == 64


def test_without_right_answers_the_probes_need_none(tokenizer):
    rows = [Prompt((1,), Example(({"role": "user", "content": f"Why {i}?"},))) for i in range(40)]
    found = probes_of(configured_for(), rows, tokenizer)
    assert len(found) == MOST and all(list(probes) == WITHOUT_AN_ANSWER for probes in found)


def test_prompts_with_a_right_answer_that_fits_are_used(tokenizer):
    long = Prompt((1,), Example(({"role": "user", "content": "?"},), columns={"answer": "Paris " * 60}))
    for tokens, count in ((64, 6), (4, 6), (2, 0)):  # two digits and EOS
        probes = probes_of(configured_for(tokens), [long, *sums()], tokenizer)
        assert len([one for one in probes if "right answer" in one]) == count, tokens
        assert max(len(probe.ids) for one in probes for probe in one.values()) == tokens


@pytest.mark.parametrize(("length", "cut"), [(64, set()), (24, {"right answer in tags"}), (4, None)])
def test_probes_that_are_longer_than_a_completion_are_marked(tokenizer, length, cut):
    """The repeated word is as long as a completion may be, and not longer. Without its end, the answer in tags would
    look like a wrong reward."""
    (probes, *_) = probes_of(configured_for(length), sums(), tokenizer)
    marked = {name for name, probe in probes.items() if probe.cut}
    assert "repeated word" not in marked and len(probes["repeated word"].ids) == length
    assert all(len(probes[name].ids) == length and probes[name].ids[-1] == tokenizer.eos_token_id for name in marked)
    if cut is None:
        assert "right answer" not in marked and {"right answer in tags", "markup only"} <= marked
    else:
        assert marked & {*RIGHT} == cut


def test_table_marks_cut_probes(tokenizer, capsys):
    report = report_of(tokenizer, find_rule("last_number"), length=24)
    show_reward_report(report, 24, Screen())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines if line.endswith("  cut")] == [
        name for name in report.scores if name in report.cut
    ]
    assert any(line.startswith("cut: ") and "--max-new-tokens 24" in line for line in lines)


@pytest.mark.parametrize(
    ("rule", "said"), [("right", True), ("last_number", True), ("says_answer", False), ("last_word", False)]
)
def test_last_sentence(tokenizer, broken, capsys, rule, said):
    """Only if no function fails and no probe is paid like the right answer."""
    report = report_of(tokenizer, find_rule(rule if rule == "last_number" else broken(rule)))
    show_reward_report(report, 64, Screen())
    out = capsys.readouterr().out
    assert out.endswith("no probe is paid like the right answer\n") == said
    assert "cut: " not in out


# --- what they are paid ----------------------------------------------------------------------------------------------


def test_hacks_of_hand_made_scores():
    """On average the box is the best form, with (1 + 2) / 2."""
    totals = {
        "right answer": [1.0, 1.0],
        "right answer in a box": [1.0, 2.0],
        "right answer in tags": [math.nan, 9.0],  # a function fails: no form to compare with
        "empty": [2.0, 0.9],  # less on average
        "prompt copied": [0.0, 3.0],  # as much on average
        "markup only": [1.0, 2.0],  # as much for each prompt
        "repeated word": [None, 2.5],  # more for the prompt with a score
        CUT_OFF: [math.nan, 9.0],
        "another row's answer": [None, None],
    }
    report = RewardReport("1 x f", 2, {name: {TOTAL: scores} for name, scores in totals.items()})
    assert report.best == "right answer in a box" and report.mean(report.best) == 1.5
    assert report.hacks() == ["prompt copied", "markup only", "repeated word"]
    assert report.hacks(every=True) == ["markup only", "repeated word"]
    assert report.mean("another row's answer") is None and math.isnan(report.mean(CUT_OFF))
    (line,) = map(str, report.problems())
    assert "prompt copied, markup only, repeated word" in line and "1 x f" in line


def test_without_a_right_answer_no_hack_is_named():
    report = RewardReport("1 x f", 1, {"empty": {TOTAL: [1.0]}})
    assert (report.best, report.hacks(), report.problems()) == (None, [], [])


ANYWHERE = ["markup only", "another row's answer", "another row's in a sentence"]


@pytest.mark.parametrize(
    ("rule", "hacks", "failing"),
    [
        ("exact_match", [], []),
        ("last_number", [], []),
        ("length_penalty", ["empty", "another row's answer", CUT_OFF], []),
        ("digits_anywhere", ["prompt copied", "over-long list of answers"], []),
        ("longer", ["repeated word"], []),
        ("last_word", [], ["empty"]),
        ("no_number", [], [*WITHOUT_AN_ANSWER[:1], *WITHOUT_AN_ANSWER[2:]]),
        ("says_answer", ["repeated word", "markup only", "another row's in a sentence"], []),
        ("right", [], []),
    ],
)
def test_functions_are_judged(tokenizer, broken, rule, hacks, failing):
    built_in = rule in ("exact_match", "last_number", "length_penalty")
    report = report_of(tokenizer, find_rule(rule if built_in else broken(rule)))
    assert report.hacks() == hacks
    assert [name for name in report.scores if math.isnan(report.mean(name))] == failing
    assert list(report.failures) == ([rule] if failing else []) and len(report.problems()) == len(
        [*hacks, *failing][:1]
    )


def test_scores_of_a_checker_by_hand(tokenizer):
    """`last_number` reads the answer of every form, and none of a completion that was cut off."""
    report = report_of(tokenizer, find_rule("last_number"))
    means = {name: report.mean(name) for name in report.scores}
    assert [means[name] for name in RIGHT] == [1] * len(RIGHT)
    assert {name for name in HACKS if means[name] != 0} == {"prompt copied"}
    assert means["prompt copied"] == pytest.approx(1 / 6)  # "What is 0 + 10?"


def test_total_is_the_weighted_sum_with_the_penalty_for_a_missing_eos(tokenizer):
    def one(completions, **_):
        return [1.0] * len(completions)

    def none(completions, **_):
        return [None if text else 2.0 for text in completions]

    report = report_of(tokenizer, one, none, weights=[3.0, 0.5], missing_eos_penalty=0.25)
    means = {name: (report.mean(name, "one"), report.mean(name, "none"), report.mean(name)) for name in report.scores}
    assert means["empty"] == (1, 2, 4) and means["right answer"] == (1, None, 3) and means[CUT_OFF] == (1, None, 2.75)


def test_no_call_is_repeated_and_no_other_prompt_scored_after_the_time_limit(tokenizer, monkeypatch):
    monkeypatch.setattr("rlhf.rewards.probes.MOST_SECONDS", 0.0)
    calls = []

    def slow(completions, **_):
        calls.append(len(completions))
        raise ValueError("too slow")

    report = report_of(tokenizer, slow)
    assert report.prompts == 1 and calls == [len(RIGHT) + len(HACKS)] and list(report.failures) == ["slow"]


# --- the warning of a run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "warned"), [("right", False), ("says_answer", True), ("last_word", True), ("slow", False)]
)
def test_run_prints_one_line_before_its_first_update(flags, broken, monkeypatch, capsys, rule, warned):
    """Nothing is called if the evaluation of the start model has shown that the probes would take long."""
    if rule == "slow":
        monkeypatch.setattr("rlhf.callbacks.reward_warning.MOST_SECONDS", 0.0)
    train_ppo.main(flags(broken("says_answer" if rule == "slow" else rule), "--num-iterations", 1))
    before = capsys.readouterr().out.split("update 1/1")[0]
    lines = [line for line in before.splitlines() if line.startswith("warning: ") and "--check reward" in line]
    assert len(lines) == warned
    assert all(rule in line for line in lines)


def test_probes_of_a_run_are_few(config_of_program, tokenizer):
    """One call per prompt follows the evaluation of the start model, with all probes."""
    calls = []

    def words(completions, **_):
        calls.append(len(completions))
        return [float(len(text)) for text in completions]

    rows = [{"prompt": f"What is {i} + 10?", "answer": str(i + 10)} for i in range(8)]
    make_trainer(config_of_program(num_iterations=1, batch_size=2), rows, [words]).train()
    assert calls.count(len(RIGHT) + len(HACKS)) == FEW


@pytest.fixture
def config_of_program(start_model):
    def make(**settings):
        usual = {"actor_model": str(start_model), "rm_model": None, "max_new_tokens": 32, "prompt_length": 100}
        return make_config("smollm2-orca", **{**usual, **settings})

    return make

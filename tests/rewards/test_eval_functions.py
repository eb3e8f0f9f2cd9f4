"""Tests of exact match and last number."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.rewards.answers import NUMBER, number_at_end
from rlhf.rewards.eval_functions import exact_match, last_number
from rlhf.rewards.find import find_rule
from rlhf.utils.errors import UserError

COMPLETIONS = Path(__file__).parent / "last_number_completions.jsonl"


def test_exact_match_reads_chats_and_has_no_score_without_an_answer():
    chat = [{"role": "assistant", "content": "#### 4"}]
    assert exact_match([chat, "#### 4", "4", ""], answer=["4", None, "5", ""]) == [1.0, None, 0.0, 1.0]
    assert exact_match(["nan", "3"], answer=[float("nan"), np.int64(3)]) == [None, 1.0]


def test_exact_match_accepts_every_kind_of_number():
    assert exact_match(["4"] * 4, answer=[4, 4.0, Decimal("4.0"), np.int64(4)]) == [1.0] * 4


def test_exact_match_refuses_an_answer_that_is_neither_text_nor_a_number():
    with pytest.raises(TypeError, match=r"'answer' contains \['4'\]"):
        exact_match(["4"], answer=[["4"]])


@given(st.text(max_size=60), st.text(max_size=60))
def test_exact_match_of_any_text_is_0_or_1_and_of_equal_text_1(one, other):
    assert exact_match([one, one], answer=[one, other])[0] == 1.0
    assert exact_match([one], answer=[other])[0] in (0.0, 1.0)


LAST_NUMBERS = [  # completion that ended -> its last number
    ("22", "22"),
    ("7 + 15 = 22", "22"),
    ("7 + 15 is 22.", "22"),
    ("The answer is 12.0", "12"),
    ("It costs $1,234.50.", "1234.5"),
    ("It costs 1,234,567 dollars!", "1234567"),
    ("That is 12%.", "12"),
    ("She has 12 apples left.", "12"),
    ("12 km, or 12000m", "12000"),
    ("3-4", "4"),
    ("pages 10-20", "20"),
    ("5%-7%", "7"),
    ("(3)-4", "4"),
    ("-4", "-4"),
    ("3 - 7 = -4", "-4"),
    ("x=-4", "-4"),
    ("3 \u2212 7 = \u22124", "-4"),
    ("-$4", "-4"),
    ("$-4", "-4"),
    ("- 4", "4"),  # an item of a list
    ("#### 72", "72"),
    ("#### 72\nThat took 3 steps", "3"),
    ("**22**", "22"),
    ("\\boxed{22}", "22"),
    ("\\(7 + 15 = 22\\)", "22"),
    (".5", "0.5"),
    ("It is .5", "0.5"),
    ("No.5", "5"),
    ("1.2.3", "3"),
    ("so 3..5", "5"),
    ("1, 2, 3", "3"),
    ("1,2,3", "3"),
    ("1,0000", "1"),  # not a thousands separator, so a decimal comma
    ("1000,500", "1000.5"),
    ("2e3", "2000"),
    ("12eggs", "12"),
    ("1 200", "200"),
    ("1/2", "1/2"),
    ("3 1/2", "7/2"),
    ("1/0", "0"),
    ("25/11/2026", "2026"),
    ("3x4", "4"),
    ("the 12th", "12"),
    ("7 + 15 = 22. Is that all?", "22"),
    ("twenty-two", None),
    ("", None),
    ("...", None),
    ("$", None),
]
CUT_OFF = [  # completion that was cut off -> its last number that is certainly complete
    ("7 + 15 = 22", "15"),
    ("7 + 15 = 22.", "15"),
    ("7 + 15 = 22,", "15"),
    ("7 + 15 = 22.5", "15"),
    ("7 + 15 = 2,2", "15"),
    ("7 + 15 = 22e", "15"),
    ("7 + 15 = 22e-1", "15"),
    ("7 + 15 = -22", "15"),
    ("7 + 15 = $22", "15"),
    ("7 + 15 = $", "15"),
    ("7 + 15 = 22 ", "22"),
    ("7 + 15 = 22\n", "22"),
    ("7 + 15 = 22. ", "22"),
    ("7 + 15 = 22%", "22"),
    ("7 + 15 = 22)", "22"),
    ("7 + 15 = 22 apples", "22"),
    ("7 + 15 = 22 apples.", "22"),
    ("1 2", "1"),
    ("3-4", "3"),
    ("7 + 15 = 1/2", "15"),
    ("7 + 15 = 10{,}0", "15"),
    ("7 + 15 = 10\\,0", "15"),
    ("7 + 15 = \\frac{1}{2", "15"),
    ("7 + 15 = -(1", "15"),
    ("7 + 15 = -(1/2)", "-1/2"),
    ("7 + 15 = \\frac{1}{2}", "1/2"),
    ("\\boxed{22}", "22"),
    ("22", None),
    ("22.", None),
    ("\u0662\u0662", None),  # Arabic digits
    ("", None),
]


@pytest.mark.parametrize(("completion", "number"), LAST_NUMBERS)
def test_last_number_of_a_completion_that_ended(completion, number):
    assert number_at_end(completion) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(("completion", "number"), CUT_OFF)
def test_a_number_that_touches_the_cut_off_does_not_count(completion, number):
    assert number_at_end(completion, ended=False) == (None if number is None else Fraction(number))


def test_last_number_scores():
    chat = [{"role": "assistant", "content": "She has 12 apples."}]
    completions = [chat, "12", "12", "12", "12 or 13", "none"]
    answers = ["12", 12.0, "so 6 + 6 = 12\n#### 12 apples", "$12.00", "12", "12"]
    assert last_number(completions, answer=answers) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert last_number(["= 12", "= 12", "= 12 "], answer=["12"] * 3, ended=[True, False, False]) == [1.0, 0.0, 1.0]
    assert last_number(["12"] * 4, answer=[None, float("nan"), "Paris", np.int64(12)]) == [None, None, None, 1.0]
    with pytest.raises(TypeError, match=r"'answer' contains \['4'\]"):
        last_number(["4"], answer=[["4"]])
    assert find_rule("last_number", ()) is last_number


def test_last_number_of_40_completions_of_a_real_model():
    """Sampled from SmolLM2-135M-Instruct (4-bit weights, dequantized) on questions of smollm2-sums, at most 24 tokens
    at temperature 1. `right` was written down by reading them, not with the code."""
    rows = [json.loads(line) for line in COMPLETIONS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 40 and sum(row["right"] for row in rows) == 6
    completions, answers, ended = ([row[name] for row in rows] for name in ("completion", "answer", "ended"))
    scores = last_number(completions, answer=answers, ended=ended)
    assert [row for row, score in zip(rows, scores, strict=True) if score != row["right"]] == []


@given(st.text("130.,-$e% a", max_size=10), st.text("10.,-$e% a", max_size=4))
def test_the_number_of_a_cut_off_completion_stays_one_of_its_numbers_whatever_follows(text, more):
    complete = number_at_end(text, ended=False)
    assert complete is None or complete in {number_at_end(found[0]) for found in NUMBER.finditer(text + more)}


def test_errors_name_the_flag():
    with pytest.raises(UserError, match="--eval-func exact_mach"):
        find_rule("exact_mach", (), "--eval-func")
    with pytest.raises(UserError, match=r"--eval-func nowhere\.py:f"):
        find_rule("nowhere.py:f", (), "--eval-func")
    assert find_rule("exact_match", ()) is exact_match

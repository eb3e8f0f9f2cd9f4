"""Tests of exact match and last number, and of pass@k against an enumeration of all subsets."""

from __future__ import annotations

from decimal import Decimal
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.rewards.eval_functions import NUMBER, attempts, exact_match, last_number, number_at_end, pass_at_k
from rlhf.rewards.find import find_rule
from rlhf.utils.errors import UserError

RIGHT = [
    ("72", "72"),
    ("48 / 2 = 24 and 24 + 48 = 72.\n#### 72", "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"),  # gsm8k
    ("#### 5\n#### 72", "72"),  # the last one
    ("#### 72\nThat is all.", "72"),  # one line
    ("The answer is \\boxed{72}.", "#### 72"),
    ("\\boxed{1} and then \\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{2}}"),
    ("\\boxed{3} #### 4", "4"),  # #### before \boxed{}
    ("1,000", "1000"),
    ("$1,000.00", "1000"),
    ("$ 1000", "1,000."),
    ("-3.50", "-3.5"),
    ("+7", "7"),
    (".5", "0.5"),
    ("1e3", "1000"),
    ("  Paris ", "paris"),
    ("New   York.", "new york"),
    ("STRASSE", "straße"),
    ("72.0", 72),
    ("0.25", 0.25),
    ("", ""),
]
WRONG = [
    ("73", "72"),
    ("the answer is 72", "72"),  # no mark: the whole text counts
    ("#### 72 apples", "72"),
    ("72 #### 73", "72"),
    ("10,00", "1000"),  # not thousands
    ("7.2", "72"),
    ("-72", "72"),
    ("\\boxed{72", "72"),
    ("Paris..", "Paris"),
    ("", "72"),
    (".", "0"),
]


@pytest.mark.parametrize(("completion", "answer"), RIGHT)
def test_equal_answers_match(completion, answer):
    assert exact_match([completion], answer=[answer]) == [1.0]


@pytest.mark.parametrize(("completion", "answer"), WRONG)
def test_other_answers_do_not_match(completion, answer):
    assert exact_match([completion], answer=[answer]) == [0.0]


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
    ("1,0000", "0"),  # not a thousands separator
    ("1000,500", "500"),
    ("2e3", "2000"),
    ("12eggs", "12"),
    ("1 200", "200"),
    ("1/2", "2"),
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
    ("22", None),
    ("22.", None),
    ("\u0662\u0662", None),  # Arabic digits
    ("", None),
]


@pytest.mark.parametrize(("completion", "number"), LAST_NUMBERS)
def test_last_number_of_a_completion_that_ended(completion, number):
    assert number_at_end(completion) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(("completion", "number"), CUT_OFF)
def test_a_number_that_touches_the_cut_off_does_not_count(completion, number):
    assert number_at_end(completion, ended=False) == (None if number is None else Decimal(number))


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


@given(st.text("130.,-$e% a", max_size=10), st.text("10.,-$e% a", max_size=4))
def test_the_number_of_a_cut_off_completion_stays_one_of_its_numbers_whatever_follows(text, more):
    complete = number_at_end(text, ended=False)
    assert complete is None or complete in {number_at_end(found[0]) for found in NUMBER.finditer(text + more)}


@given(st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_completion(data):
    n = data.draw(st.integers(1, 9))
    right = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n))
    subsets = list(combinations(right, k))
    assert pass_at_k(n, sum(right), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 3 of the 6 pairs contain the right one
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert pass_at_k(3, 0, 3) == 0.0
    assert pass_at_k(3, 1, 3) == pass_at_k(1, 1, 1) == 1.0


def test_pass_at_k_of_many_completions_does_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)  # C(10000, 5000) is about 1e3008


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_refuses_impossible_numbers(n, c, k):
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(n, c, k)


def test_attempts_are_powers_of_two_and_n():
    assert [attempts(n) for n in (1, 2, 4, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_errors_name_the_flag():
    with pytest.raises(UserError, match="--eval-func exact_mach"):
        find_rule("exact_mach", (), "--eval-func")
    with pytest.raises(UserError, match=r"--eval-func nowhere\.py:f"):
        find_rule("nowhere.py:f", (), "--eval-func")
    assert find_rule("exact_match", ()) is exact_match

"""Tests of exact match, and of pass@k against an enumeration of all subsets."""

from __future__ import annotations

from decimal import Decimal
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.rewards.eval_functions import attempts, exact_match, pass_at_k
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

"""The table of `exact_match`: completions that equal an answer, and completions that do not.

A row was judged by a person before the rule was written: is this completion a right answer to a question with that
answer? Rows stand in groups, one group for each form.
"""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.rewards.eval_functions import exact_match, last_number

NFC = "caf\u00e9"
NFD = "cafe\u0301"
EQUAL = [
    # the mark: \boxed{}, then ####, then the whole text
    ("72", "72"),
    ("#### 72", "72"),
    ("####72", "72"),
    ("48 / 2 = 24 and 24 + 48 = 72.\n#### 72", "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"),  # gsm8k
    ("#### 5\n#### 72", "72"),  # the last one
    ("####\n72", "72"),
    ("#### 72\nThat is all.", "72"),
    ("#### Paris\nThat is all.", "Paris"),
    ("The answer is \\boxed{72}.", "#### 72"),
    ("\\boxed{1} and then \\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{2}}"),
    ("\\boxed{\\boxed{5}}", "5"),
    ("\\boxed {5}", "5"),
    ("\\boxed{3} #### 4", "3"),  # \boxed{} before ####
    ("#### \\boxed{42}", "42"),
    ("#### Solution\nThe result is \\boxed{42}", "42"),  # #### is a Markdown heading, too
    ("\\boxed{42}\n\n#### Explanation\nbecause 6*7", "42"),
    ("#### 42\n\n#### Explanation\nbecause 6*7", "42"),
    ("#### Step 1\n6*7 = 42\n\n#### 42", "42"),
    ("#### 42\n#### ", "42"),
    # Markdown
    ("#### **42**", "42"),
    ("**42**", "42"),
    ("**42.**", "42"),
    ("**42**.", "42"),
    ("***42***", "42"),
    ("*Paris*", "Paris"),
    ("`42`", "42"),
    ("# 42", "42"),
    ("__42__", "42"),
    ('"Paris"', "Paris"),
    ("\\boxed{**7**}", "7"),
    ("**42** cm", "42 cm"),
    # LaTeX
    ("$5$", "5"),
    ("$$5$$", "5"),
    ("\\boxed{$5$}", "5"),
    ("\\(5\\)", "5"),
    ("\\[ 5 \\]", "5"),
    ("\\boxed{\\text{Paris}}", "paris"),
    ("\\mathbf{7}", "7"),
    ("\\boxed{x = 5}", "x=5"),
    ("\\left( 1, 2 \\right)", "(1,2)"),
    ("\\{1, 2\\}", "{1,2}"),
    ("3 \\sqrt{2}", "3\\sqrt{2}"),
    ("\\dfrac{\\pi}{2}", "\\frac{\\pi}{2}"),
    ("x^{2}", "x^2"),
    # sign, Unicode minus and digits
    ("-3.50", "-3.5"),
    ("+7", "7"),
    ("\u22125", "-5"),
    ("\\boxed{\u22125}", "-5"),
    ("\u20135", "-5"),  # an en dash
    ("- 5", "-5"),
    ("\uff14\uff12", "42"),  # full width
    ("\u0664\u0662", "42"),  # Arabic
    ("\u0663\u066b\u0665", "3.5"),
    ("\U0001d7d2\U0001d7d0", "42"),  # mathematical bold
    # decimals, thousands
    (".5", "0.5"),
    ("72.0", 72),
    ("0.25", 0.25),
    ("42.", "42"),
    ("1,000", "1000"),
    ("1,000.", "1000"),
    ("1,234,567.50", "1234567.5"),
    ("\\boxed{10{,}000}", "10000"),
    ("\\boxed{10,\\!000}", "10000"),
    ("10\\,000", "10000"),
    ("10 000", "10000"),
    ("10\u202f000", "10000"),  # a narrow no-break space
    ("1\u2019000", "1000"),  # Switzerland
    ("0,5", "0.5"),  # European decimals
    ("3,14", "3.14"),
    ("0,500", "0.5"),
    ("1.234,56", "1234.56"),
    ("1.234.567", "1234567"),
    ("1 234,56", "1,234.56"),
    ("0.1", 0.1),
    ("123456789012345678901234567890", "123,456,789,012,345,678,901,234,567,890"),
    # units, currency, percent
    ("$1,000.00", "1000"),
    ("$ 1000", "1,000."),
    ("\\boxed{\\$42}", "42"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("42 \u20ac", "42"),
    ("\u20ac42", "42 euros"),
    ("$5", "5 dollars"),
    ("USD 5", "$5"),
    ("\u00a35", "5 pounds"),
    ("5 lbs", "5 pounds"),
    ("$5 per hour", "$5/hour"),
    ("\\boxed{42\\text{ cm}}", "42"),
    ("\\boxed{42\\text{cm}}", "42 centimetres"),
    ("5\\,\\mathrm{m}", "5 m"),
    ("5 m", "5 meters"),
    ("5m", "5 m"),
    ("12 cm\u00b2", "12 square centimeters"),
    ("12 cm^{2}", "12"),
    ("12 \\text{ cm}^2", "12 cm\u00b2"),
    ("60 km/h", "60 kilometers per hour"),
    ("60 mph", "60 miles per hour"),
    ("90^\\circ", "90"),
    ("90\u00b0", "90 degrees"),
    ("20 \u2103", "20\u00b0C"),
    ("50%", "50"),
    ("50\\%", "50 percent"),
    ("12.5 %", "12.5%"),
    # fractions
    ("\\frac{1}{2}", "1/2"),
    ("\\dfrac{1}{2}", "0.5"),
    ("\\frac12", "0.5"),
    ("-\\frac{1}{2}", "-0.5"),
    ("\\frac{-1}{2}", "-1/2"),
    ("2/4", "1/2"),
    ("\u00bd", "1/2"),
    ("1\u00bd", "1.5"),
    ("1 1/2", "3/2"),
    ("1\\frac{1}{2}", "1.5"),
    ("\\frac{1}{-2}", "-0.5"),
    ("-(5)", "-5"),
    ("-( 5 )", "-5"),
    ("-\\left(5\\right)", "-5"),
    ("-(\u00bd)", "-0.5"),
    ("-(5 m)", "-5 m"),
    ("\\frac{3}{4} cm", "0.75 cm"),
    # scientific
    ("1e3", "1000"),
    ("1.5E-3", "0.0015"),
    ("1.5 x 10^3", "1500"),
    ("1.5 \\times 10^{3}", "1500"),
    ("1.5\u00d710\u00b3", "1500"),
    ("2\\cdot10^{-2}", "0.02"),
    ("2\u00d710\u207b\u00b2", "0.02"),
    ("10\u00b3", "1000"),
    # text
    ("  Paris ", "paris"),
    ("New   York.", "new york"),
    ("STRASSE", "stra\u00dfe"),
    (NFC, NFD),
    (NFD, NFC),
    ("5\u200b", "5"),  # a zero-width space
    ("\ufeffParis", "Paris"),
    ("don\u2019t", "don't"),
    ("\ufb01ve", "five"),  # a ligature
    ("x\u00b2", "x^2"),
    ("(1, 2)", "(1,2)"),
    ("3, 14", "3,14"),  # a list
    ("True", True),
    ("", ""),
]
DIFFERENT = [
    # the mark
    ("73", "72"),
    ("the answer is 72", "72"),  # no mark: the whole text counts
    ("#### the answer is 72", "72"),
    ("72 #### 73", "72"),
    ("\\boxed{3} #### 4", "4"),
    ("\\boxed{72", "72"),
    ("\\boxed{1} or \\boxed{2", "1"),
    ("#### Solution\nThe result is 42", "42"),
    ("#### 5\nActually:\n#### no solution", "5"),
    ("\\boxed{42} \\boxed{}", "42"),
    # empty, and marks alone
    ("", "72"),
    (".", "0"),
    (".", ""),
    ("**", ""),
    ("\\(\\)", ""),
    ("0", ""),
    ("Paris..", "Paris"),
    # sign
    ("-72", "72"),
    ("72", "\u221272"),
    ("--5", "-5"),
    ("-$-5", "5"),
    ("-(3+4)", "-7"),  # formulas are not computed
    # decimals, thousands
    ("7.2", "72"),
    ("10,00", "1000"),
    ("0,500", "500"),
    ("000,500", "500"),
    ("1,00", "100"),
    ("1,0000", "10000"),
    ("12,34", "1234"),
    ("1.234", "1234"),
    ("1, 234", "1234"),  # a list
    ("1 2", "12"),
    ("100 20", "10020"),
    ("1,234 567", "1234567"),
    ("1,2,3", "123"),
    ("3, 14", "3.14"),
    ("5, 5", "5.5"),
    ("123456789012345678901234567891", "123456789012345678901234567890"),
    ("0.1000000000000000055511151231257827", 0.1),
    # units, currency, percent
    ("5 km", "5 m"),
    ("$5", "\u20ac5"),
    ("5 cm", "5 cm^2"),
    ("50%", "0.5"),
    ("50%", "50 cm"),
    ("5 million", "5"),
    ("5 apples", "5"),
    ("5m", "5"),  # may be a formula
    ("5x", "5"),
    ("x = 5", "5"),
    ("5!", "5"),
    ("60 km/h", "60 m/s"),
    # fractions
    ("1/2", "12"),
    ("1\u00bd", "11/2"),
    ("1 1/2", "11/2"),
    ("0.333", "1/3"),
    ("1/0", "0"),
    ("\\frac{1}{2}x", "1/2x"),  # x/2, or 1/(2x)
    ("1:2", "1/2"),
    ("x/2", "\\frac{x}{2}"),  # formulas are not computed
    ("2^3", "8"),
    # powers and indices
    ("5\u00b2", "52"),
    ("10\u2075", "105"),
    ("x\u2081", "x1"),
    ("101\u2082", "1012"),
    ("x^{1}0", "x^10"),
    ("1e3", "13"),
    ("1e3", "1e-3"),
    ("10^3", "103"),
    # text
    ("cafe", NFC),
    ("2**3**2", "232"),
    ("__init__", "init"),
    ("therapist", "the rapist"),
    ("C", "C#"),
    ("72 or 73", "72"),
]
CUT_OFF = [  # completion that was cut off, answer, score
    ("#### 12", "12", 0.0),  # of #### 123
    ("#### 12", "123", 0.0),
    ("#### 12.", "12", 0.0),
    ("#### Pari", "Pari", 0.0),
    ("#### 12\n", "12", 1.0),
    ("#### 12\nThat is", "12", 1.0),
    ("#### 12\n#### Expl", "12", 1.0),
    ("\\boxed{12}", "12", 1.0),
    ("\\boxed{12} is", "12", 1.0),
    ("\\boxed{12", "12", 0.0),
    ("\\boxed{1} or \\boxed{1", "1", 0.0),
    ("12", "12", 0.0),
    ("12 ", "12", 0.0),
    ("Paris", "Paris", 0.0),
    ("", "", 0.0),
]


def test_the_table_is_large():
    assert len(EQUAL) >= 100 and len(DIFFERENT) >= 50
    assert len({*map(str, EQUAL), *map(str, DIFFERENT)}) == len(EQUAL) + len(DIFFERENT)


@pytest.mark.parametrize(("completion", "answer"), EQUAL)
def test_equal(completion, answer):
    assert exact_match([completion, str(answer)], answer=[answer, completion]) == [1.0, 1.0]


@pytest.mark.parametrize(("completion", "answer"), DIFFERENT)
def test_different(completion, answer):
    assert exact_match([completion, str(answer)], answer=[answer, completion]) == [0.0, 0.0]


@pytest.mark.parametrize(("completion", "answer", "score"), CUT_OFF)
def test_an_answer_at_the_cut_off_does_not_count(completion, answer, score):
    assert exact_match([completion], answer=[answer], ended=[False]) == [score]


LAST_NUMBERS = [  # the same forms in a sentence: completion, answer, score of last_number
    ("That is 10{,}000.", "10000", 1.0),
    ("That is $10,\\!000$.", "10,000", 1.0),
    ("It is 10\u202f000 m.", "10000", 1.0),
    ("It costs \\$42.", "42", 1.0),
    ("It is \uff14\uff12.", "42", 1.0),
    ("It is \u20135.", "-5", 1.0),
    ("It is 5 m\u00b2.", "5", 1.0),
    ("It is 1/2.", "1/2", 1.0),
    ("It is \\frac{1}{2}.", "0.5", 1.0),
    ("It is 3/2.", "1/2", 0.0),
    ("It is 0,500.", "500", 0.0),
    ("It is 0,500.", "0.5", 1.0),
    ("It is 000,500.", "500", 0.0),
    ("It is 1.234,56.", "1234.56", 1.0),
    ("It is 5.", "\\boxed{5\\text{ cm}}", 1.0),
    # the sign of a fraction, and of a number in brackets
    ("x = -\\frac{3}{4}", "-0.75", 1.0),
    ("x = -\\frac{3}{4}", "0.75", 0.0),
    ("It is $-\\frac{1}{2}$.", "-1/2", 1.0),
    ("It is -1\\frac{1}{2}.", "-1.5", 1.0),
    ("It is \u2212\u2153.", "-1/3", 1.0),
    ("It is -1\u00bd.", "-3/2", 1.0),
    ("It is -1\u00bd.", "3/2", 0.0),
    ("It is **-\u00bd**.", "-1/2", 1.0),
    ("It is -\\left(\\frac{1}{2}\\right).", "-1/2", 1.0),
    ("It is -(-5).", "5", 1.0),
    ("It is -\\frac{-1}{2}.", "1/2", 1.0),
    ("It is \\frac{1}{-2}.", "-1/2", 1.0),
    # a hyphen directly after a word, a digit or a closing bracket is no sign
    ("x-(1/2)", "1/2", 1.0),
    ("3-\u00bd", "1/2", 1.0),
    ("f(2)-\\frac12", "1/2", 1.0),
    ("1\u00bd-\u00bd", "1/2", 1.0),
    ("10%-\u00bd", "1/2", 1.0),
]


@pytest.mark.parametrize(("completion", "answer", "score"), LAST_NUMBERS)
def test_last_number_reads_the_same_numbers(completion, answer, score):
    assert last_number([completion], answer=[answer]) == [score]


PIECES = [*"0123456789.,-+/ $%^*{}()e'x\n", "\\frac", "\\boxed{", "####", "10^", "-(", "\u00bd", "\u00b2", "cm"]
REPEATED = ["-(", "(", "1 10^"]
REPEATED += ["1", "1,", "1,111,", "{", "**a", "$1", "\\text{a}", "\\frac", "a", " 1/2", "\\boxed{", "####"]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=14))
def test_every_text_equals_itself(parts):
    text = "".join(parts)
    assert exact_match([text], answer=[text]) == [1.0]
    assert last_number([text], answer=[text], ended=[False])[0] in (None, 0.0, 1.0)


@pytest.mark.parametrize("part", REPEATED)
def test_long_texts_are_read_quickly(part):
    started = time.process_time()
    text = part * (20_000 // len(part)) + "a"
    assert exact_match([text], answer=["42"], ended=[True]) == [0.0]
    assert last_number([text], answer=["42"], ended=[False]) == [0.0]
    assert time.process_time() - started < 2

"""Metrics for answers that can be checked: exact match, last number, and pass@k. Uses only text and numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from numbers import Number
from statistics import fmean

from rlhf.rewards.arguments import Completion, text_of

BOXED = "\\boxed{"
# a number in lower-case text: sign, dollar, whole part with fraction or a fraction alone, exponent. The conditions at
# the sign and at the fraction alone only matter inside a text: in "3-4" and "No.5" the number is 4 and 5.
NUMBER = re.compile(
    r"(?:(?<![\w)\]}%])([+-]))?\$?"
    r"(?:(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(\.\d*)?|(?<![\w.])(\.\d+))"
    r"(e[+-]?\d{1,3}(?!\d))?"
)
CUT_EXPONENT = re.compile(r"(?<=[\d.])e[+-]?\d*\Z")  # "12e", which may become "12e3"
MINUS_SIGN = "\u2212"  # of typeset mathematics


def exact_match(completions: Sequence[Completion], answer: Sequence[str | float | None], **_) -> list[float | None]:
    """Return 1 for a completion whose final answer equals that of the column `answer`, otherwise 0.

    None if the row has no answer (None or NaN). Both are compared in `normal_form`. Raises TypeError for an answer
    that is neither text nor a number.
    """
    return [
        None if right is None or right != right else float(normal_form(text_of(given)) == normal_form(_as_text(right)))
        for given, right in zip(completions, answer, strict=True)
    ]


def last_number(
    completions: Sequence[Completion],
    answer: Sequence[str | float | None],
    ended: Sequence[bool] | None = None,
    **_,
) -> list[float | None]:
    """Return 1 for a completion whose last number equals the number of the column `answer`, otherwise 0.

    None if the row has no answer (None or NaN), or an answer without a number. The number of the answer is its
    `normal_form`, or the last number in its final answer, such as 72 in "#### 72 apples". Raises TypeError for an
    answer that is neither text nor a number.

    Args:
        completions: texts, or lists of one message.
        answer: the column of the data.
        ended: False for a completion that was cut off, in which a number at its end does not count. None: all
            ended.
    """
    whole = [True] * len(completions) if ended is None else ended
    scores: list[float | None] = []
    for given, right, end in zip(completions, answer, whole, strict=True):
        wanted = None if right is None or right != right else _number_of_answer(_as_text(right))
        scores.append(None if wanted is None else float(number_at_end(text_of(given), end) == wanted))
    return scores


def _number_of_answer(text: str) -> Decimal | None:
    value = normal_form(text)
    return value if isinstance(value, Decimal) else number_at_end(final_answer(text))


def number_at_end(text: str, ended: bool = True) -> Decimal | None:
    """Return the last number in a text, None if it has none.

    A number may have a sign, a dollar sign, thousands separators, a fraction and an exponent. A hyphen directly after
    a letter, a digit, a percent sign or a closing bracket is not a sign. Fractions such as 1/2 are two numbers.

    If the text was cut off (`ended` is False), digits, commas and periods at its very end are ignored, with an
    exponent after them: "12", "12," "12." "1,2" and "12e" may all become another number. A number with anything else
    after it, such as a space, a percent sign or a letter, is complete.
    """
    text = text.replace(MINUS_SIGN, "-").casefold()
    if not ended:
        text = _without_last_digits(text)
    found = list(NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def _without_last_digits(text: str) -> str:
    """Return a text without the digits, commas, periods and exponents at its end."""
    before = None
    while text != before:
        before, text = text, CUT_EXPONENT.sub("", text)
        end = len(text)
        while end and (text[end - 1] in ".," or text[end - 1].isdecimal()):
            end -= 1
        text = text[:end]
    return text


def normal_form(text: str) -> str | Decimal:
    """Return the final answer of a text, in a form in which equal answers are equal.

    Ignores case, repeated spaces and one period at the end. A number is returned as a number, without its thousands
    separators and dollar sign.
    """
    answer = " ".join(final_answer(text).casefold().split()).removesuffix(".")
    found = NUMBER.fullmatch(answer.replace("$ ", "$"))
    return answer if found is None else _value(found)


def _value(found: re.Match[str]) -> Decimal:
    """Return the number that NUMBER matched."""
    sign, whole, part, part_alone, exponent = found.groups(default="")
    return Decimal(f"{sign}{whole.replace(',', '') or 0}{part}{part_alone}{exponent}")


def final_answer(text: str) -> str:
    """Return the final answer of a text: the line after its last `####`, or the content of its last `\\boxed{}`, or
    the whole text."""
    _, mark, after = text.rpartition("####")
    if mark and after.strip():
        return after.strip().splitlines()[0]
    return text if (boxed := _last_boxed(text)) is None else boxed


def _last_boxed(text: str) -> str | None:
    """Return what the last `\\boxed{...}` contains; None if there is none, or if its braces do not match."""
    start = text.rfind(BOXED)
    depth = 0
    for at in range(start + len(BOXED) - 1, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len(BOXED) : at]
    return None


def _as_text(answer: str | float) -> str:
    if not isinstance(answer, (str, Number)):
        raise TypeError(f"the column 'answer' contains {answer!r:.60}, which is neither text nor a number")
    return str(answer)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for one prompt: the probability that at least one of k completions is
    right.

    pass@k = 1 - C(n - c, k) / C(n, k)        (Chen et al. 2021, arXiv 2107.03374, eq. 1)

    It is the share of all subsets of k of the n completions that contain a right one. It is computed as a product of
    ratios below 1, because the binomial coefficients may be larger than the largest float. Raises ValueError if k is
    not in 1..n or c is not in 0..n.

    Args:
        n: number of completions of the prompt.
        c: number of right ones among them.
        k: number of attempts.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    # C(n - c, k) / C(n, k) = prod_{i = n - c + 1}^{n} (1 - k / i)
    none_right = 1.0
    for i in range(n - c + 1, n + 1):
        none_right *= 1 - k / i
    return 1 - none_right


def mean_pass_at_k(prompts: Sequence[Sequence[float]], samples: int) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, ... and `samples`: the mean over the prompts with at least k values.

    Args:
        prompts: the values 0 and 1 of each prompt's completions, without those to which the function does not apply.
        samples: completions per prompt.
    """
    counts = [(len(values), int(sum(values))) for values in prompts]
    found = {k: [pass_at_k(n, c, k) for n, c in counts if n >= k] for k in attempts(samples)}
    return {k: fmean(values) for k, values in found.items() if values}


def attempts(n: int) -> list[int]:
    """Return the k for which pass@k of n completions is reported: 1, 2, 4, ... and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]

"""Metrics for answers that can be checked: exact match, last number, and pass@k. Uses only text and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number

from rlhf.rewards.answers import final_answer, number_at_end, parse_answer, same_answer
from rlhf.rewards.arguments import Completion, text_of


def exact_match(
    completions: Sequence[Completion],
    answer: Sequence[str | float | None],
    ended: Sequence[bool] | None = None,
    **_,
) -> list[float | None]:
    """Return 1 for a completion whose final answer equals that of the column `answer`, otherwise 0.

    None if the row has no answer (None or NaN). Raises TypeError for an answer that is neither text nor a number.

    Args:
        completions: texts, or lists of one message.
        answer: the column of the data.
        ended: False for a completion that was cut off, in which an answer at its end does not count. None: all ended.
    """

    def is_right(text: str, right: str, end: bool) -> bool:
        given = final_answer(text, end)
        return given is not None and same_answer(parse_answer(given), parse_answer(final_answer(right) or ""))

    return _judged(is_right, completions, answer, ended)


def last_number(
    completions: Sequence[Completion],
    answer: Sequence[str | float | None],
    ended: Sequence[bool] | None = None,
    **_,
) -> list[float | None]:
    """Return 1 for a completion whose last number equals the number of the column `answer`, otherwise 0.

    None if the row has no answer (None or NaN), or an answer without a number. The number of the answer is its final
    answer, or the last number in that, such as 72 in "#### 72 apples". Raises TypeError for an answer that is neither
    text nor a number.

    Args:
        completions: texts, or lists of one message.
        answer: the column of the data.
        ended: False for a completion that was cut off, in which a number at its end does not count. None: all
            ended.
    """

    def is_right(text: str, right: str, end: bool) -> bool | None:
        wanted = final_answer(right) or ""
        number = parse_answer(wanted).number
        number = number_at_end(wanted) if number is None else number
        return None if number is None else number_at_end(text, end) == number

    return _judged(is_right, completions, answer, ended)


def _judged(
    is_right: Callable[[str, str, bool], bool | None],
    completions: Sequence[Completion],
    answers: Sequence[str | float | None],
    ended: Sequence[bool] | None,
) -> list[float | None]:
    """Return 1 or 0 for each completion: `is_right(completion, answer, True if it ended)`. None if that is None, or
    if there is no answer. Raises TypeError for an answer that is neither text nor a number."""
    scores: list[float | None] = []
    whole = [True] * len(completions) if ended is None else ended
    for completion, answer, end in zip(completions, answers, whole, strict=True):
        found = None
        if answer is not None and answer == answer:  # not NaN
            if not isinstance(answer, (str, Number)):
                raise TypeError(f"the column 'answer' contains {answer!r:.60}, which is neither text nor a number")
            found = is_right(text_of(completion), str(answer), end)
        scores.append(None if found is None else float(found))
    return scores

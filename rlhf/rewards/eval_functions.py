"""Metrics for answers that can be checked: exact match, last number, and pass@k. Uses only text and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from statistics import fmean

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

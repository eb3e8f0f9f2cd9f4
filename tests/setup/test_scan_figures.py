"""Tests of the figures of a scan against numbers worked out by hand."""

from __future__ import annotations

import pytest

from rlhf.setup.scan_figures import (
    best_group_size,
    group_figures,
    recommend,
)

TWO_OF_EIGHT = [1.0, 1.0, *[0.0] * 6]
HALF = [1.0, 0.0] * 4  # four of eight, two of them in each half
NEVER = [0.0] * 8


def test_figures_by_hand():
    figures = group_figures([TWO_OF_EIGHT, NEVER, [1.0] * 8], 4)
    assert (figures.prompts, figures.mean) == (3, pytest.approx(1.25 / 3))
    assert figures.in_reach == pytest.approx(1 / 3)  # 0.25; 0 and 1 are not
    assert figures.no_difference == pytest.approx((15 / 70 + 2) / 3)
    assert figures.never == pytest.approx((15 / 70 + 1) / 3)
    assert figures.always == pytest.approx(1 / 3)
    assert figures.signal == pytest.approx(12 / 56 / 3)
    ends = [[1.0, *[0.0] * 4], [1.0] * 4 + [0.0], [1.0, *[0.0] * 5], [1.0] * 5 + [0.0]]
    assert group_figures(ends, 2).in_reach == 0.5, "1/5 and 4/5 are in the range, 1/6 and 5/6 are not"
    other = group_figures([[-1.0, 2.0], [0.5, 0.5]], 2)
    assert (other.in_reach, other.never, other.always, other.no_difference) == (None, None, None, 0.5)


def test_group_size_is_the_smallest_with_enough_differences():
    """Four of eight: K = 2 differs with 1 - 12/28 = 57%, K = 4 with 1 - 2/70 = 97%. One of eight: 25%, 50%, 100%."""
    assert best_group_size([HALF], 8, 64) == (4, pytest.approx(68 / 70))
    assert best_group_size([[1.0, *[0.0] * 7]], 4, 64) == (8, 1.0)
    assert best_group_size([HALF], 2, 6) == (2, pytest.approx(16 / 28)), "4 does not divide 6 episodes"
    assert best_group_size([NEVER], 4, 64) == (8, 0.0), "no K reaches the target: the largest"
    assert best_group_size([[0.1, 0.5, 0.2, 0.7, 0.9, 1.3, 4.0, 2.0]], 4, 64) == (4, 1.0), "not 0 and 1: not smaller"


def test_recommendation_by_hand():
    """Of 8 samples, groups of 2 differ with 1 - 12/28 = 57% for half of the prompts, groups of 4 with 1 - 2/70 = 97%,
    groups of 8 always. The other prompts never differ."""
    found = recommend([HALF, NEVER] * 10, K=2, batch_size=32)
    assert (found.K, found.batch_size) == (8, 8)
    assert found.reasons == [
        "--K 8: 50% of the groups have scores that differ, more than with a smaller K",
        "--batch-size 8: an update keeps its 64 episodes",
    ]
    good = recommend([HALF] * 10, K=4, batch_size=16)
    assert (good.K, good.batch_size, good.reasons) == (None, None, []), "97% differ already"
    alone = recommend([HALF, NEVER] * 10, K=1, batch_size=16)
    assert (alone.K, alone.reasons) == (None, []), "without groups there is no group size"

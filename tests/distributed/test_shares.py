"""Tests how a batch is shared between processes."""

from __future__ import annotations

import random

import pytest

from rlhf.distributed.shares import by_cost, by_group, merge_rows


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
@pytest.mark.parametrize("groups", [[0], [0, 0, 1, 1], [0, 1, 2, 3, 4], [5] * 6 + [3] * 6 + [5] * 6])
def test_every_row_belongs_to_one_process(groups, processes):
    shares = by_group(groups, processes)
    assert len(shares) == processes and sorted(row for share in shares for row in share) == list(range(len(groups)))


def test_groups_stay_together_if_there_are_enough():
    shares = by_group([0, 0, 1, 1, 2, 2, 2, 3], 2)
    assert shares == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert by_group([0, 0, 0, 0], 2) == [[0, 1], [2, 3]], "one group is divided"


@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_costs_are_balanced(processes):
    draw = random.Random(0)
    for _ in range(50):
        costs = [draw.randint(20, 200) for _ in range(64)]
        rows = draw.sample(range(64), 48)
        shares = by_cost(rows, costs, processes)
        assert sorted(row for share in shares for row in share) == sorted(rows)
        sums = [sum(costs[row] for row in share) for share in shares]
        assert max(sums) <= 1.2 * min(sums)
        assert by_cost(sorted(rows), costs, processes) == shares, "the order of the rows does not matter"


def test_fewer_rows_than_processes_leave_some_without_rows():
    assert by_cost([4, 2], [1] * 5, 3) == [[2], [4], []]


def test_rows_are_merged():
    assert merge_rows([([2, 0], ["c", "a"]), ([1], ["b"])], 4) == ["a", "b", "c", None]

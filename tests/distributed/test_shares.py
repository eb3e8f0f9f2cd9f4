"""Tests how a batch is shared between processes."""

from __future__ import annotations

import random

import pytest

from rlhf.distributed.shares import by_group, by_tokens, merge_rows


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
@pytest.mark.parametrize("groups", [[0], [0, 0, 1, 1], [0, 1, 2, 3, 4], [5] * 6 + [3] * 6 + [5] * 6])
def test_every_row_belongs_to_one_process(groups, processes):
    shares = by_group(groups, processes)
    assert len(shares) == processes and sorted(row for share in shares for row in share) == list(range(len(groups)))


def test_groups_stay_together_if_there_are_enough():
    shares = by_group([0, 0, 1, 1, 2, 2, 2, 3], 2)
    assert shares == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert by_group([0, 0, 0, 0], 2) == [[0, 1], [2, 3]], "one group is divided"


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_tokens_are_balanced(processes, size):
    draw = random.Random(0)
    for _ in range(50):
        groups = [row // size for row in range(64)]
        prompts = [draw.randint(10, 100) for _ in range(64)]
        prompts = [prompts[group] for group in groups]
        completions = [draw.randint(10, 100) for _ in range(64)]
        rows = draw.sample(range(64), 48)
        shares = by_tokens(rows, prompts, completions, groups, processes)
        assert sorted(row for share in shares for row in share) == sorted(rows)
        once = [{groups[row]: prompts[row] for row in share} for share in shares]  # a prompt counts once in a process
        costs = [sum(p.values()) + sum(completions[r] for r in s) for p, s in zip(once, shares, strict=True)]
        assert max(costs) <= 1.2 * sum(costs) / processes
        assert by_tokens(sorted(rows), prompts, completions, groups, processes) == shares, "the order does not matter"


def test_groups_stay_together_if_the_shares_are_balanced():
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    assert by_tokens(range(8), [50] * 8, [20] * 8, groups, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert by_tokens(range(4), [50] * 8, [20] * 8, groups, 4) == [[0], [1], [2], [3]], "two groups are divided"


def test_fewer_rows_than_processes_leave_some_without_rows():
    assert by_tokens([4, 2], [1] * 5, [1] * 5, range(5), 3) == [[2], [4], []]
    assert by_tokens([3, 1], [1] * 5, [1] * 5, range(5), 1) == [[3, 1]]


def test_rows_are_merged():
    assert merge_rows([([2, 0], ["c", "a"]), ([1], ["b"])], 4) == ["a", "b", "c", None]

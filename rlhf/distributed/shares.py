"""How the rows of a batch are shared between the processes. All functions are pure, so all processes agree."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")


def by_group(groups: Sequence[Hashable], processes: int) -> list[list[int]]:
    """Return the rows of each process, in ascending order: about the same number, and rows of one group together.

    Groups are neighbouring rows with equal entries. If there are fewer groups than processes, they are divided.
    """
    blocks: list[list[int]] = []
    for row, group in enumerate(groups):
        if blocks and groups[blocks[-1][-1]] == group:
            blocks[-1].append(row)
        else:
            blocks.append([row])
    if len(blocks) < processes:
        blocks = [[row] for row in range(len(groups))]
    ends = [len(blocks) * (process + 1) // processes for process in range(processes)]
    starts = [0, *ends[:-1]]
    return [[row for block in blocks[a:b] for row in block] for a, b in zip(starts, ends, strict=True)]


def by_cost(rows: Sequence[int], costs: Sequence[int], processes: int) -> list[list[int]]:
    """Return the rows of each process, in ascending order, so that the sums of their costs are about equal.

    `costs` has one entry for each row of the whole batch. The order of `rows` does not matter. The longest rows are
    placed first, each with the process that has the least so far.
    Source: Graham 1969, "Bounds on multiprocessing timing anomalies", LPT rule.
    """
    if processes == 1:
        return [list(rows)]
    loads = [(0, 0, process) for process in range(processes)]  # cost, number of rows, process
    shares: list[list[int]] = [[] for _ in range(processes)]
    for row in sorted(rows, key=lambda r: (-costs[r], r)):
        load, count, process = heapq.heappop(loads)
        shares[process].append(row)
        heapq.heappush(loads, (load + costs[row], count + 1, process))
    return [sorted(share) for share in shares]


def merge_rows(parts: Sequence[tuple[Sequence[int], Sequence[T]]], count: int, missing: T | None = None) -> list[T]:
    """Return one list of `count` entries from parts with (rows, entries). A row that no part has is `missing`."""
    whole: list = [missing] * count
    for rows, entries in parts:
        for row, entry in zip(rows, entries, strict=True):
            whole[row] = entry
    return whole

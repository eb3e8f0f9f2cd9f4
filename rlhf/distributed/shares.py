"""How the rows of a batch are shared between the processes, and the work on a share."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import TypeVar

from rlhf.distributed.group import agree
from rlhf.utils.processes import rank, size

T = TypeVar("T")


def own_share(shares: Sequence[Sequence[int]], work: Callable[[Sequence[int]], T]) -> tuple[Sequence[int], T | None]:
    """Return this process's rows and `work(rows)`; None if it has no rows. If `work` fails in one process, its error
    is raised in all of them. `shares` are the rows of each process."""
    rows = shares[rank()]
    return rows, agree(lambda: work(rows) if rows else None)


def by_group(groups: Sequence[Hashable], processes: int | None = None) -> list[list[int]]:
    """Return the rows of each process (None: all of the run), in ascending order: about the same number, and rows of
    one group together.

    Groups are neighbouring rows with equal entries. If there are fewer groups than processes, they are divided.
    """
    processes = processes or size()
    blocks = [list(rows) for _, rows in groupby(range(len(groups)), key=lambda row: groups[row])]
    if len(blocks) < processes:
        blocks = [[row] for row in range(len(groups))]
    ends = [len(blocks) * (process + 1) // processes for process in range(processes)]
    starts = [0, *ends[:-1]]
    return [[row for block in blocks[a:b] for row in block] for a, b in zip(starts, ends, strict=True)]


BALANCED = 1.1  # largest share, as a multiple of the mean, with which groups stay together


def by_tokens(
    rows: Sequence[int],
    prompts: Sequence[int],
    completions: Sequence[int],
    groups: Sequence[int],
    processes: int | None = None,
) -> list[list[int]]:
    """Return the rows of each process, in ascending order, with about the same number of tokens.

    Rows of a group have the same prompt, which a process computes once. They stay together if the shares are then
    balanced. The order of `rows` does not matter.

    Args:
        rows: rows of the batch.
        prompts: prompt tokens of each row of the whole batch.
        completions: completion tokens of each row of the whole batch.
        groups: number of the prompt of each row of the whole batch.
        processes: number of processes; None: all of the run.
    """
    processes = processes or size()
    if processes == 1:
        return [list(rows)]
    by_prompt: dict[int, list[int]] = {}
    for row in sorted(rows):
        by_prompt.setdefault(groups[row], []).append(row)
    whole = {tuple(m): prompts[m[0]] + sum(completions[row] for row in m) for m in by_prompt.values()}
    shares, loads = _longest_first(whole, processes)
    if max(loads) > BALANCED * sum(loads) / processes:
        shares, _ = _longest_first({(row,): prompts[row] + completions[row] for row in rows}, processes)
    return shares


def _longest_first(blocks: dict[tuple[int, ...], int], processes: int) -> tuple[list[list[int]], list[int]]:
    """Return the rows of each process and the sum of their costs. `blocks`: rows that stay together -> their cost.

    The most costly blocks are placed first, each with the process that has the least so far.
    Source: Graham 1969, "Bounds on multiprocessing timing anomalies", LPT rule.
    """
    loads = [(0, 0, process) for process in range(processes)]  # cost, number of blocks, process
    shares: list[list[int]] = [[] for _ in range(processes)]
    for block in sorted(blocks, key=lambda block: (-blocks[block], block)):
        load, count, process = heapq.heappop(loads)
        shares[process] += block
        heapq.heappush(loads, (load + blocks[block], count + 1, process))
    return [sorted(share) for share in shares], [load for load, _, _ in loads]


def merge_rows(parts: Sequence[tuple[Sequence[int], Sequence[T]]], count: int) -> list[T]:
    """Return one list of `count` entries from parts with (rows, entries). A row that no part has is None."""
    whole: list = [None] * count
    for rows, entries in parts:
        for row, entry in zip(rows, entries, strict=True):
            whole[row] = entry
    return whole

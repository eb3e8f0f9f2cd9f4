"""Warns if many rows are skipped because they are too long."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf.utils.errors import Say

MANY = 0.2  # share of rows: a warning is printed if more than this are too long
KEPT_PERCENT = 95  # the warning names the length that keeps this many percent of the rows


def length_that_keeps(percent: int, lengths: Sequence[int]) -> int:
    """Return the smallest length that at least `percent` of the rows have at most."""
    return sorted(lengths)[math.ceil(percent * len(lengths) / 100) - 1]


def warn_about_length(
    lengths: Sequence[int],
    limit: int,
    rows: str,
    source: str,
    flag: str | None,
    say: Say,
) -> None:
    """Print a warning if more than a fifth of the rows are longer than the limit.

    Args:
        lengths: tokens of each row.
        limit: tokens of the longest row that is kept.
        rows: "prompts" or "pairs".
        source: the flag and value that gave the rows.
        flag: the flag that sets the limit; None: it is a model's context.
        say: prints one line.
    """
    too_long = sum(length > limit for length in lengths)
    if too_long <= MANY * len(lengths):
        return
    fix = "Use a model with a longer context"
    if flag is not None:
        fix = f"{flag} {length_that_keeps(KEPT_PERCENT, lengths)} keeps {KEPT_PERCENT}% of them"
    say(
        f"warning: {too_long:,} of {len(lengths):,} {rows} ({too_long / len(lengths):.0%}) are longer than {limit:,} "
        f"tokens and are skipped: {source}. {fix}"
    )

"""Completes a rollout of which each process has computed some rows.

Each row is computed by one process and is 0 in the others, so a sum over the processes gives the exact values. With
one process, the functions return its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.data.prompts import Prompt
from rlhf.distributed.group import add_up, gather
from rlhf.rollout.completions import Completions, LogProbs
from rlhf.rollout.stopping import StoppingCriterion
from rlhf.utils.processes import size


def exchange_completions(
    share: Completions | None,
    rows: Sequence[int],
    prompts: Sequence[Prompt],
    criterion: StoppingCriterion,
    pad: int,
    length: int,
    device: torch.device,
) -> Completions:
    """Return the completions of all processes.

    Args:
        share: the completions of this process; None: it has none.
        rows: their rows in the batch.
        prompts: prompt of every completion of the batch.
        criterion: what ends a completion.
        pad: id of the pad token.
        length: largest number of tokens of a completion.
        device: device of the result.
    """
    if size() == 1:
        return share
    kinds = gather(None if share is None else _kind(share))
    vocabulary, width, dtype = next(kind for kind in kinds if kind is not None)

    def whole(own: Tensor | None, dtype: torch.dtype, filling: int = 0, *more: int) -> Tensor:
        values = torch.zeros(len(prompts), length, *more, dtype=dtype, device=device)
        if own is not None:
            values[rows] = filling
            values[rows, : own.shape[1]] = own
        return add_up(values)

    parts = (
        (None, None, None) if share is None else (share.completion_ids, share.allowed_tokens, share.sampled_logprobs)
    )
    return Completions.of(
        prompts,
        whole(parts[0], torch.long, criterion.eos),
        eos=criterion,
        pad=pad,
        vocabulary=vocabulary,
        allowed_tokens=None if width is None else whole(parts[1], torch.uint8, 0, width),
        sampled_logprobs=None if dtype is None else whole(parts[2], dtype),
    )


def _kind(share: Completions) -> tuple[int, int | None, torch.dtype | None]:
    """Return what a process without rows needs to know: the vocabulary, the bytes of `allowed_tokens` per token, and
    the dtype of `sampled_logprobs`; None for one that is None."""
    allowed = share.allowed_tokens
    sampled = share.sampled_logprobs
    return share.vocabulary, None if allowed is None else allowed.shape[-1], None if sampled is None else sampled.dtype


def exchange_logprobs(own: LogProbs | None, mask: Tensor) -> LogProbs:
    """Return the log-probs of all processes. `own` has those of this process, 0 in other rows; None: it has no rows.
    `mask` is (B, T)."""
    if size() == 1:
        return own
    known = {} if own is None else {name: values for name, values in own._asdict().items() if values is not None}
    kinds = gather({name: values.dtype for name, values in known.items()})
    dtypes = next(filter(None, kinds))
    zeros = torch.zeros(mask.shape, device=mask.device)
    # one tensor, in the precision of the first: one exchange
    together = torch.stack([known.get(name, zeros).to(next(iter(dtypes.values()))) for name in dtypes])
    return LogProbs(**dict(zip(dtypes, add_up(together), strict=True)))

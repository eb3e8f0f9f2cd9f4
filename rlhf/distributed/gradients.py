"""The sum of gradients over processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from rlhf.distributed.group import add_up, gather, gather_or_raise
from rlhf.utils.processes import size


def exchange_rows(own: Tensor | None, rows: Sequence[int], count: int, device: torch.device) -> Tensor:
    """Return the rows (count, ...) of all processes. Gradients flow to this process's rows only.

    Args:
        own: (n, ...) float32, the rows of this process; None: it has none, and then no weight gets a gradient.
        rows: their numbers.
        count: number of rows of all processes.
        device: device of the result.
    """
    index = torch.tensor(rows, dtype=torch.long, device=device)
    shape = next(found for found in gather(None if own is None else own.shape[1:]) if found is not None)
    whole = torch.zeros(count, *shape, device=device)
    if own is not None:
        whole = whole.index_copy(0, index, own)
    others = add_up(whole.detach().clone()) - whole.detach()  # exact, because each row is 0 in all processes but one
    return whole + others.requires_grad_(own is None)


def add_up_gradients(
    weights: Iterable[nn.Parameter], stats: dict[str, Tensor], error: Exception | None = None
) -> dict[str, Tensor]:
    """Add up the gradients of all processes, in place, and return the sums of the statistics.

    The gradients of a minibatch's loss are sums over its rows with one divisor, so they are added, not averaged.
    One flat all-reduce sums everything. Afterwards each gradient is a part of the flat tensor. With one process
    nothing is done, and `error` is raised.

    Args:
        weights: the weights, in the same order in every process. A weight keeps the gradient None if no process
            has a gradient for it.
        stats: scalars by name; {} in a process without rows.
        error: why this process has no gradients. It is then raised in all processes.
    """
    names = next((found for found in gather_or_raise(list(stats), error) if found), [])
    if size() == 1:
        return stats
    weights = [weight for weight in weights if weight.requires_grad]
    has = [weight.grad is not None for weight in weights]
    flags = weights[0].new_tensor(has)
    grads = [w.grad.reshape(-1) if there else w.new_zeros(w.numel()) for w, there in zip(weights, has, strict=True)]
    scalars = [stats[name].to(flags).reshape(1) if name in stats else flags.new_zeros(1) for name in names]
    flat = add_up(torch.cat([*grads, flags, *scalars]))
    *sums, found, totals = flat.split([*(weight.numel() for weight in weights), len(flags), len(names)])
    for weight, total, there in zip(weights, sums, found.tolist(), strict=True):
        weight.grad = total.view_as(weight) if there else None
    return dict(zip(names, totals.clone().unbind(), strict=True))

"""Compares weights by checksums: those of all processes, and those of two evaluations."""

from __future__ import annotations

import torch
from torch import nn

from rlhf.distributed.group import gather
from rlhf.utils.errors import RaisedByAll, RunError
from rlhf.utils.processes import size


def checksums(model: nn.Module) -> list[int]:
    """Return one number for each trainable weight: the sum of its float32 numbers, read as integers. Synchronizes with
    the device once."""
    sums = [weight.detach().view(torch.int32).sum() for weight in model.parameters() if weight.requires_grad]
    return torch.stack(sums).tolist() if sums else []


def require_equal_weights(model: nn.Module, when: str) -> None:
    """Raise RunError, in all processes, if the trainable weights are not the same in all. `when`: after what."""
    if size() == 1:
        return
    found = gather(checksums(model))
    other = next((number for number, sums in enumerate(found) if sums != found[0]), None)
    if other is not None:
        raise RunError(
            f"the weights after {when} differ between process 0 and process {other}",
            "they are not saved",
            "Use the same GPU model and the same library versions in all processes, then resume with --resume",
        ) from RaisedByAll()

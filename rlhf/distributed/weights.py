"""Checks that all processes have the same weights."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from rlhf.distributed.group import gather
from rlhf.utils.errors import RaisedByAll, RunError
from rlhf.utils.processes import size


def require_equal_weights(model: nn.Module, when: str) -> None:
    """Raise RunError, in all processes, if the trainable weights are not the same in all. `when`: after what."""
    if size() == 1:
        return
    digest = hashlib.sha256()
    for weight in model.parameters():
        if weight.requires_grad:
            digest.update(weight.detach().reshape(-1).view(torch.uint8).cpu().numpy())
    hashes = gather(digest.hexdigest())
    other = next((number for number, found in enumerate(hashes) if found != hashes[0]), None)
    if other is not None:
        raise RunError(
            f"the weights after {when} differ between process 0 and process {other}",
            "they are not saved",
            "Use the same GPU model and the same library versions in all processes, then resume with --resume",
        ) from RaisedByAll()

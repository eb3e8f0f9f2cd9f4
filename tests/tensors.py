"""Copies folders with other tensors in one of their safetensors files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def rewritten(
    source: Path, folder: Path, change: Callable[[Tensors], Tensors], file: str = "model.safetensors"
) -> Path:
    """Copies a folder, with other tensors in one of its files."""
    shutil.copytree(source, folder)
    tensors = change(load_file(folder / file))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})
    return folder


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + n: t for n, t in tensors.items()}

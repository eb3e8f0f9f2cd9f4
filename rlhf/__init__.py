"""RLHF Workstation: PPO, GRPO, RLOO and REINFORCE++.

A program imports the functions below from here. torch is imported when a trainer is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.api import check, make_trainer
    from rlhf.config import make_config

__all__ = ["check", "make_config", "make_trainer"]
_MODULES = dict.fromkeys(__all__, "rlhf.api") | {"make_config": "rlhf.config"}


def __getattr__(name: str) -> Any:
    if name == "scan":
        raise AttributeError(f"{__name__}.scan was removed: use {__name__}.check")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

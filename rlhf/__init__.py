"""RLHF Workstation: PPO, GRPO, RLOO and REINFORCE++.

A program imports the functions below from here. torch is imported when a trainer is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.api import check, make_trainer
    from rlhf.config import make_config

__all__ = ["check", "make_config", "make_trainer"]


def __getattr__(name: str) -> Any:
    if name == "scan":
        raise AttributeError(f"{__name__}.scan was removed: use {__name__}.check")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "make_config":
        from rlhf.config import make_config

        return make_config
    from rlhf import api

    return getattr(api, name)

"""RLHF Workstation: PPO, GRPO, RLOO and REINFORCE++.

A program imports the functions below from here. torch is imported when a trainer is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.api import make_trainer, scan
    from rlhf.config import make_config

__all__ = ["make_config", "make_trainer", "scan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "make_config":
        from rlhf.config import make_config

        return make_config
    from rlhf import api

    return getattr(api, name)

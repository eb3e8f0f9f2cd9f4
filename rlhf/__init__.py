"""RLHF Workstation: PPO, GRPO, RLOO and REINFORCE++.

A program imports the functions and classes below from here. torch is imported when one that needs it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.algorithms.classes import register
    from rlhf.api import check, make_trainer
    from rlhf.config import make_config
    from rlhf.rollout.episodes import Episode, Turn

__all__ = ["Episode", "Turn", "check", "make_config", "make_trainer", "register"]
HOMES = {
    "Episode": "rlhf.rollout.episodes",
    "Turn": "rlhf.rollout.episodes",
    "make_config": "rlhf.config",
    "register": "rlhf.algorithms.classes",
}


def __getattr__(name: str) -> Any:
    if name == "scan":
        raise AttributeError(f"{__name__}.scan was removed: use {__name__}.check")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES.get(name, "rlhf.api")), name)

"""The table of algorithms: one row each. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Algorithm:
    """One algorithm."""

    name: str  # of its commands, settings and run folders
    title: str
    has_critic: bool
    colour: str  # in pictures; Okabe & Ito 2008: told apart with any kind of colour vision, and in grey
    marker: str  # of matplotlib, to tell it apart without colours
    source: str  # "module:Class", imported when a trainer is built

    def build(self, config: Any) -> Any:
        """The algorithm with these settings: an object with `advantages` and `loss`."""
        module, _, name = self.source.partition(":")
        return getattr(importlib.import_module(module), name)(config)


ALGORITHMS = {
    row.name: row
    for row in (
        Algorithm("ppo", "Proximal Policy Optimization", True, "#0072B2", "o", "rlhf.algorithms.ppo:PPO"),
        Algorithm("grpo", "Group Relative Policy Optimization", False, "#D55E00", "s", "rlhf.algorithms.grpo:GRPO"),
    )
}


def in_order(names: Iterable[str]) -> list[str]:
    """Names of algorithms once each, in the table's order; those that the table lacks come last."""
    found = dict.fromkeys(names)
    return [*(name for name in ALGORITHMS if name in found), *(name for name in found if name not in ALGORITHMS)]

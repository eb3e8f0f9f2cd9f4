"""The table of algorithms: one row each. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Algorithm:
    """One algorithm."""

    name: str  # of its script and run folders
    title: str
    group_size: int  # completions per prompt unless --K is set; 1: no groups, and --K is refused
    has_critic: bool
    settings: tuple[str, ...]  # groups that it reads and not every algorithm, besides "group" and "critic"
    colour: str  # in pictures; Okabe & Ito 2008: told apart with any kind of colour vision, and in grey
    marker: str  # of matplotlib, to tell it apart without colours
    source: str  # "module:Class", imported when a trainer is built

    def build(self, config: Any) -> Any:
        """The algorithm with these settings: an object with `advantages` and `loss`."""
        module, _, name = self.source.partition(":")
        return getattr(importlib.import_module(module), name)(config)

    @property
    def script(self) -> str:
        return f"train_{self.name}.py"

    @property
    def reads(self) -> tuple[str, ...]:
        """Groups of settings that not every algorithm reads, and this one does."""
        return (*(["critic"] * self.has_critic), *(["group"] * (self.group_size > 1)), *self.settings)

    @property
    def foreign(self) -> dict[str, str]:
        """Groups of settings that only other algorithms read -> the scripts that have their flags."""
        groups = dict.fromkeys(group for row in ALGORITHMS.values() for group in row.reads)
        return {
            group: " and ".join(row.script for row in ALGORITHMS.values() if group in row.reads)
            for group in groups
            if group not in self.reads
        }

    @property
    def defaults(self) -> dict[str, Any]:
        """Settings whose default differs between algorithms."""
        return {"output": f"./{self.name}_training_output", **({"K": self.group_size} if self.group_size > 1 else {})}

    def validate(self, config: Any) -> list[str]:
        """Errors in the settings for this algorithm alone, one line each."""
        if self.group_size > 1 and config.group_size == 1:
            return [
                "K is unset: --K none. Set it to at least 2: the completions of a prompt are compared with each other"
            ]
        return []


ALGORITHMS = {
    row.name: row
    for row in (
        Algorithm(
            name="ppo",
            title="Proximal Policy Optimization",
            group_size=1,
            has_critic=True,
            settings=("ppo",),
            colour="#0072B2",
            marker="o",
            source="rlhf.algorithms.ppo:PPO",
        ),
        Algorithm(
            name="grpo",
            title="Group Relative Policy Optimization",
            group_size=8,
            has_critic=False,
            settings=("grpo",),
            colour="#D55E00",
            marker="s",
            source="rlhf.algorithms.grpo:GRPO",
        ),
        Algorithm(
            name="rloo",
            title="REINFORCE Leave-One-Out",
            group_size=8,
            has_critic=False,
            settings=(),
            colour="#CC79A7",
            marker="^",
            source="rlhf.algorithms.rloo:RLOO",
        ),
    )
}

DEFAULT_ALGORITHM = "ppo"


def in_order(names: Iterable[str]) -> list[str]:
    """Names of algorithms once each, in the table's order; those that the table lacks come last."""
    found = dict.fromkeys(names)
    return [*(name for name in ALGORITHMS if name in found), *(name for name in found if name not in ALGORITHMS)]

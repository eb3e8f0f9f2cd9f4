"""The table of algorithms: one row each. Imports no torch, so the classes are in rlhf/algorithms/classes.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlhf.utils.command_lines import short_name
from rlhf.utils.errors import Problem


@dataclass(frozen=True)
class Algorithm:
    """One row of the table: the properties of an algorithm that other code needs."""

    name: str  # a Python identifier: in the names of its script, command and run folders, and in recipes
    label: str  # the name in plots, tables and texts
    title: str  # the full name, in --help and model cards
    group_size: int  # default of --K; above 1: the scores of a prompt's completions are compared
    has_critic: bool
    settings: tuple[str, ...]  # groups of settings that only some algorithms read, besides "group" and "critic"

    @property
    def script(self) -> str:
        """The name of its command in texts: `train_NAME.py`, or `rlhf NAME` with the installed command."""
        return short_name(self.name)

    @property
    def reads(self) -> tuple[str, ...]:
        """Groups of settings that this algorithm reads and some others do not."""
        return (*(["critic"] * self.has_critic), *(["group"] * (self.group_size > 1)), *self.settings)

    @property
    def foreign(self) -> dict[str, str]:
        """Maps each group of settings that only other algorithms read to the scripts that have its flags."""
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

    def validate(self, config: Any) -> list[Problem]:
        """Return the errors in the settings that concern this algorithm only, one line each."""
        if self.group_size > 1 and config.group_size == 1:
            return [
                Problem(
                    f"K is {config.batch.K or 'unset'}",
                    fix="Set it to at least 2: the completions of a prompt are compared with each other",
                    settings=("K",),
                )
            ]
        return []


ALGORITHMS = {
    row.name: row
    for row in (
        Algorithm(
            name="ppo",
            label="PPO",
            title="Proximal Policy Optimization",
            group_size=1,
            has_critic=True,
            settings=("ppo",),
        ),
        Algorithm(
            name="grpo",
            label="GRPO",
            title="Group Relative Policy Optimization",
            group_size=8,
            has_critic=False,
            settings=("grpo",),
        ),
        Algorithm(
            name="rloo",
            label="RLOO",
            title="REINFORCE Leave-One-Out",
            group_size=8,
            has_critic=False,
            settings=(),
        ),
        Algorithm(
            name="reinforce_pp",
            label="REINFORCE++",
            title="REINFORCE with advantages normalized over the batch",
            group_size=1,
            has_critic=False,
            settings=(),
        ),
    )
}

DEFAULT_ALGORITHM = "ppo"


def label_of(name: str) -> str:
    """Return an algorithm's name in texts; for one that the table does not have, its name in capitals."""
    return ALGORITHMS[name].label if name in ALGORITHMS else name.upper()


def in_order(names: Iterable[str]) -> list[str]:
    """Return the distinct names in the order of the table, followed by names that the table does not have."""
    found = dict.fromkeys(names)
    return [*(name for name in ALGORITHMS if name in found), *(name for name in found if name not in ALGORITHMS)]

"""The table of algorithms: one row each. Imports no torch, so the classes are in rlhf/algorithms/classes.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.settings.fields import settings_of
from rlhf.settings.next_commands import in_a_file
from rlhf.settings.training import Config
from rlhf.utils.command_lines import OF_USERS, short_name
from rlhf.utils.errors import Problem


@dataclass(frozen=True)
class Algorithm:
    """One row of the table: the properties of an algorithm that other code needs."""

    name: str  # a Python identifier: in the names of its script, command and run folders, and in recipes
    label: str  # the name in plots, tables and texts
    title: str  # the full name, in --help and model cards
    group_size: int = 1  # default of --K; above 1: the scores of a prompt's completions are compared
    greedy: int = 0  # of each group, the last completions that are greedy: they have a score, nothing learns from them
    has_critic: bool = False
    # settings that only some algorithms read: groups, besides "group" and "critic", and single ones of other groups
    settings: Sequence = ()
    defaults: dict = field(default_factory=dict)  # setting -> its default, if it differs from the declared one
    refuses: Sequence = ()  # settings that the other algorithms read and this one does not
    source: str = ""  # of an algorithm that `register` added: FILE.py:CLASS, or python:CLASS as of reward functions

    @property
    def script(self) -> str:
        """The name of its command in texts: `train_NAME.py`, or `rlhf NAME` with the installed command."""
        return short_name(self.name)

    @property
    def reads(self) -> set[str]:
        """The settings that this algorithm reads and some others do not."""
        named = {*self.settings, *(["critic"] * self.has_critic), *(["group"] * (self.group_size > 1))}
        return {s.name for s in settings_of(Config).values() if {s.name, s.group} & named}

    @property
    def foreign(self) -> dict[str, str]:
        """Maps each setting that this algorithm does not read to the algorithms that do: the scripts with its flag."""
        own = self.reads
        owners: dict[str, list[str]] = {}
        for row in ALGORITHMS.values():
            for name in row.reads - own:
                owners.setdefault(name, []).append(row.script)
        refused = dict.fromkeys(self.refuses, f"algorithms other than {self.label}")
        return {name: " and ".join(scripts) for name, scripts in owners.items()} | refused

    @property
    def all_defaults(self) -> dict[str, Any]:
        """Settings whose default differs between algorithms."""
        groups = {"K": self.group_size} if self.group_size > 1 else {}
        return {"output": f"./{self.name}_training_output", **groups, **self.defaults}

    def validate(self, config: Any) -> list[Problem]:
        """Return the errors in the settings that concern this algorithm only, one line each."""
        found = []
        least = self.greedy + 1 if self.greedy else 2
        if self.group_size > 1 and config.group_size < least:
            fix = f"Set it to at least {least}: the completions of a prompt are compared with each other"
            found.append(Problem(f"K is {config.batch.K or 'unset'}", fix=fix, settings=("K",)))
        if self.greedy and config.speed.rollout_engine == "vllm":
            fix = f"Use auto: vLLM does not sample the greedy completions of {self.label}"
            found.append(Problem("rollout_engine is vllm", fix=fix, settings=("rollout_engine",)))
        return found


ALGORITHMS = {
    row.name: row
    for row in (
        Algorithm(
            name="ppo",
            label="PPO",
            title="Proximal Policy Optimization",
            has_critic=True,
            settings=("ppo", "teacher"),
        ),
        Algorithm(
            name="grpo",
            label="GRPO",
            title="Group Relative Policy Optimization",
            group_size=8,
            settings=("grpo",),
        ),
        Algorithm(
            name="rloo",
            label="RLOO",
            title="REINFORCE Leave-One-Out",
            group_size=8,
        ),
        Algorithm(
            name="reinforce_pp",
            label="REINFORCE++",
            title="REINFORCE with advantages normalized over the batch",
            settings=("gamma", "gae_unit", "teacher"),
        ),
        Algorithm(
            name="remax",
            label="ReMax",
            title="REINFORCE, a greedy completion as baseline",
            group_size=2,
            greedy=1,
        ),
    )
}

DEFAULT_ALGORITHM = "ppo"


def add_row(row: Algorithm) -> None:
    """Add the algorithm of a user to the table, in place of one of this name."""
    ALGORITHMS[row.name] = row
    OF_USERS[row.name] = in_a_file(row.source)


def label_of(name: str) -> str:
    """Return an algorithm's name in texts; for one that the table does not have, its name in capitals."""
    return ALGORITHMS[name].label if name in ALGORITHMS else name.upper()


def in_order(names: Iterable[str]) -> list[str]:
    """Return the distinct names in the order of the table, followed by names that the table does not have."""
    found = dict.fromkeys(names)
    return [*(name for name in ALGORITHMS if name in found), *(name for name in found if name not in ALGORITHMS)]

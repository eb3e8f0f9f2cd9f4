"""The class of each algorithm: settings -> an object with the methods `advantages` and `loss`."""

from __future__ import annotations

from dataclasses import replace

from rlhf.algorithms.grpo import GRPO
from rlhf.algorithms.policy_gradient import PolicyGradient
from rlhf.algorithms.ppo import PPO
from rlhf.algorithms.reinforce_pp import ReinforcePlusPlus
from rlhf.algorithms.remax import ReMax
from rlhf.algorithms.rloo import RLOO
from rlhf.algorithms.table import ALGORITHMS, Algorithm, add_row
from rlhf.rewards.find import name_in_settings, of_users_file
from rlhf.settings.fields import settings_of
from rlhf.settings.training import Config
from rlhf.utils.command_lines import OF_USERS, SCRIPTS
from rlhf.utils.errors import Problem, UserError, did_you_mean, raise_if

CLASSES: dict[str, type[PolicyGradient]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePlusPlus,
    "remax": ReMax,
}


def class_of(name: str) -> type[PolicyGradient]:
    """Return the class of an algorithm. Raises UserError if only a run.json has named it."""
    if name not in CLASSES:
        raise UserError(
            "the class of this algorithm is not loaded", f"algorithm {name!r}", "Call register(CLASS) first"
        )
    return CLASSES[name]


# --- algorithms of users ---------------------------------------------------------------------------------------------


def register(algorithm: type[PolicyGradient]) -> type[PolicyGradient]:
    """Add an algorithm to the table, and return it: a class with the methods `advantages` and `loss`, whose attribute
    `row` is its row. It replaces an earlier class with this name, except the library's. Raises UserError."""
    return _added(algorithm, name_in_settings(algorithm), f"register({getattr(algorithm, '__name__', algorithm)})")


def load_algorithm(source: str) -> Algorithm:
    """Add the class in a user's file, FILE.py:CLASS, to the table, and return its row. Raises UserError."""
    found = of_users_file(source, "--algorithm")
    return ALGORITHMS[_added(found, source, f"--algorithm {source}").row.name]


def _added(algorithm: type[PolicyGradient], source: str, where: str) -> type[PolicyGradient]:
    """Add a class to the table, and return it. `source` is the field of its row, `where` the place in errors."""
    if not all(callable(getattr(algorithm, method, None)) for method in ("advantages", "loss", "counted")):
        fix = "Give a class with the base PolicyGradient, or one of the library's algorithms"
        raise UserError("not a class with the methods advantages and loss", where, fix)
    row = vars(algorithm).get("row")
    if not isinstance(row, Algorithm):
        fix = "Give the class its row: row = Algorithm(name=..., label=..., title=...)"
        raise UserError("the class has no row", where, fix)
    raise_if([Problem(what, where, fix) for what, fix in _problems(row)])
    add_row(replace(row, source=source))
    CLASSES[row.name] = algorithm
    return algorithm


def _problems(row: Algorithm) -> list[tuple[str, str]]:
    """Return what is wrong in the row of a user's algorithm, each with how to fix it."""
    found = []
    if not row.name.isidentifier() or {row.name} & (SCRIPTS.keys() | ALGORITHMS.keys() - OF_USERS.keys()):
        found.append((f"name {row.name!r} is not free, or not a Python identifier", "Give another name"))
    if not 0 <= row.greedy < row.group_size:
        found.append((f"greedy is {row.greedy} and group_size {row.group_size}", "Give a larger group_size"))
    settings = settings_of(Config)
    some = set().union(*(of.reads for of in ALGORITHMS.values()))  # all algorithms read the others
    known = {
        "settings": {*some, *(settings[name].group for name in some)},
        "defaults": settings.keys(),
        "refuses": settings.keys() - some,
    }
    for field, names in known.items():
        for name in sorted(set(getattr(row, field)) - names):
            found.append((f"{field} of the row has {name!r}", f"{did_you_mean(name, names)}Remove it"))
    return found

"""Finds the class of an environment, by name or as it is given in Python. Imports no torch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from rlhf.rewards.find import name_in_settings, of_users_file, users_code
from rlhf.settings.training import Config
from rlhf.utils.errors import UserError, did_you_mean

Instance = Any  # of the user's class
BUILT_IN = {"crossing": "rlhf.demo.crossing:Crossing", "crossing-sparse": "rlhf.demo.crossing:CrossingSparse"}
OF_THE_ENVIRONMENT = ("reset", "get_reward")  # methods that are no tools


def find_environment(name: str, flag: str = "--environment") -> Callable[[], Instance]:
    """Return the class of an environment by its name: a built-in one, or FILE.py:CLASS, which runs that file. Raises
    UserError if there is none."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if ":" not in name:
        fix = f"{did_you_mean(name, BUILT_IN)}Write FILE.py:CLASS or one of {', '.join(BUILT_IN)}"
        raise UserError("no such environment", f"{flag} {name}", fix)
    return of_users_file(name, flag)


def new_instance(construct: Any, where: str) -> Instance:
    """Return a new instance. Raises UserError if it cannot be constructed, or if it is no environment."""
    if not callable(construct):
        several = isinstance(construct, dict)
        what = "several environments" if several else f"not a class: {construct!r:.60}"
        raise UserError(what, where, "Give one class with the methods reset and observe, or with reset and tools")
    with users_code("the environment cannot be constructed", where, "Give it a constructor without arguments"):
        found = construct()
    methods = [name for name, _ in inspect.getmembers(found, inspect.ismethod) if not name.startswith("_")]
    name = type(found).__name__
    if "reset" not in methods:
        raise UserError("no method reset", f"{where}, {name}", "Add reset(self, **row), which begins an episode")
    if not {*methods} - {*OF_THE_ENVIRONMENT}:
        fix = "Add observe(self, completion), or public methods, which are tools"
        raise UserError("neither the method observe nor tools", f"{where}, {name}", fix)
    return found


def find_instance(config: Config, given: Any = None) -> tuple[Callable[[], Instance] | None, Instance | None]:
    """Return what constructs instances of the environment that is given in Python, or of that of the settings, and the
    first instance; None without one. Both raise UserError as `new_instance`."""
    name = config.environment.environment if given is None else given
    if name is None:
        return None, None
    where = "environment=" if given is not None else f"--environment {name}"
    construct = partial(new_instance, find_environment(name) if isinstance(name, str) else name, where)
    return construct, construct()


def gives_rewards(instance: Instance) -> bool:
    """True if an environment gives rewards: with `get_reward`, or in the plain form, in which a turn without a reward
    has reward 0."""
    return hasattr(instance, "observe") or hasattr(instance, "get_reward")


def environment_in_settings(construct: Any) -> str:
    """Return the value of --environment that finds a class given in Python, as `name_in_settings` does."""
    if isinstance(construct, str):
        return construct
    path = f"{getattr(construct, '__module__', '')}:{getattr(construct, '__name__', '')}"
    return next((name for name, built_in in BUILT_IN.items() if built_in == path), None) or name_in_settings(construct)

"""From layers of settings to a checked, frozen configuration: later layers win, all errors are reported together."""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.settings.fields import Layer, convert, settings_of
from rlhf.settings.flags import HELP, HELP_ALL, CommandLine, wants_help
from rlhf.settings.recipes import DEFAULT_RECIPE, normal_name
from rlhf.settings.translate import translate
from rlhf.settings.yaml_file import read_settings
from rlhf.utils.errors import UserError, raise_if

Check = Callable[[Any], list[str]]  # from a configuration to its errors, one line each


class Command:
    """Base of every command's configuration: groups of settings."""

    def validate(self) -> list[str]:
        """Return what is wrong with the settings taken together, one line each."""
        return []

    def resolved(self) -> Command:
        """Return the configuration with alternative settings replaced by those that the rest of the code reads."""
        return self


class Values(dict[str, Any]):
    """The value of every setting, and the places that set them."""

    def __init__(self, values: dict[str, Any], places: dict[str, str]):
        super().__init__(values)
        self.places = places

    def with_places(self, problem: str) -> str:
        """Return an error about several settings, with the places of those that a file sets behind their flags."""

        def flag_and_place(match: re.Match) -> str:
            place = self.places.get(match[0].lstrip("-").replace("-", "_"), "")
            return match[0] if place.startswith("--") or ":" not in place else f"{match[0]} ({place})"

        head, dot, fix = problem.partition(". ")
        return re.sub(r"--[a-zA-Z][\w-]*", flag_and_place, head) + dot + fix


def values_of(config_class: type, layers: Sequence[Layer], problems: Sequence[str] = ()) -> Values:
    """Return the value of every setting under `layers`, the lowest first, over the declared defaults. Raises UserError
    with every error of every layer, after the `problems` that were found before."""
    settings, merged, problems = settings_of(config_class), {}, list(problems)
    for layer in layers:
        known, wrong = translate(layer, settings)
        merged |= known
        problems += wrong
    values = {}
    for name, setting in settings.items():
        value, where = merged.get(name, (setting.default, "default"))
        try:
            values[name] = convert(setting, value, where)
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return Values(values, {name: where for name, (_, where) in merged.items()})


def build(
    config_class: type,
    values: Values,
    foreign: Collection[str] = (),
    checks: Sequence[Check] = (),
    **top: Any,
) -> Any:
    """Return the configuration that holds `values`. Raises UserError with all that is wrong with them taken together.

    Args:
        foreign: groups that the command does not read: they keep their declared defaults.
        checks: functions that return the errors of the whole configuration.
        top: fields of the configuration beside its groups.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, setting in settings_of(config_class).items():
        groups.setdefault(setting.group, {})[name] = values[name]
    hints = typing.get_type_hints(config_class)
    config = config_class(**top, **{g: hints[g](**leaves) for g, leaves in groups.items() if g not in foreign})
    raise_if([values.with_places(problem) for check in checks for problem in check(config)])
    return config.resolved()


@dataclass(frozen=True)
class Given:
    """What a command line sets: the layers of its --config file and of its flags, and the recipe that they name."""

    layers: tuple[Layer, Layer]
    recipe: str  # the default one if none is named
    recipe_place: str = ""  # that names it
    problems: tuple[str, ...] = ()


def read_given(line: CommandLine, argv: Sequence[str]) -> Given:
    """Return what a command line sets, and what is wrong with it."""
    flags, problems = line.read(list(argv))
    if not line.recipes:
        return Given(({}, flags), DEFAULT_RECIPE, problems=tuple(problems))
    from_file: Layer = {}
    if "config" in flags:
        try:
            from_file = read_settings(flags["config"][0])
        except UserError as error:
            problems += error.problems
    recipe, place = {**from_file, **flags}.get("recipe", (DEFAULT_RECIPE, ""))
    if not isinstance(recipe, str):
        problems.append(f"recipe is {recipe!r}: {place}. Give the name of a recipe, or its file")
        recipe = DEFAULT_RECIPE
    layers = tuple({k: v for k, v in layer.items() if k not in ("recipe", "config")} for layer in (from_file, flags))
    return Given(layers, normal_name(recipe), place, tuple(problems))


# from a recipe to the layers beneath --config, and one line on what config.py changes (None: nothing)
Lower = Callable[[str], tuple[list[Layer], str | None]]


def show_help(line: CommandLine, argv: Sequence[str], lower: Lower) -> None:
    """If the command line requests help, print it with the values that the command would use, and exit. Other errors
    of the command line are ignored."""
    kind = wants_help(argv)
    if kind is None:
        return
    given = read_given(line, [word for word in argv if word not in (*HELP, *HELP_ALL)])
    layers, edits = lower(given.recipe)
    source = f"recipe {given.recipe}" + (f"; config.py: {edits}" if edits else "") if line.recipes else ""
    sys.stdout.write(getattr(line, kind)(values_of(line.config_class, [*layers, given.layers[0]]), source))
    raise SystemExit(0)

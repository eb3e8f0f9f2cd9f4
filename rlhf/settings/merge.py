"""Merges layers of settings into a checked, frozen configuration. Later layers win. Reports all errors together."""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.settings.fields import Layer, Setting, as_text, convert, name_table, settings_of, unmet
from rlhf.settings.flags import HELP, HELP_ALL, CommandLine, wants_help
from rlhf.settings.recipes import DEFAULT_RECIPE, normal_name
from rlhf.settings.translate import translate
from rlhf.settings.yaml_file import read_settings
from rlhf.utils.errors import Problem, UserError, print_line, raise_if

Check = Callable[[Any], list[Problem]]  # takes a configuration and returns its errors


class Command:
    """Base class of the configurations of all commands: groups of settings."""

    def validate(self) -> list[Problem]:
        """Return the errors in combinations of settings."""
        return []

    def resolved(self) -> Command:
        """Return the configuration with alternative settings replaced by those that the rest of the code uses."""
        return self


class Values(dict[str, Any]):
    """The values of all settings, and the places that set them."""

    def __init__(self, values: dict[str, Any], places: dict[str, str]):
        super().__init__(values)
        self.places = places

    def located(self, problem: Problem, settings: Mapping[str, Setting]) -> Problem:
        """Return a problem of settings with its place: their flags, values, and the file and line that set them."""
        if not problem.settings:
            return problem
        places = []
        for name in problem.settings:
            value = "" if settings[name].is_bool else " none" if self[name] is None else f" {as_text(self[name], ' ')}"
            places.append(settings[name].flag + value + self.file_of(name))
        return replace(problem, place=", ".join(places))

    def file_of(self, name: str) -> str:
        """Return ` (file:line)` for a setting that was set in a file, otherwise an empty text."""
        place = self.places.get(name, "")
        return "" if place.startswith("--") or ":" not in place else f" ({place})"


def values_of(config_class: type, layers: Sequence[Layer], problems: Sequence[Problem] = ()) -> Values:
    """Return the values of all settings: the declared defaults, replaced by `layers`, the lowest first. Raises
    UserError with the errors of all layers, after the `problems` found earlier."""
    settings = settings_of(config_class)
    merged = {}
    problems = list(problems)
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
    given: Collection[str] = (),
    assumed: Collection[str] = (),
    **top: Any,
) -> Any:
    """Return the configuration with `values`. Raises UserError with all errors that `checks` find, and with the
    settings that have no effect.

    Args:
        foreign: groups of settings that the command does not use; they keep their declared defaults.
        checks: functions that return the errors of the whole configuration. Without them, nothing is checked.
        given, assumed: as in `without_effect`.
        top: fields of the configuration that are not groups.
    """
    groups: dict[str, dict[str, Any]] = {}
    settings = settings_of(config_class)
    for name, setting in settings.items():
        groups.setdefault(setting.group, {})[name] = values[name]
    hints = typing.get_type_hints(config_class)
    config = config_class(**top, **{g: hints[g](**leaves) for g, leaves in groups.items() if g not in foreign})
    problems = [values.located(problem, settings) for check in checks for problem in check(config)]
    if checks:
        read = {name: setting for name, setting in settings.items() if setting.group not in foreign}
        problems += without_effect(read, values, given, assumed)
    raise_if(problems)
    return config.resolved()


def without_effect(
    settings: Mapping[str, Setting], values: Values, given: Collection[str], assumed: Collection[str]
) -> list[Problem]:
    """Return one error for each setting that has no effect because of another one, such as lora_r without use_lora.

    Args:
        settings: the settings that the command reads.
        given: names of the settings that the command line or the call sets. Of all other settings, only the strict
            ones are checked.
        assumed: settings that get their values later: conditions on them count as met.
    """
    first = name_table(settings)
    read = {name: values[name] for name in settings}
    problems = []
    named = {first[name] for name in given if name in first}
    for name, setting in settings.items():
        value = values[name]
        condition = unmet(setting, read, assumed)
        is_off = value is None or (value == setting.default and not value)
        if condition is None or is_off or not (name in named or (setting.strict and name in values.places)):
            continue
        place, (other, wanted) = values.places[name], condition.others[0]
        as_flags = not place.startswith("make_config")
        fix = "Add" if not condition.unset else "Change" if wanted else "Remove"
        problems.append(
            Problem(
                f"{name} has no effect {condition.text(as_flags)}{values.file_of(other)}",
                place,
                f"{fix} {condition.words(as_flags)}, or remove {setting.flag if as_flags else name}",
            )
        )
    return problems


@dataclass(frozen=True)
class Given:
    """The settings of a command line: the layers of its --config file and its flags, and the recipe."""

    layers: tuple[Layer, Layer]
    recipe: str  # the default recipe if none is given
    recipe_place: str = ""  # the flag or file:line that sets the recipe
    problems: tuple[Problem, ...] = ()


def read_given(line: CommandLine, argv: Sequence[str]) -> Given:
    """Return the settings of a command line, and its errors."""
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
        problems.append(Problem(f"recipe is {recipe!r}", place, "Give the name or the file of a recipe"))
        recipe = DEFAULT_RECIPE
    layers = tuple({k: v for k, v in layer.items() if k not in ("recipe", "config")} for layer in (from_file, flags))
    return Given(layers, normal_name(recipe), place, tuple(problems))


# takes a recipe; returns the layers below --config, and one line on the changes in config.py (None: no changes)
Lower = Callable[[str], tuple[list[Layer], str | None]]


def show_help(line: CommandLine, argv: Sequence[str], lower: Lower) -> None:
    """If the command line requests help, print it with the values that the command would use, and exit. Errors of the
    command line are then ignored."""
    kind = wants_help(argv)
    if kind is None:
        return
    given = read_given(line, [word for word in argv if word not in (*HELP, *HELP_ALL)])
    layers, edits = lower(given.recipe)
    source = f"recipe {given.recipe}" + (f"; config.py: {edits}" if edits else "") if line.recipes else ""
    print_line(getattr(line, kind)(values_of(line.config_class, [*layers, given.layers[0]]), source).rstrip())
    raise SystemExit(0)

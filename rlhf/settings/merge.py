"""Merges layers of settings into a checked, frozen configuration. Later layers win. Reports all errors together."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.settings.fields import Layer, Setting, as_text, convert, flag_of, name_table, settings_of, unmet
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


# --- a command line to layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """The settings of a command line."""

    file: Layer  # of --config
    flags: Layer
    recipe: str  # the default recipe if none is given
    recipe_place: str  # the flag or file:line that sets the recipe; empty if none does
    problems: list[Problem]


# takes a recipe; returns the layers below --config, and one line on the changes in config.py (None: no changes)
Lower = Callable[[str], tuple[list[Layer], str | None]]


def read_command(line: CommandLine, argv: Sequence[str] | None, lower: Lower) -> Given:
    """Return the settings of a command line (None: of this process), and its errors. If it requests help, print that
    instead, with the values that the command would use, and exit. Errors of the command line are then ignored."""
    argv = sys.argv[1:] if argv is None else argv
    kind = wants_help(argv)
    if kind is None:
        return _read(line, argv)
    given = _read(line, [word for word in argv if word not in (*HELP, *HELP_ALL)])
    layers, edits = lower(given.recipe)
    source = f"recipe {given.recipe}" + (f"; config.py: {edits}" if edits else "") if line.recipes else ""
    values = {name: value for name, (value, _) in merged(line.config_class, [*layers, given.file]).items()}
    print_line(line.help(values, source) if kind == "help" else line.help_all(values, source))
    raise SystemExit(0)


def _read(line: CommandLine, argv: Sequence[str]) -> Given:
    flags, problems = line.read(argv)
    file: Layer = {}
    if "config" in flags:
        try:
            file = read_settings(flags["config"][0])
        except UserError as error:
            problems += error.problems
    recipe, place = {**file, **flags}.get("recipe", (DEFAULT_RECIPE, ""))
    if not isinstance(recipe, str):
        problems.append(Problem(f"recipe is {recipe!r}", place, "Give the name or the file of a recipe"))
        recipe = DEFAULT_RECIPE
    for layer in (file, flags):
        layer.pop("recipe", None)
        layer.pop("config", None)
    return Given(file, flags, normal_name(recipe), place, problems)


# --- layers to a configuration ---------------------------------------------------------------------------------------


def merged(config_class: type, layers: Sequence[Layer], problems: Sequence[Problem] = ()) -> Layer:
    """Return the values of all settings with the places that set them: the declared defaults, replaced by `layers`,
    the lowest first. Raises UserError with the errors of all layers, after the `problems` found earlier."""
    settings = settings_of(config_class)
    problems = list(problems)
    values: Layer = {name: (setting.default, "default") for name, setting in settings.items()}
    for layer in layers:
        known, wrong = translate(layer, settings)
        values |= known
        problems += wrong
    for name, (value, place) in values.items():
        try:
            values[name] = (convert(settings[name], value, place), place)
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return values


def build(
    config_class: type,
    values: Layer,
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
    settings = {name: one for name, one in settings_of(config_class).items() if one.group not in foreign}
    groups: dict[str, dict[str, Any]] = {}
    for name, setting in settings.items():
        groups.setdefault(setting.group, {})[name] = values[name][0]
    hints = typing.get_type_hints(config_class)
    config = config_class(**top, **{group: hints[group](**leaves) for group, leaves in groups.items()})
    problems = [located(problem, values) for check in checks for problem in check(config)]
    raise_if([*problems, *(without_effect(settings, values, given, assumed) if checks else [])])
    return config.resolved()


def located(problem: Problem, values: Layer) -> Problem:
    """Return a problem of settings with its place: their flags, values, and the file and line that set them."""
    if not problem.settings:
        return problem
    places = []
    for name in problem.settings:
        value = values[name][0]
        text = "" if isinstance(value, bool) else " none" if value is None else f" {as_text(value, ' ')}"
        places.append(f"{flag_of(name)}{text}{file_of(values[name][1])}")
    return replace(problem, place=", ".join(places))


def file_of(place: str) -> str:
    """Return ` (file:line)` for a setting that was set in a file, otherwise an empty text."""
    return "" if place.startswith("--") or ":" not in place else f" ({place})"


def without_effect(
    settings: dict[str, Setting], values: Layer, given: Collection[str], assumed: Collection[str]
) -> list[Problem]:
    """Return one error for each setting that has no effect because of another one, such as lora_r without use_lora.

    Args:
        settings: the settings that the command reads.
        given: names of the settings that the command line or the call sets. Of all other settings, only the strict
            ones are checked.
        assumed: settings that get their values later: conditions on them count as met.
    """
    first = name_table(settings)
    named = {first[name] for name in given if name in first}
    read = {name: values[name][0] for name in settings}
    problems = []
    for name, setting in settings.items():
        value, place = values[name]
        condition = unmet(setting, read, assumed)
        is_off = value is None or (value == setting.default and not value)
        if condition is None or is_off or not (name in named or (setting.strict and place != "default")):
            continue
        other, wanted = condition.others[0]
        as_flags = not place.startswith("make_config")
        fix = "Add" if not condition.unset else "Change" if wanted else "Remove"
        what = f"{name} has no effect {condition.text(as_flags)}{file_of(values[other][1])}"
        fix = f"{fix} {condition.words(as_flags)}, or remove {setting.flag if as_flags else name}"
        problems.append(Problem(what, place, fix))
    return problems

"""Merges layers of settings into a checked, frozen configuration. Later layers win. Reports all errors together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rlhf.settings.fields import (
    Layer,
    Setting,
    alternatives,
    convert,
    flag_words,
    in_words,
    replaced,
    settings_of,
    unmet,
)
from rlhf.settings.flags import HELP, HELP_ALL, PLACE, CommandLine
from rlhf.settings.recipes import DEFAULT_RECIPE, normal_name, read_settings
from rlhf.settings.translate import translate
from rlhf.utils.errors import Problem, UserError, print_line, raise_if

BY_HAND = ("--", PLACE, "make_config(")  # the beginnings of places outside of files
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


class Given(NamedTuple):
    """The settings of a command line."""

    layers: list[Layer]  # below --config and the flags; one empty layer if the recipe has errors
    file: Layer  # of --config
    flags: Layer
    recipe: str  # the default recipe if none is given
    recipe_place: str  # the flag or file:line that sets the recipe; empty if none does
    problems: list[Problem]


Lower = Callable[[str, str], list[Layer]]  # takes a recipe and its place; returns the layers below --config
Edits = Callable[[str], str | None]  # takes a recipe; returns one line on the changes in config.py, None without any


def read_command(line: CommandLine, argv: Sequence[str] | None, lower: Lower, edits: Edits) -> Given:
    """Return the settings of a command line (None: of this process), and its errors. If it requests help, print that
    instead, with the values that the command would use, and exit. Errors of the command line are then ignored."""
    flags, problems = line.read(sys.argv[1:] if argv is None else argv)
    file: Layer = {}
    layers: list[Layer] = [{}]
    try:
        file = read_settings(flags.pop("config")[0]) if "config" in flags else file
    except UserError as error:
        problems += error.problems
    recipe, place = file.pop("recipe", (DEFAULT_RECIPE, ""))
    recipe, place = flags.pop("recipe", (recipe, place))
    flags.pop("algorithm", None)  # the line is already that of this algorithm
    recipe = normal_name(recipe)
    wants_help = HELP in flags or HELP_ALL in flags
    try:
        layers = lower(recipe, place)
    except UserError as error:
        if wants_help:
            raise
        problems += error.problems
    if wants_help:
        changes = edits(recipe)
        source = f"recipe {recipe}" + (f"; config.py: {changes}" if changes else "") if line.recipes else ""
        print_line(line.help(merged(line.config_class, [*layers, file]), source, HELP_ALL in flags))
        raise SystemExit(0)
    return Given(layers, file, flags, recipe, place, problems)


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
    layers: Sequence[Layer],
    problems: Sequence[Problem] = (),
    foreign: Collection[str] = (),
    checks: Sequence[Check] = (),
    assumed: Collection[str] = (),
    **top: Any,
) -> Any:
    """Return the configuration of `layers`, as in `merged`. Raises UserError with all errors that `checks` find, and
    with the settings that have no effect.

    Args:
        foreign: settings that the command does not use; they keep their declared defaults.
        checks: functions that return the errors of the whole configuration. Without them, nothing is checked.
        assumed: as in `without_effect`.
        top: fields of the configuration that are not groups.
    """
    values = merged(config_class, layers, problems)
    settings = {name: one for name, one in settings_of(config_class).items() if name not in foreign}
    config = replaced(config_class(**top), **{name: values[name][0] for name in settings})
    if checks:
        found = [located(problem, values) for check in checks for problem in check(config)]
        raise_if([*found, *without_effect(settings, values, assumed)])
    return config.resolved()


def located(problem: Problem, values: Layer) -> Problem:
    """Return a problem of settings with its place: their flags, values, and the file and line that set them."""
    places = []
    for name in problem.settings:
        value, place = values[name]
        places.append(f"{' '.join(flag_words(name, value))}{in_file(place)}")
    return replace(problem, place=", ".join(places) or problem.place)


def in_file(place: str) -> str:
    """Return ` (file:line)` for a setting that was set in a file, otherwise an empty text."""
    return f" ({place})" if ":" in place else ""


def without_effect(settings: dict[str, Setting], values: Layer, assumed: Collection[str]) -> list[Problem]:
    """Return one error for each setting that has no effect because of another one, such as lora_r without use_lora.
    Values in files are ignored, except for the strict ones. Conditions on the settings in `assumed`, which get their
    values later, count as met."""
    read = {name: values[name][0] for name in settings if name not in assumed}
    problems = []
    for name, setting in settings.items():
        value, place = values[name]
        as_flags = not place.startswith("make_config(")
        counts = place != "default" if setting.strict else place.startswith(BY_HAND)
        condition = unmet(setting, read)
        if not condition or not counts or value is None or (value == setting.default and not value):
            continue
        other, wanted = alternatives(condition)[0]
        case = in_words(condition, as_flags)
        fix = "Add" if case.startswith("without") else "Change" if wanted else "Remove"
        what = f"{name} has no effect {case}{in_file(values[other][1])}"
        fix = f"{fix} {case.partition(' ')[2]}, or remove {setting.flag if as_flags else name}"
        problems.append(Problem(what, place, fix))
    return problems

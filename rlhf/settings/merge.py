"""From layers of settings to a checked, frozen configuration: later layers win, all errors are reported together."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.settings.fields import Layer, convert, settings_of
from rlhf.settings.flags import CommandLine, wants_help
from rlhf.settings.recipes import DEFAULT_RECIPE
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


def values_of(config_class: type, layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the value of every setting under `layers`, the lowest first, over the declared defaults. Raises UserError
    with every error of every layer."""
    settings, merged, problems = settings_of(config_class), {}, []
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
            problems += error.faults
    raise_if(problems)
    return values


def build(
    config_class: type,
    values: dict[str, Any],
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
    raise_if([problem for check in checks for problem in check(config)])
    return config.resolved()


@dataclass(frozen=True)
class Given:
    """What a command line sets: the layers of its --config file and of its flags, and the recipe that they name."""

    layers: tuple[Layer, Layer]
    recipe: tuple[str, str] | None = None  # (name, the place that names it)


def read_given(line: CommandLine, argv: Sequence[str]) -> Given:
    """Return what a command line sets. Raises UserError with the errors of its flags, or of its file."""
    flags = line.read(list(argv))
    file = flags.pop("config")[0] if line.recipes and "config" in flags else None
    from_file = read_settings(file) if file is not None else {}
    recipe = {**from_file, **flags}.get("recipe") if line.recipes else None
    layers = tuple({k: v for k, v in layer.items() if k != "recipe"} for layer in (from_file, flags))
    return Given(layers if line.recipes else (from_file, flags), recipe)


Lower = Callable[[str], tuple[list[Layer], str]]  # from a recipe to the layers beneath --config, and what they are


def show_help(line: CommandLine, argv: Sequence[str], lower: Lower) -> None:
    """If the command line requests help, print it with the values that the command would use, and exit. Other errors
    of the command line are ignored."""
    kind = wants_help(argv)
    if kind is None:
        return
    given = line.given(list(argv))
    from_file = read_settings(given["config"][0]) if line.recipes and "config" in given else {}
    recipe = {**from_file, **given}.get("recipe", (DEFAULT_RECIPE, ""))[0] if line.recipes else DEFAULT_RECIPE
    layers, source = lower(recipe)
    layers = [*layers, {name: found for name, found in from_file.items() if name != "recipe"}]
    sys.stdout.write(getattr(line, kind)(values_of(line.config_class, layers), source))
    raise SystemExit(0)

"""Settings: dataclass fields with a meaning, a unit and a range, and their conversion from and to text."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from rlhf.settings.types import KLTarget, Renaming, Split
from rlhf.utils.errors import UserError, did_you_mean

TRUE_WORDS = {"true", "yes", "on", "1"}
FALSE_WORDS = {"false", "no", "off", "0"}
UNSET_WORDS = {"none", "null", "auto", ""}
NEVER_EMPTY = ("prompts", "pairs")  # an empty text is an unset variable of the shell; as a path, it is this folder
# limit of whole numbers without a declared one: larger values are mistakes, and loops over them never end
LARGEST_COUNT = 10**9
MOST_DIGITS = 30
# name -> value, and the place that set it: a flag, file:line, make_config(name=), or "default"
Layer = dict[str, tuple[Any, str]]
UNREADABLE = "(unreadable)"  # the only name in the layer of a file that cannot be read; its value is the Problem
LONGEST_SHOWN = 80  # characters of a value in an error message
BOUNDS = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}
EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting of a command."""

    name: str
    group: str
    type: Any
    default: Any
    help: str  # meaning and unit
    unset: str = ""  # what happens if it is not set
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # other names, for example those of other trainers
    brief: str | bool = False  # the text in `--help`; True: `help`; False: the setting is not in `--help`
    positional: bool = False  # the value is given on the command line without a flag
    alone: tuple[str, ...] = ()  # the value of a list whose flag is given without a value, or as true; false: ()
    # conditions without which the setting has no effect: `use_lora` (it is set), `kl_placement=reward`, `!seeds` (it
    # is not set), `!kl_schedule=fixed`; `merge_lora or push_to_hub` is one condition. A flag whose conditions are not
    # met is refused. A value in a file is ignored, because commands share files
    needs: str | tuple[str, ...] = ()
    strict: bool = False  # a value in a file is refused, too

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def conditions(self) -> list[Condition]:
        needs = (self.needs,) if isinstance(self.needs, str) else self.needs
        return [Condition.parse(need) for need in needs]

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def optional(self) -> bool:
        return isinstance(self.type, types.UnionType)

    @property
    def base_type(self) -> Any:
        return next(t for t in typing.get_args(self.type) if t is not type(None)) if self.optional else self.type

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.base_type) is tuple

    @property
    def is_bool(self) -> bool:
        return self.base_type is bool

    @property
    def range(self) -> str:
        """The bounds as text; empty without any."""
        limits = [(words, getattr(self, name)) for name, (words, _) in BOUNDS.items()]
        return " and ".join(f"{words} {_number(limit)}" for words, limit in limits if limit is not None)


def setting(default: Any, help: str, **declared: Any) -> Any:
    """Return a dataclass field that declares one setting. `declared`: more fields of Setting."""
    return field(default=default, metadata={"help": help, **declared})


def same_as(group: type, name: str, **changed: Any) -> Any:
    """Return a field that declares the setting `name` of another group again, with `changed` fields of Setting."""
    declared = next(f for f in dataclasses.fields(group) if f.name == name)
    default = changed.pop("default", declared.default)
    return field(default=default, metadata={**declared.metadata, **changed})


@functools.cache  # commands ask several times, and reading the annotations takes 5 ms
def settings_of(config_class: type) -> dict[str, Setting]:
    """Return all settings of a configuration class by name, in the order of their groups. Not to be changed."""
    found = {}
    for group, group_class in typing.get_type_hints(config_class).items():
        if dataclasses.is_dataclass(group_class):
            hints = typing.get_type_hints(group_class)
            for f in dataclasses.fields(group_class):
                found[f.name] = Setting(f.name, group, hints[f.name], f.default, **f.metadata)
    return found


def name_table(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Return every name of every setting -> the setting's first name."""
    return {alias: s.name for s in settings.values() for alias in s.names}


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


# --- settings that have an effect only with others -------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """One of the `needs` of a setting: one of `others` is set; with `unset`: none of them is."""

    others: tuple[tuple[str, str], ...]  # name and value; an empty value: any
    unset: bool

    @classmethod
    def parse(cls, text: str) -> Condition:
        words = [word.partition("=") for word in text.removeprefix("!").split(" or ")]
        return cls(tuple((name, value) for name, _, value in words), text.startswith("!"))

    def is_met(self, values: Mapping[str, Any], assumed: Collection[str] = ()) -> bool:
        """True if `values` meet the condition, and if it is about a setting that is in `assumed`, or that is not in
        `values` because the command does not have it."""
        found = False
        for name, wanted in self.others:
            if name in assumed or name not in values:
                return True
            value = values[name]
            entries = value if isinstance(value, tuple) else (value,)
            found |= wanted in map(as_text, entries) if wanted else value not in (None, False, ())
        return found != self.unset

    def words(self, as_flags: bool) -> str:
        """Return the other settings as text: `--kl-placement reward`, `--merge-lora or --push-to-hub`."""
        named = [(flag_of(name) if as_flags else name, value) for name, value in self.others]
        return " or ".join(f"{name} {value}".rstrip() for name, value in named)

    def text(self, as_flags: bool = True) -> str:
        """Return in which case a setting has no effect: `without --use-lora`, `with --kl-schedule fixed`."""
        return f"{'with' if self.unset else 'without'} {self.words(as_flags)}"


def unmet(setting: Setting, values: Mapping[str, Any], assumed: Collection[str] = ()) -> Condition | None:
    """Return the first condition of a setting that `values` do not meet; None if the setting has an effect."""
    return next((condition for condition in setting.conditions if not condition.is_met(values, assumed)), None)


# --- text to value, and back -----------------------------------------------------------------------------------------


def is_unset(value: Any) -> bool:
    """True if a written value means "unset"."""
    alone = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    return alone is None or (isinstance(alone, str) and alone.lower() in UNSET_WORDS)


def is_on(value: Any) -> bool | None:
    """Return the truth of a written value; None if it is neither true nor false."""
    only = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    word = str(only).lower()
    return word in TRUE_WORDS if word in TRUE_WORDS | FALSE_WORDS else None


def convert(setting: Setting, value: Any, where: str) -> Any:
    """Return `value` (text of a flag, or data from a YAML file) in the type of the setting. Raises UserError, with
    `where` as the place that set the value."""
    if setting.name in NEVER_EMPTY and isinstance(value, str) and not value.strip():
        raise UserError(f"{setting.name} is empty", where, "Give a data file, a folder or a hub dataset's name")
    if setting.optional and is_unset(value):
        return None
    if setting.alone and (on := is_on(value)) is not None:
        return setting.alone if on else ()
    if not setting.is_list:
        return _convert_one(setting, value, setting.base_type, where)
    kind = typing.get_args(setting.base_type)[0]
    if isinstance(value, dict):  # a mapping, for settings whose entries are NAME=VALUE
        value = [f"{name}={entry}" for name, entry in value.items()]
    entries: list[Any] = []
    for part in value if isinstance(value, (list, tuple, range)) else [value]:
        if isinstance(part, str) and getattr(kind, "at_commas", True):
            strip = str.lstrip if kind is Renaming else str.strip  # the name of a column may end with a space
            entries += map(strip, at_commas(part))
        else:
            entries.append(part)
    return tuple(_convert_one(setting, entry, kind, where) for entry in entries)


def at_commas(text: str) -> list[str]:
    """Split a list at its commas, but not at those in parentheses: `f(a=1, b=(2, 3)),g` has two entries."""
    parts = [""]
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts if depth == 0 else text.split(",")


def _convert_one(setting: Setting, value: Any, kind: type, where: str) -> Any:
    try:
        result = value if isinstance(value, kind) and not isinstance(value, bool) else _parse(kind, value)
    except (ValueError, TypeError, ArithmeticError):
        choices = f"one of {', '.join(setting.choices)}" if setting.choices else "text"
        expects = getattr(kind, "expects", EXPECTED.get(kind, choices))
        raise UserError(f"{setting.name} is {_shown(value)}", where, f"Give {expects}") from None
    problem = _out_of_range(setting, result)
    if problem:
        raise UserError(f"{setting.name} is {_shown(value).strip(chr(39))}", where, problem)
    return result


def _shown(value: Any) -> str:
    """Return a value as text for an error message."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print numbers with more than 4,300 digits
        text = "a number with thousands of digits"
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + " ..."


def _parse(kind: type, value: Any) -> Any:
    if kind is bool:
        word = str(value).lower()
        if isinstance(value, (dict, list)) or word not in TRUE_WORDS | FALSE_WORDS:
            raise ValueError(value)
        return word in TRUE_WORDS
    if isinstance(value, bool) or not isinstance(value, (str, int, float, os.PathLike)):
        raise TypeError(value)
    if kind is float:
        return float(value)
    if kind is int:
        number = Decimal(str(value))  # accepts 1e4, and is exact for numbers above 2^53
        small = number.is_finite() and number.adjusted() <= MOST_DIGITS
        if not small or number != number.to_integral_value():
            raise ValueError(value)
        return int(number)
    return kind.parse(value) if hasattr(kind, "parse") else str(value)


def _out_of_range(setting: Setting, value: Any) -> str | None:
    if setting.choices and value not in setting.choices:
        return f"{did_you_mean(str(value), setting.choices)}Choices: {', '.join(setting.choices)}"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if isinstance(value, int) and setting.le is None and value > LARGEST_COUNT:
        return f"It must be at most {LARGEST_COUNT:,}"
    limits = [(is_inside, getattr(setting, name)) for name, (_, is_inside) in BOUNDS.items()]
    if math.isfinite(value) and all(limit is None or is_inside(value, limit) for is_inside, limit in limits):
        return None
    return f"It must be {setting.range or 'a finite number'}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def as_text(value: Any, between: str = ",", empty: str = "unset") -> str:
    """Return the value of a setting as text. The entries of a list are joined with `between`; an empty list gives
    `empty`."""
    if isinstance(value, (tuple, list)):
        return between.join(map(str, value)) or empty
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- configurations --------------------------------------------------------------------------------------------------


def values_in(config: Any) -> dict[str, Any]:
    """Return the values of all settings of a configuration by name."""
    return {name: getattr(getattr(config, s.group), name) for name, s in settings_of(type(config)).items()}


def replaced(config: Any, **values: Any) -> Any:
    """Return the configuration with other values of some settings."""
    settings = settings_of(type(config))
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        groups.setdefault(settings[name].group, {})[name] = value
    return replace(config, **{group: replace(getattr(config, group), **new) for group, new in groups.items()})


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as JSON-ready data, group by group, without the fields that comparisons ignore: those are
    not settings."""

    def plain(value: Any) -> Any:
        if isinstance(value, (KLTarget, Split)):
            return str(value)
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare}
        return [plain(v) for v in value] if isinstance(value, tuple) else value

    return plain(config)

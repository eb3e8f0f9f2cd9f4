"""Settings: dataclass fields with a meaning, a unit and a range, and their conversion from and to text."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from rlhf.settings.types import JsonObject, KLTarget, PathName, Renaming, Split, StopText, value_text
from rlhf.utils.errors import UserError, did_you_mean

TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
# an entry of a list with commas, which may be inside of parentheses: `f(a=1, b=(2, 3)),g` has two entries
ENTRY = re.compile(r"(?:\((?:[^()]|\([^()]*\))*\)|[^,])+")
# limit of whole numbers without a declared one: larger values are mistakes, and loops over them never end
LARGEST_COUNT = 10**9
MOST_DIGITS = 30
# name -> value, and the place that set it: a flag, file:line, make_config(name=), or "default"
Layer = dict[str, tuple[Any, str]]
UNREADABLE = "(unreadable)"  # the only name in the layer of a file that cannot be read; its value is the Problem
BOUNDS = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}
EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting of a command. A group's OF_ALL has fields that hold for all of its settings."""

    name: str
    group: str
    type: Any
    kind: Any  # the type of the value, or of each entry of a list
    is_list: bool
    optional: bool
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
    none: Any = None  # what the text `none` gives, if that is not "not set"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def conditions(self) -> tuple[str, ...]:
        return (self.needs,) if isinstance(self.needs, str) else self.needs

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def can_be_unset(self) -> bool:
        """True if the value may be `none`. In a list of folders, `none` is a folder."""
        return self.optional or (self.default == () and self.kind is not PathName)

    @property
    def limits(self) -> list[tuple[str, Callable[[float, float], bool], float]]:
        """The declared bounds: each as words, as an operator, and its number."""
        return [(*bound, getattr(self, name)) for name, bound in BOUNDS.items() if getattr(self, name) is not None]

    @property
    def range(self) -> str:
        """The bounds as text; empty without any."""
        return " and ".join(f"{words} {limit:,}" for words, _, limit in self.limits)


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
                optional = isinstance(hints[f.name], types.UnionType)
                kind = typing.get_args(hints[f.name])[0] if optional else hints[f.name]
                is_list = typing.get_origin(kind) is tuple
                kind = typing.get_args(kind)[0] if is_list else kind
                declared = {**f.metadata, **getattr(group_class, "OF_ALL", {})}
                found[f.name] = Setting(f.name, group, hints[f.name], kind, is_list, optional, f.default, **declared)
    return found


def name_table(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Return every name of every setting -> the setting's first name."""
    return {alias: s.name for s in settings.values() for alias in s.names}


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


# --- settings that have an effect only with others -------------------------------------------------------------------


def alternatives(condition: str) -> list[tuple[str, str]]:
    """Return the settings of a condition, each with the value that it must have; an empty one: any."""
    words = [word.partition("=") for word in condition.removeprefix("!").split(" or ")]
    return [(name, value) for name, _, value in words]


def is_met(condition: str, values: Mapping[str, Any]) -> bool:
    """True if `values` meet a condition, and if it is about a setting that is not in `values`: the command does not
    have it, or it gets its value later."""
    found = False
    for name, wanted in alternatives(condition):
        if name not in values:
            return True
        value = values[name]
        entries = value if isinstance(value, tuple) else (value,)
        found |= wanted in map(as_text, entries) if wanted else value not in (None, False, ())
    return found != condition.startswith("!")


def unmet(setting: Setting, values: Mapping[str, Any]) -> str:
    """Return the first condition of a setting that `values` do not meet; empty if the setting has an effect."""
    return next((condition for condition in setting.conditions if not is_met(condition, values)), "")


def in_words(condition: str, as_flags: bool = True) -> str:
    """Return in which case a setting has no effect: `without --use-lora`, `with --kl-schedule fixed`."""
    named = [(flag_of(name) if as_flags else name, value) for name, value in alternatives(condition)]
    others = " or ".join(f"{name} {value}".rstrip() for name, value in named)
    return f"{'with' if condition.startswith('!') else 'without'} {others}"


# --- text to value, and back -----------------------------------------------------------------------------------------


def word_of(value: Any) -> str:
    """Return a written value, or the only entry of a list, as text in lower case."""
    entry = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    return value_text(entry).strip("'").lower()


def is_unset(value: Any) -> bool:
    """True if a written value means "unset"."""
    return word_of(value) in ("none", "null", "auto")


def is_on(value: Any) -> bool | None:
    """Return the truth of a written value; None if it is neither true nor false."""
    return TRUTH.get(word_of(value))


def convert(setting: Setting, value: Any, where: str) -> Any:
    """Return `value` (text of a flag or a YAML file, or data from Python or run.json) in the type of the setting.
    Raises UserError, with `where` as the place that set the value."""
    if setting.can_be_unset and is_unset(value) and value not in setting.choices:
        if not setting.optional:
            return ()
        return None if value is None else setting.none
    if setting.alone and (on := is_on(value)) is not None:
        return setting.alone if on else ()
    if not setting.is_list:
        return _convert_one(setting, value, where)
    if isinstance(value, dict):  # a mapping, for settings whose entries are NAME=VALUE
        value = [f"{name}={entry}" for name, entry in value.items()]
    strip = str.lstrip if setting.kind is Renaming else str.strip  # the name of a column may end with a space
    entries: list[Any] = []
    for part in value if isinstance(value, (list, tuple, range)) else [value]:
        is_split = isinstance(part, str) and getattr(setting.kind, "at_commas", True)
        entries += map(strip, ENTRY.findall(part) or [part]) if is_split else [part]
    return tuple(_convert_one(setting, entry, where) for entry in entries)


def _convert_one(setting: Setting, value: Any, where: str) -> Any:
    kind = setting.kind
    try:
        result = _parse(kind, value)
        fix = _out_of_range(setting, result)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        expected = getattr(kind, "expects", None) or EXPECTED.get(kind) or " or ".join(setting.choices)
        fix = f"Give {expected or 'text'}"
    if not fix:
        return result
    raise UserError(f"{setting.name} is {value_text(value)}", where, fix)


def _parse(kind: Any, value: Any) -> Any:
    if kind is bool:
        on = is_on(value)
        if on is None:
            raise ValueError(value)
        return on
    if kind is JsonObject and isinstance(value, dict):
        return kind.parse(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float, os.PathLike, kind)):
        raise TypeError(value)
    if kind is float:
        return float(value)
    if kind is int:
        number = Decimal(str(value))  # accepts 1e4, and is exact for numbers above 2^53
        if number.adjusted() > MOST_DIGITS or number != int(number):
            raise ValueError(value)
        return int(number)
    if not str(value).strip() and kind is not StopText:  # an empty text is an unset variable of the shell
        raise ValueError(value)
    if hasattr(kind, "parse"):
        return value if isinstance(value, kind) else kind.parse(value)
    return str(value)


def _out_of_range(setting: Setting, value: Any) -> str:
    """Return how to fix a value that the setting does not allow; empty if it is allowed."""
    if setting.choices and value not in setting.choices:
        return f"{did_you_mean(value, setting.choices)}Choices: {', '.join(setting.choices)}"
    if setting.kind is int and setting.le is None and value > LARGEST_COUNT:
        return f"It must be at most {LARGEST_COUNT:,}"
    if setting.kind not in (int, float) or (
        math.isfinite(value) and all(is_inside(value, limit) for _, is_inside, limit in setting.limits)
    ):
        return ""
    return f"It must be {setting.range or 'a finite number'}"


def as_text(value: Any, between: str = ",", empty: str = "unset") -> str:
    """Return the value of a setting as text. The entries of a list are joined with `between`; an empty list gives
    `empty`."""
    if isinstance(value, (tuple, list)):
        return between.join(map(str, value)) or empty
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def flag_words(name: str, value: Any) -> list[str]:
    """Return the command-line arguments that set one setting."""
    if isinstance(value, bool):
        return [flag_of(name) if value else flag_of(f"no_{name}")]
    if isinstance(value, tuple):
        return [flag_of(name), *(map(str, value or ["none"]))]
    return [flag_of(name), "none" if value is None else str(value)]


def setting_words(settings: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments that set several settings."""
    return [word for name, value in settings.items() for word in flag_words(name, value)]


def changed_words(wanted: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments of the `wanted` settings that differ from the `usual` ones."""
    return setting_words({name: value for name, value in wanted.items() if value != usual[name]})


# --- configurations --------------------------------------------------------------------------------------------------


def values_in(config: Any) -> dict[str, Any]:
    """Return the values of all settings of a configuration by name."""
    return {name: getattr(getattr(config, s.group), name) for name, s in settings_of(type(config)).items()}


def replaced(config: Any, **values: Any) -> Any:
    """Return the configuration with other values of some settings."""
    groups = {name: setting.group for name, setting in settings_of(type(config)).items()}
    for name, value in values.items():
        group = replace(getattr(config, groups[name]), **{name: value})
        config = replace(config, **{groups[name]: group})
    return config


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

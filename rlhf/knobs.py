"""Turns a dataclass of knobs into flags and YAML keys, and layers of text into a checked, frozen configuration.

Later layers win: defaults, recipe, YAML file, flags. All faults of one command are reported together.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlhf.errors import UserError, did_you_mean, raise_if

TRUE_WORDS = {"true", "yes", "on", "1"}
FALSE_WORDS = {"false", "no", "off", "0"}
UNSET_WORDS = {"none", "null", "auto", ""}


def knob(default: Any, help: str, *, low=None, high=None, above=None, below=None, choices=None, aliases=()) -> Any:
    """A dataclass field that is one knob.

    `help` says the meaning and the unit. `low`/`high` bound the value inclusively, `above`/`below` exclusively.
    `aliases` are other names under which the references know the knob.
    """
    bounds = {"low": low, "high": high, "above": above, "below": below}
    return field(default=default, metadata={"help": help, "bounds": bounds, "choices": choices, "aliases": aliases})


@dataclass(frozen=True)
class KLTarget:
    """A KL to hold: `nats` per whole reply ("sequence") or per reply token ("token"). Never a bare number."""

    nats: float
    per: str

    @classmethod
    def parse(cls, text: str) -> KLTarget:
        number, _, per = str(text).partition("/")
        per = {"seq": "sequence", "tok": "token"}.get(per.strip(), per.strip())
        target = cls(float(number), per)
        if per not in ("sequence", "token") or not 0 < target.nats < math.inf:
            raise ValueError(text)
        return target

    def __str__(self) -> str:
        return f"{self.nats:g}/{self.per}"

    expects = "a number of nats above 0 with its unit, such as 6/sequence or 0.05/token"


@dataclass(frozen=True)
class Split:
    """Percent of the questions that go to the reward model, to RL and to evaluation."""

    reward: int
    rl: int
    evaluation: int

    @classmethod
    def parse(cls, text: str) -> Split:
        parts = [int(part) for part in str(text).split("/")]
        if len(parts) != 3 or sum(parts) != 100 or min(parts) < 0:
            raise ValueError(text)
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.reward}/{self.rl}/{self.evaluation}"

    expects = "three whole percentages that add up to 100, such as 45/45/10"


@dataclass(frozen=True)
class Knob:
    """One leaf of a configuration class: where it lives and what it may be."""

    name: str
    group: str
    type: Any
    default: Any
    help: str
    bounds: dict[str, float | None]
    choices: tuple | None
    aliases: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

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


def knobs_of(config_class: type) -> dict[str, Knob]:
    """All knobs of a configuration class by name, in the order of their groups."""
    found = {}
    for group, group_class in typing.get_type_hints(config_class).items():
        if not dataclasses.is_dataclass(group_class):
            continue
        hints = typing.get_type_hints(group_class)
        for f in dataclasses.fields(group_class):
            found[f.name] = Knob(f.name, group, hints[f.name], f.default, **f.metadata)
    return found


def name_table(knobs: dict[str, Knob]) -> dict[str, str]:
    """Every name a knob answers to -> its own name."""
    return {alias: k.name for k in knobs.values() for alias in (k.name, *k.aliases)}


# --- text to value ---------------------------------------------------------------------------------------------------


def convert(knob: Knob, value: Any, where: str) -> Any:
    """`value` (text from a flag, or what YAML made of it) as the knob's type; a UserError names `where`."""
    if knob.optional and (value is None or str(value).lower() in UNSET_WORDS):
        return None
    if knob.is_list:
        parts = value if isinstance(value, (list, tuple)) else [value]
        words = [w.strip() for part in parts for w in (part.split(",") if isinstance(part, str) else [part])]
        return tuple(_convert_one(knob, w, typing.get_args(knob.base_type)[0], where) for w in words)
    return _convert_one(knob, value, knob.base_type, where)


def _convert_one(knob: Knob, value: Any, kind: type, where: str) -> Any:
    expects = getattr(kind, "expects", {bool: "true or false", int: "a whole number", float: "a number"}.get(kind))
    try:
        result = value if isinstance(value, kind) and not isinstance(value, bool) else _parse(kind, value)
    except (ValueError, TypeError):
        raise UserError(f"{knob.name} is {value!r}: {where}. Give {expects or 'text'}") from None
    fault = _out_of_range(knob, result)
    if fault:
        raise UserError(f"{knob.name} is {value}: {where}. {fault}")
    return result


def _parse(kind: type, value: Any) -> Any:
    if isinstance(value, (dict, list)) or value is None:
        raise TypeError(value)
    if kind is bool:
        word = str(value).lower()
        if word not in TRUE_WORDS | FALSE_WORDS:
            raise ValueError(value)
        return word in TRUE_WORDS
    if kind is int:
        number = float(value)  # 1e4 is a whole number too
        if isinstance(value, bool) or not number.is_integer():
            raise ValueError(value)
        return int(number)
    if kind is float:
        if isinstance(value, bool):
            raise ValueError(value)
        return float(value)
    return kind.parse(value) if hasattr(kind, "parse") else str(value)


def _out_of_range(knob: Knob, value: Any) -> str | None:
    if knob.choices and value not in knob.choices:
        return f"{did_you_mean(str(value), knob.choices)} Choices: {', '.join(knob.choices)}"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    b = knob.bounds
    inside = (
        math.isfinite(value)
        and (b["low"] is None or value >= b["low"])
        and (b["high"] is None or value <= b["high"])
        and (b["above"] is None or value > b["above"])
        and (b["below"] is None or value < b["below"])
    )
    return None if inside else f"It must be {range_text(knob)}"


def range_text(knob: Knob) -> str:
    words = {"low": "at least", "above": "above", "high": "at most", "below": "below"}
    parts = [f"{words[k]} {knob.bounds[k]:g}" for k in words if knob.bounds[k] is not None]
    return " and ".join(parts) or "a finite number"


# --- layers ----------------------------------------------------------------------------------------------------------


def read_yaml(path: str, names: dict[str, str]) -> dict[str, tuple[Any, str]]:
    """The knobs that a YAML file sets: name -> (value, 'file:line'). Nesting is free: only the leaves' names count."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"cannot read the configuration file: {path} ({error.strerror}). Check --config") from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {path}, byte {error.start}. Save the file as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise UserError(
            f"not YAML ({error.problem}): {path}:{mark.line + 1}:{mark.column + 1}. Correct that line"
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, yaml.MappingNode):
        raise UserError(f"not a mapping of names to values: {path}:1. Write lines such as `learning_rate: 1e-5`")
    found: dict[str, tuple[Any, str]] = {}
    faults: list[str] = []
    _collect_yaml(tree, path, names, found, faults)
    raise_if(faults)
    return found


def _collect_yaml(tree: yaml.MappingNode, path: str, names: dict[str, str], found: dict, faults: list[str]) -> None:
    for key_node, value_node in tree.value:
        key = str(key_node.value).replace("-", "_")
        where = f"{path}:{key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode):
            _collect_yaml(value_node, path, names, found, faults)
        elif key not in names:
            faults.append(f"unknown key {key}: {where}. {did_you_mean(key, names)}")
        elif names[key] in found:
            faults.append(f"{key} is set twice: {where} and {found[names[key]][1]}. Keep one")
        else:
            try:
                found[names[key]] = (_yaml_value(value_node), where)
            except yaml.constructor.ConstructorError as error:
                faults.append(f"{key} is not plain data ({error.problem}): {where}. Write plain text or numbers")


def _yaml_value(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message}: command line. --help shows how each flag is written")


def make_parser(config_class: type, prog: str, description: str, recipes: dict) -> argparse.ArgumentParser:
    """A flat flag for every knob (dashes or underscores, and its aliases); booleans have --x and --no-x."""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--recipe", metavar="NAME", help=f"settings to start from: {', '.join(recipes)}")
    parser.add_argument("--config", metavar="FILE.yaml", help="settings from a YAML file, over the recipe's")
    groups: dict[str, Any] = {}
    for k in knobs_of(config_class).values():
        if k.group not in groups:
            title = typing.get_type_hints(config_class)[k.group].__doc__.strip().rstrip(".")
            groups[k.group] = parser.add_argument_group(title)
        _add_flag(groups[k.group], k)
    return parser


def _add_flag(group, k: Knob) -> None:
    names = (k.name, *k.aliases)
    spellings = _spellings(names)
    bounds = f", {range_text(k)}" if any(v is not None for v in k.bounds.values()) else ""
    help = f"{k.help} (default: {_show(k.default)}{bounds})".replace("%", "%%")
    if k.is_bool:
        group.add_argument(*spellings, dest=k.name, nargs="?", const="true", metavar="true|false", help=help)
        negative = _spellings([f"no_{name}" for name in names])
        group.add_argument(*negative, dest=k.name, action="store_const", const="false", help=argparse.SUPPRESS)
    else:
        shape = "|".join(k.choices) if k.choices else k.name.upper()
        group.add_argument(*spellings, dest=k.name, metavar=shape, help=help, nargs="+" if k.is_list else None)


def _spellings(names: Iterable[str]) -> list[str]:
    """Each name as a flag with dashes and, where that differs, with underscores."""
    return list(dict.fromkeys("--" + spelt for name in names for spelt in (name.replace("_", "-"), name)))


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def read_flags(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, tuple[Any, str]]:
    """name -> (text, flag) for every flag that was given. Unknown ones are reported together, with the nearest."""
    namespace, unknown = parser.parse_known_args(argv)
    known = [s for action in parser._actions for s in action.option_strings]
    raise_if(
        [
            f"unknown flag {u.split('=')[0]}: command line. {did_you_mean(u.split('=')[0], known)}"
            for u in unknown
            if u.startswith("--")
        ]
    )
    raise_if([f"unexpected word {u!r}: command line. Every setting is a flag; --help lists them" for u in unknown])
    return {name: (value, "--" + name.replace("_", "-")) for name, value in vars(namespace).items()}


def resolve(config_class: type, recipes: dict, argv: list[str], prog: str, description: str) -> Any:
    """The configuration that defaults, recipe, YAML file and flags make together. All faults in one UserError."""
    knobs = knobs_of(config_class)
    flags = read_flags(make_parser(config_class, prog, description, recipes), argv)
    yaml_path = flags.pop("config", (None, ""))[0]
    from_yaml = read_yaml(yaml_path, {**name_table(knobs), "recipe": "recipe"}) if yaml_path else {}
    layers = {**from_yaml, **flags}
    recipe, where = layers.pop("recipe", (_default_recipe(config_class), ""))
    if recipe not in recipes:
        raise UserError(
            f"unknown recipe {recipe!r}: {where}. {did_you_mean(recipe, recipes)} Known: {', '.join(recipes)}"
        )
    recipe_layer = {name: (value, f"recipe {recipe}") for name, value in recipes[recipe].items()}
    return build(config_class, {**recipe_layer, **layers}, recipe=recipe)


def _default_recipe(config_class: type) -> str:
    return next(f.default for f in dataclasses.fields(config_class) if f.name == "recipe")


def build(config_class: type, values: dict[str, tuple[Any, str]], **top: Any) -> Any:
    """A configuration from name -> (value, where). Checks every value, then how they fit (`config.faults()`)."""
    faults, converted = [], {}
    for name, k in knobs_of(config_class).items():
        value, where = values.get(name, (k.default, "default"))
        try:
            converted.setdefault(k.group, {})[name] = convert(k, value, where)
        except UserError as error:
            faults += error.faults
    raise_if(faults)
    hints = typing.get_type_hints(config_class)
    config = config_class(**top, **{group: hints[group](**leaves) for group, leaves in converted.items()})
    raise_if(config.faults())
    return config


def as_plain(config: Any) -> dict[str, Any]:
    """A configuration as JSON-ready data, group by group."""

    def plain(value: Any) -> Any:
        if isinstance(value, (KLTarget, Split)):
            return str(value)
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return [plain(v) for v in value] if isinstance(value, tuple) else value

    return plain(config)

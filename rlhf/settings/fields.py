"""A setting is a dataclass field with a meaning, a unit and a range. How text becomes its value, and back."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from rlhf.settings.types import KLTarget, Split
from rlhf.utils.errors import UserError, did_you_mean

TRUE_WORDS = {"true", "yes", "on", "1"}
FALSE_WORDS = {"false", "no", "off", "0"}
UNSET_WORDS = {"none", "null", "auto", ""}
MOST = 10**9  # of a whole number that has no other upper limit: more is a slip, and loops over it never end
MOST_DIGITS = 30
Layer = dict[str, tuple[Any, str]]  # name -> (value, where it was set)
# what other trainers call it -> the setting
ELSEWHERE = {"lr": "learning_rate", "beta": "kl_coef", "kl_beta": "kl_coef", "max_completion_length": "reply_length"}


def knob(
    default: Any,
    help: str,
    *,
    low=None,
    high=None,
    above=None,
    below=None,
    choices=None,
    aliases=(),
    positional: bool = False,
) -> Any:
    """A dataclass field that is one knob.

    `help` says the meaning and the unit. `low`/`high` bound the value inclusively, `above`/`below` exclusively.
    `aliases` are other names under which the references know the knob. A `positional` one is written without a flag.
    """
    bounds = {"low": low, "high": high, "above": above, "below": below}
    said = {"help": help, "bounds": bounds, "choices": choices, "aliases": aliases, "positional": positional}
    return field(default=default, metadata=said)


def as_in(settings: type, name: str, otherwise: str, help: str | None = None) -> Any:
    """The knob `name` of another group, unset unless it is given: then what `otherwise` names holds."""
    said = next(f.metadata for f in dataclasses.fields(settings) if f.name == name)
    meaning = help or said["help"].split("; unset")[0]
    return field(default=None, metadata={**said, "help": f"{meaning}; unset: {otherwise}"})


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
    positional: bool

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


# --- text to value, and back -----------------------------------------------------------------------------------------


def is_unset(value: Any) -> bool:
    """Whether a value, as it was written, says that there is none."""
    alone = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    return alone is None or str(alone).lower() in UNSET_WORDS


def convert(knob: Knob, value: Any, where: str) -> Any:
    """`value` (text from a flag, or what YAML made of it) as the knob's type; a UserError names `where`."""
    if knob.optional and is_unset(value):
        return None
    if knob.is_list:
        parts = value if isinstance(value, (list, tuple)) else [value]
        words = [w for p in parts for w in ([s.strip() for s in p.split(",")] if isinstance(p, str) else [p])]
        return tuple(_convert_one(knob, w, typing.get_args(knob.base_type)[0], where) for w in words)
    return _convert_one(knob, value, knob.base_type, where)


def _convert_one(knob: Knob, value: Any, kind: type, where: str) -> Any:
    expects = getattr(kind, "expects", {bool: "true or false", int: "a whole number", float: "a number"}.get(kind))
    try:
        result = value if isinstance(value, kind) and not isinstance(value, bool) else _parse(kind, value)
    except (ValueError, TypeError, ArithmeticError):
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
        number = Decimal(str(value))  # 1e4 is a whole number too; exact, also beyond a float's 53 bits
        small = number.is_finite() and number.adjusted() <= MOST_DIGITS
        if isinstance(value, bool) or not small or number != number.to_integral_value():
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
    if isinstance(value, int) and b["high"] is None and value > MOST:
        return f"It must be at most {MOST:,}"
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
    bounds = {k: knob.bounds[k] for k in words if knob.bounds[k] is not None}
    parts = [f"{words[k]} {n:,}" if isinstance(n, int) else f"{words[k]} {n:g}" for k, n in bounds.items()]
    return " and ".join(parts) or "a finite number"


def as_text(value: Any, between: str = ",", empty: str = "unset") -> str:
    """A setting's value as text; a list's entries with `between` them, or `empty`."""
    if isinstance(value, (tuple, list)):
        return between.join(map(str, value)) or empty
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_plain(config: Any) -> dict[str, Any]:
    """A configuration as JSON-ready data, group by group."""

    def plain(value: Any) -> Any:
        if isinstance(value, (KLTarget, Split)):
            return str(value)
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return [plain(v) for v in value] if isinstance(value, tuple) else value

    return plain(config)


def way_out(name: str, known: Iterable[str]) -> str:
    """For a name that is not known: the nearest one; for float16, which other trainers have, what there is."""
    words = {word.lstrip("-") for word in known}
    if name.replace("-", "_").strip("_").removeprefix("no_") == "fp16" and "bf16" in words:
        return "Precision is bfloat16 (--bf16) or float32 (--no-bf16); float16 is not offered, its gradients underflow"
    meant = ELSEWHERE.get(name.replace("-", "_").strip("_"))
    if meant in words | {word.replace("-", "_") for word in words}:
        return f"Did you mean {'--' + meant.replace('_', '-') if name.startswith('--') else meant}?"
    return did_you_mean(name, known)

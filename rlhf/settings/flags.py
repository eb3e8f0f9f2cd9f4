"""Flags: the argument parser of a command, its `--help`, and what was given on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Collection, Iterable
from typing import Any

from rlhf.settings.fields import Knob, as_text, knobs_of, range_text, way_out
from rlhf.utils.errors import UserError, raise_if


class _Help(argparse.HelpFormatter):
    """A flag once, its value once, then its other names; every dash may be an underscore."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        dashed = [name for name in action.option_strings if "_" not in name]
        if action.nargs == 0 or not dashed:
            return super()._format_action_invocation(action)
        also = f" (or {', '.join(dashed[1:])})" if len(dashed) > 1 else ""
        return f"{dashed[0]} {self._format_args(action, action.dest.upper())}{also}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message}: command line. --help shows how each flag is written")


def make_parser(
    config_class: type, prog: str, description: str, recipes: dict | None, defaults: dict | None = None, hidden=()
) -> argparse.ArgumentParser:
    """A flat flag for every knob (dashes or underscores, and its aliases); booleans have --x and --no-x.

    `defaults` replace fields' own in what --help says; groups named in `hidden` have no flags here. A command without
    `recipes` has no settings file either.
    """
    knobs = knobs_of(config_class)
    words = "".join(f"[{k.name.upper()} ...] " for k in knobs.values() if k.positional)
    files = "[--recipe NAME] [--config FILE.yaml] " if recipes is not None else ""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {words}{files}[--FLAG VALUE ...]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_Help,
    )
    if recipes is not None:
        parser.add_argument("--recipe", metavar="NAME", help=f"settings to start from: {', '.join(recipes)}")
        parser.add_argument("--config", metavar="FILE.yaml", help="settings from a YAML file, over the recipe's")
    groups: dict[str, Any] = {}
    for k in knobs.values():
        if k.group in hidden:
            continue
        k = dataclasses.replace(k, default=(defaults or {}).get(k.name, k.default))
        if k.group not in groups:
            title = typing.get_type_hints(config_class)[k.group].__doc__.strip().rstrip(".")
            groups[k.group] = parser.add_argument_group(title)
        _add_flag(groups[k.group], k, special_names(config_class))
    return parser


def special_names(config_class: type) -> set[str]:
    """The references' names that say something else than the knobs' own."""
    return config_class.read_as.keys() | config_class.implied.keys()


def _add_flag(group, k: Knob, special: Collection[str]) -> None:
    """`special` names have flags of their own: they keep their names until layers are merged."""
    names = (k.name, *(alias for alias in k.aliases if alias not in special))
    for alias in (alias for alias in k.aliases if alias in special):
        meant = f"as {k.flag}, said as another trainer says it: see Settings in README.md"
        nargs = "+" if k.is_list else None
        group.add_argument(*spellings([alias]), dest=alias, metavar=alias.upper(), help=meant, nargs=nargs)
    flags = spellings(names)
    bounds = f", {range_text(k)}" if any(v is not None for v in k.bounds.values()) else ""
    help = f"{k.help} (default: {as_text(k.default)}{bounds})".replace("%", "%%")
    if k.positional:
        group.add_argument(k.name, metavar=k.name.upper(), help=help, nargs="*")
    elif k.is_bool:
        group.add_argument(*flags, dest=k.name, nargs="?", const="true", metavar="true|false", help=help)
        negative = spellings([f"no_{name}" for name in names])
        group.add_argument(*negative, dest=k.name, action="store_const", const="false", help=argparse.SUPPRESS)
    else:
        shape = "|".join(k.choices) if k.choices else k.name.upper()
        group.add_argument(*flags, dest=k.name, metavar=shape, help=help, nargs="+" if k.is_list else None)


def spellings(names: Iterable[str]) -> list[str]:
    """Each name as a flag with dashes and, where that differs, with underscores."""
    return list(dict.fromkeys("--" + spelt for name in names for spelt in (name.replace("_", "-"), name)))


def read_flags(
    parser: argparse.ArgumentParser, argv: list[str], elsewhere: dict[str, str] | None = None
) -> dict[str, tuple[Any, str]]:
    """name -> (text, flag) for every flag that was given. Unknown ones are reported together, with the nearest.

    `elsewhere`: flags of other commands -> the command that reads them.
    """
    namespace, unknown = parser.parse_known_args(argv)
    known = [s for action in parser._actions for s in action.option_strings]
    strange = [u.split("=")[0] for u in unknown if u.startswith("--")]
    theirs = elsewhere or {}
    raise_if(
        [
            f"{flag} belongs to {theirs[flag]}: command line. Leave it out here (a shared --config file may set it)"
            if flag in theirs
            else f"unknown flag {flag}: command line. {way_out(flag, known)}"
            for flag in strange
        ]
    )
    raise_if([f"unexpected word {u!r}: command line. Every setting is a flag; --help lists them" for u in unknown])
    words = {action.dest for action in parser._actions if not action.option_strings}
    where = {name: "command line" if name in words else "--" + name.replace("_", "-") for name in vars(namespace)}
    return {name: (value, where[name]) for name, value in vars(namespace).items()}

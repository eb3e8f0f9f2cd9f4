"""Command lines: reads the flags of a command, and prints its help."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import textwrap
import typing
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from rlhf.settings.fields import (
    Layer,
    Setting,
    as_text,
    dependence,
    range_text,
    settings_of,
)
from rlhf.settings.translate import hint
from rlhf.settings.types import MemorySize
from rlhf.utils.command_lines import script_words
from rlhf.utils.errors import Problem, UserError

HELP = ("-h", "--help")
HELP_ALL = ("--help-all", "--help_all")
NEGATIVE = "no_"  # prefix of a boolean flag that sets false


@dataclass(frozen=True)
class CommandLine:
    """The flags of a command: one for each setting of its configuration class, under all names of the setting, with
    dashes or underscores. Booleans accept --x and --no-x, and --x false if the command has no words without a flag."""

    config_class: type
    name: str  # after `rlhf`; the name of the script is in rlhf.utils.command_lines
    description: str
    examples: tuple[tuple[str, str], ...] = ()  # (arguments, their effect), for --help
    # group of settings that the command does not use -> commands that use it
    foreign: dict[str, str] = field(default_factory=dict)
    recipes: tuple[str, ...] = ()  # values of --recipe; empty: the command has neither --recipe nor --config

    @property
    def settings(self) -> dict[str, Setting]:
        return {name: s for name, s in settings_of(self.config_class).items() if s.group not in self.foreign}

    def read(self, argv: list[str]) -> tuple[Layer, list[Problem]]:
        """Return the given flags as a layer, typed name -> (text, flag), and a list of errors: unknown flags, flags of
        other commands, words without a flag."""
        parser = self._parser({})
        try:
            " ".join(argv).encode()
            given, unknown = parser.parse_known_args(argv)
        except UnicodeEncodeError as error:
            wrong = error.object[error.start]
            return {}, [
                Problem("not valid text", f"command line, {wrong!a}", "Use only characters of this system's encoding")
            ]
        except UserError as error:
            return {}, list(error.problems)
        layer = given.layer if "layer" in given else {}
        words = [word for word in unknown if not word.startswith("--")]
        for s in self.settings.values():
            if s.positional and words:  # words after a flag
                layer[s.name], words = ([*layer.get(s.name, ([],))[0], *words], "command line"), []
        flags = [word.split("=")[0] for word in unknown if word.startswith("--")]
        return layer, self._wrong_flags(flags, parser) or self._wrong_words(words, parser)

    def _wrong_flags(self, flags: list[str], parser: argparse.ArgumentParser) -> list[Problem]:
        """Return one error line for each flag that the command does not have."""
        known = _flags_of(parser)
        foreign = self._foreign_flags()

        def problem(flag: str) -> Problem:
            if flag in foreign:
                fix = "Remove it here (a shared --config file may set it)"
                return Problem(f"{flag} belongs to {foreign[flag]}", "command line", fix)
            return Problem(f"unknown flag {flag}", "command line", hint(flag, known))

        return [problem(flag) for flag in flags]

    def _wrong_words(self, words: list[str], parser: argparse.ArgumentParser) -> list[Problem]:
        """Return one error line for each word that is neither a flag nor a value. For `NAME=VALUE`, as in verl, it
        contains the flag."""
        problems = []
        for word in words:
            name, equals, _ = word.partition("=")
            fix = hint(f"--{name.lstrip('+')}", _flags_of(parser)) if equals else ""
            fix = f"Settings are given as flags. {fix or '--help-all prints them'}"
            problems.append(Problem(f"unexpected word {word!r}", "command line", fix))
        return problems

    def _foreign_flags(self) -> dict[str, str]:
        """Return the flags of the settings that only other commands use -> these commands."""
        every = [s for s in settings_of(self.config_class).values() if s.group in self.foreign]
        return {
            flag: self.foreign[s.group]
            for s in every
            for flag in spellings([*s.names, *(NEGATIVE + name for name in s.names)])
        }

    def _parser(self, values: dict[str, Any]) -> argparse.ArgumentParser:
        """Return the parser. Its help shows `values` instead of the declared defaults."""
        parser = _Parser(
            prog=self.command,
            usage=self._usage(),
            description=self.description,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_Help,
        )
        for flag, metavar, text in self._files():
            parser.add_argument(flag, metavar=metavar, action=_Given, help=text)
        parser.add_argument(*HELP, action="store_true", help="print the most important settings")
        parser.add_argument(*HELP_ALL, action="store_true", help="print all settings")
        groups: dict[str, Any] = {}
        hints = typing.get_type_hints(self.config_class)
        settings = self.settings
        has_words = any(s.positional for s in settings.values())
        for s in settings.values():
            if s.group not in groups:
                groups[s.group] = parser.add_argument_group(hints[s.group].__doc__.strip().rstrip("."))
            text = s.help + dependence(s, settings)
            shown = dataclasses.replace(s, help=text, default=values.get(s.name, s.default))
            _add_flag(groups[s.group], shown, 0 if has_words else "?")
        return parser

    @property
    def command(self) -> str:
        """How the command is called in a shell."""
        return " ".join(script_words(self.name))

    def _usage(self) -> str:
        words = "".join(f"[{s.name.upper()} ...] " for s in self.settings.values() if s.positional)
        files = "".join(f"[{flag} {metavar}] " for flag, metavar, _ in self._files())
        return f"{self.command} {words}{files}[--FLAG VALUE ...]"

    def _files(self) -> list[tuple[str, str, str]]:
        """Return the flags that take a file of settings: (flag, metavar, help)."""
        if not self.recipes:
            return []
        return [
            ("--recipe", "NAME", f"recipe to start from: {', '.join(self.recipes)}, or a recipe file"),
            ("--config", "FILE.yaml", "YAML file of settings, which replace those of the recipe"),
        ]

    def help_all(self, values: dict[str, Any], source: str) -> str:
        """Return the text of --help-all, with the `values` that the command would use and their `source`."""
        return self._parser(values).format_help() + (f"\ndefaults are from {source}\n" if source else "")

    def help(self, values: dict[str, Any], source: str) -> str:
        """Return the text of --help: the settings that have a `brief` text, on one screen."""
        rows = [(f"{flag} {metavar}", text) for flag, metavar, text in self._files()]
        rows += [_brief_row(s, values.get(s.name, s.default)) for s in self.settings.values() if s.brief]
        rows.append(("--help-all", "print all settings, with their ranges and other names"))
        examples = [(f"{self.command} {words}".rstrip(), text) for words, text in self.examples]
        usage = textwrap.fill(
            f"usage: {self._usage()}",
            _width(),
            subsequent_indent=" " * 7,
            break_on_hyphens=False,
            break_long_words=False,
        )
        head = [usage, "", *textwrap.wrap(self.description, _width()), "", *_columns(rows)]
        head += ["", f"values in [] are from {source}"] if source else []
        return "\n".join([*head, "", "examples:", *_columns(examples)]) + "\n"


class _Help(argparse.HelpFormatter):
    """Prints each flag and its value once, followed by its other names. Spellings with underscores are not printed."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        dashed = [name for name in action.option_strings if "_" not in name]
        if action.nargs == 0 or not dashed:
            return ", ".join(dashed) or super()._format_action_invocation(action)
        also = f" (or {', '.join(dashed[1:])})" if len(dashed) > 1 else ""
        return f"{dashed[0]} {self._format_args(action, action.dest.upper())}{also}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message, "command line", "--help-all prints all flags")


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


class _Given(argparse.Action):
    """Store a value under the typed name: names of other trainers can have a different meaning."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        layer = namespace.layer if "layer" in namespace else {}
        name = self.dest if option_string is None else option_string.lstrip("-").replace("-", "_")
        if self.nargs == 0:
            name = name.removeprefix(NEGATIVE)
            values = self.const
        if values == [] and self.const is not None:  # a list whose flag may stand alone
            values = self.const
        if values != []:  # a positional setting without words
            layer[name] = (values, option_string or "command line")
        namespace.layer = layer


def _add_flag(group, s: Setting, values_of_bool: int | str) -> None:
    """Add the flag of a setting. `values_of_bool`: argparse's nargs of a boolean; 0 if the command has words without a
    flag, which would be taken for its value."""
    bounds = f", {range_text(s)}" if any(v is not None for v in s.bounds.values()) else ""
    text = f"{s.help} (default: {as_text(s.default)}{bounds})".replace("%", "%%")
    if s.positional:
        group.add_argument(s.name, metavar=s.name.upper(), help=text, nargs="*", action=_Given)
    elif s.is_bool or s.alone:
        metavar = "|".join(s.alone) or "true|false"
        many = "*" if s.alone else values_of_bool
        group.add_argument(*spellings(s.names), dest=s.name, nargs=many, const="true", metavar=metavar,
                           help=text, action=_Given)  # fmt: skip
        negative = spellings(NEGATIVE + name for name in s.names)
        group.add_argument(*negative, dest=s.name, nargs=0, const="false", help=argparse.SUPPRESS, action=_Given)
    else:
        many = "+" if s.is_list else None
        metavar = "|".join(s.choices) if s.choices else s.name.upper()
        group.add_argument(*spellings(s.names), dest=s.name, metavar=metavar, help=text, nargs=many, action=_Given)


def _brief_row(s: Setting, value: Any) -> tuple[str, str]:
    """Return a row of `--help`: the flag with the type of its value, and its meaning with the current value."""
    text = s.help.split("; ")[0] if s.brief is True else s.brief
    if s.positional:
        return f"{s.name.upper()} ...", text
    kind = {int: "N", float: "X", bool: "", MemorySize: "SIZE"}.get(s.base_type, "NAME")
    metavar = "LIST" if s.is_list else "|".join(s.choices) if s.choices else kind
    shown = "" if value in (None, (), False) else f" [{as_text(value, ' ')}]"
    return f"{s.flag} {metavar}".rstrip(), text + shown


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    """Return the lines of a table of two columns, wrapped to the width of the terminal."""
    left = max(len(name) for name, _ in rows) + 2
    if left + 30 > _width():  # too narrow for two columns
        return [line for name, text in rows for line in (f"  {name}", f"      {text}")]
    return [
        textwrap.fill(text, _width(), initial_indent=f"  {name:<{left}}", subsequent_indent=" " * (left + 2))
        for name, text in rows
    ]


def _width() -> int:
    """Characters per line of help."""
    return min(shutil.get_terminal_size().columns, 119)


def spellings(names: Iterable[str]) -> list[str]:
    """Return each name as a flag with dashes and, if it differs, with underscores."""
    return list(dict.fromkeys("--" + spelt for name in names for spelt in (name.replace("_", "-"), name)))


def wants_help(argv: Collection[str]) -> str | None:
    """Return "help" or "help_all" if the command line requests one of them, otherwise None."""
    return "help_all" if set(argv) & set(HELP_ALL) else "help" if set(argv) & set(HELP) else None

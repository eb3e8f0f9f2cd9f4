"""Command lines: reads the flags of a command, and prints its help."""

from __future__ import annotations

import re
import shutil
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.settings.fields import Layer, Setting, as_text, flag_of, settings_of
from rlhf.settings.translate import hint
from rlhf.settings.types import MemorySize
from rlhf.utils.command_lines import script_words
from rlhf.utils.errors import Problem

HELP = ("-h", "--help")
HELP_ALL = ("--help-all", "--help_all")
NEGATIVE = "no_"  # prefix of a boolean flag that sets false
PLACE = "command line"
NARROW = 30  # characters: a column of texts is at least as wide
HELP_ALL_LEFT = 22  # width of the column of flags in --help-all


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

    @property
    def positional(self) -> Setting | None:
        """The setting whose value is given without a flag."""
        return next((s for s in self.settings.values() if s.positional), None)

    @property
    def files(self) -> list[tuple[str, str, str]]:
        """The flags that take a file of settings: (flag, metavar, help)."""
        if not self.recipes:
            return []
        return [
            ("--recipe", "NAME", f"recipe to start from: {', '.join(self.recipes)}, or a recipe file"),
            ("--config", "FILE.yaml", "YAML file of settings, which replace those of the recipe"),
        ]

    # --- flags to values ---------------------------------------------------------------------------------------------

    def read(self, argv: Sequence[str]) -> tuple[Layer, list[Problem]]:
        """Return the given flags as a layer, typed name -> (text, flag), and a list of errors: unknown flags, flags of
        other commands, words without a flag. The typed name is kept, because names of other trainers can have a
        different meaning."""
        try:
            " ".join(argv).encode()
        except UnicodeEncodeError as error:
            place = f"{PLACE}, {error.object[error.start]!a}"
            return {}, [Problem("not valid text", place, "Use only characters of this system's encoding")]
        flags = self.flags
        given: Layer = {}
        problems = []
        unknown = []
        words = []
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            if word == "--":  # only words without a flag follow
                words += rest
                break
            spelt, equals, text = word.partition("=")
            flag = flags.get(spelt)
            if flag is None:
                (unknown if word.startswith("--") else words).append(word)
                continue
            values = [text] if equals else []
            while rest and not equals and len(values) < flag.most and not is_flag(rest[0]):
                values.append(rest.pop(0))
            if flag.least <= len(values) <= flag.most:
                values = values or [flag.alone]
                given[flag.name] = (values if flag.most > 1 else values[0], spelt)
            else:
                what = "needs a value" if flag.least else "takes no value"
                problems.append(Problem(f"{spelt} {what}", PLACE, "--help-all prints all flags"))
        if self.positional is not None and words:
            given[self.positional.name] = (words, PLACE)
            words = []
        problems += [self._unknown(word.partition("=")[0]) for word in unknown]
        return given, problems if unknown else [*problems, *map(self._stray, words)]

    @property
    def flags(self) -> dict[str, Flag]:
        """All flags of the command in all spellings, in the order of --help-all."""
        found = {flag: Flag(flag.removeprefix("--"), 1, 1) for flag, _, _ in self.files}
        found |= {flag: Flag("", 0, 0) for flag in (*HELP, *HELP_ALL)}
        for s in self.settings.values():
            least = 0 if s.is_bool or s.alone else 1
            most = MANY if s.is_list else 0 if s.is_bool and self.positional else 1
            for name in () if s.positional else s.names:
                found |= dict.fromkeys(spellings([name]), Flag(name, least, most, "true"))
            for name in s.names if s.is_bool or s.alone else ():
                found |= dict.fromkeys(spellings([NEGATIVE + name]), Flag(name, 0, 0, "false"))
        return found

    def _unknown(self, flag: str) -> Problem:
        """Return the error for a flag that the command does not have."""
        for s in settings_of(self.config_class).values():
            if s.group in self.foreign and flag in spellings([*s.names, *(NEGATIVE + name for name in s.names)]):
                fix = "Remove it here (a shared --config file may set it)"
                return Problem(f"{flag} belongs to {self.foreign[s.group]}", PLACE, fix)
        return Problem(f"unknown flag {flag}", PLACE, hint(flag, self.flags))

    def _stray(self, word: str) -> Problem:
        """Return the error for a word that is neither a flag nor a value. For `NAME=VALUE`, as in verl, it contains
        the flag."""
        name, equals, _ = word.partition("=")
        fix = hint(f"--{name.lstrip('+')}", self.flags) if equals else ""
        fix = f"Settings are given as flags. {fix or '--help-all prints them'}"
        return Problem(f"unexpected word {word!r}", PLACE, fix)

    # --- help --------------------------------------------------------------------------------------------------------

    @property
    def command(self) -> str:
        """How the command is called in a shell."""
        return " ".join(script_words(self.name))

    def help(self, values: Mapping[str, Any], source: str) -> str:
        """Return the text of --help: the settings that have a `brief` text, on one screen, with the `values` that the
        command would use and their `source`."""
        rows = [(f"{flag} {metavar}", text) for flag, metavar, text in self.files]
        rows += [_brief_row(s, values[s.name]) for s in self.settings.values() if s.brief]
        rows.append(("--help-all", "print all settings, with their ranges and other names"))
        left = max(len(name) for name, _ in rows)
        examples = [(f"{self.command} {words}".rstrip(), text) for words, text in self.examples]
        wide = max(len(words) for words, _ in examples)
        lines = [*self._head(), *_columns(rows, left)]
        lines += ["", f"values in [] are from {source}"] if source else []
        return "\n".join([*lines, "", "examples:", *_columns(examples, wide)])

    def help_all(self, values: Mapping[str, Any], source: str) -> str:
        """Return the text of --help-all: all settings in their groups."""
        rows = [(f"{flag} {metavar}", text) for flag, metavar, text in self.files]
        rows += [(", ".join(HELP), "print the most important settings"), (HELP_ALL[0], "print all settings")]
        lines = [*self._head(), *_columns(rows, HELP_ALL_LEFT)]
        groups = typing.get_type_hints(self.config_class)
        for group in dict.fromkeys(s.group for s in self.settings.values()):
            rows = [self._row(s, values[s.name]) for s in self.settings.values() if s.group == group]
            lines += ["", f"{groups[group].__doc__.strip().rstrip('.')}:", *_columns(rows, HELP_ALL_LEFT)]
        return "\n".join([*lines, *(["", f"defaults are from {source}"] if source else [])])

    def _head(self) -> list[str]:
        words = "" if self.positional is None else f"[{self.positional.name.upper()} ...] "
        files = "".join(f"[{flag} {metavar}] " for flag, metavar, _ in self.files)
        usage = f"usage: {self.command} {words}{files}[--FLAG VALUE ...]"
        lines = textwrap.wrap(
            usage, _width(), subsequent_indent=" " * 7, break_on_hyphens=False, break_long_words=False
        )
        return [*lines, "", *textwrap.wrap(self.description, _width()), ""]

    def _row(self, s: Setting, value: Any) -> tuple[str, str]:
        """Return a row of `--help-all`: the flag with its other names; its meaning, default and range."""
        conditions = [one.text() for one in s.conditions if all(name in self.settings for name, _ in one.others)]
        notes = [s.help, *([f"unset: {s.unset}"] if s.unset else [])]
        notes += [f"no effect {' or '.join(conditions)}"] if conditions else []
        default = f"default: {as_text(value)}" + (f", {s.range}" if s.range else "")
        text = f"{'; '.join(notes)} ({default})"
        if s.positional:
            return f"{s.name.upper()} ...", text
        metavar = "|".join(s.choices) or ("[true|false]" if s.is_bool else s.name.upper())
        metavar = "" if s.is_bool and self.positional else metavar + (" ..." if s.is_list else "")
        also = f" (or {', '.join(map(flag_of, s.aliases))})" if s.aliases else ""
        return f"{s.flag} {metavar}{also}".rstrip(), text


@dataclass(frozen=True)
class Flag:
    """One spelling of a flag."""

    name: str  # of the setting, as typed
    least: int  # number of values
    most: int
    alone: str = ""  # the value of a flag without one


MANY = 10**9


def is_flag(word: str) -> bool:
    """True if a word of a command line is a flag, and not a value such as -1, - or "- a b"."""
    return word.startswith("-") and re.fullmatch(r"-|-\d*\.?\d+|(?!--)-.* .*", word, re.DOTALL) is None


def _brief_row(s: Setting, value: Any) -> tuple[str, str]:
    """Return a row of `--help`: the flag with the type of its value, and its meaning with the current value."""
    text = s.help if s.brief is True else str(s.brief)
    if s.positional:
        return f"{s.name.upper()} ...", text
    kind = {int: "N", float: "X", bool: "", MemorySize: "SIZE"}.get(s.base_type, "NAME")
    metavar = "LIST" if s.is_list else "|".join(s.choices) or kind
    shown = "" if value in (None, (), False) else f" [{as_text(value, ' ')}]"
    return f"{s.flag} {metavar}".rstrip(), text + shown


def _columns(rows: Sequence[tuple[str, str]], left: int) -> list[str]:
    """Return the lines of a table of two columns, wrapped to the width of the terminal. A name that is longer than
    `left`, and each name if the terminal is too narrow, has a line of its own."""
    left = left if left + 4 + NARROW <= _width() else 2
    lines = []
    for name, text in rows:
        first = f"  {name:<{left}}  "
        if len(name) > left:
            lines.append(f"  {name}")
            first = " " * (left + 4)
        lines += textwrap.wrap(text, _width(), initial_indent=first, subsequent_indent=" " * (left + 4))
    return lines


def _width() -> int:
    """Characters per line of help."""
    return min(shutil.get_terminal_size().columns, 119)


def spellings(names: Iterable[str]) -> list[str]:
    """Return each name as a flag with dashes and, if it differs, with underscores."""
    return list(dict.fromkeys(spelt for name in names for spelt in (flag_of(name), "--" + name)))


def wants_help(argv: Sequence[str]) -> str | None:
    """Return "help" or "help_all" if the command line requests one of them, otherwise None."""
    return "help_all" if set(argv) & set(HELP_ALL) else "help" if set(argv) & set(HELP) else None

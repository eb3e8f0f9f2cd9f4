"""Command lines: reads the flags of a command, and prints its help."""

from __future__ import annotations

import re
import shutil
import textwrap
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlhf.settings.fields import Layer, Setting, alternatives, as_text, flag_of, in_words, settings_of
from rlhf.settings.translate import hint
from rlhf.settings.types import MemorySize
from rlhf.utils.command_lines import script_words
from rlhf.utils.errors import Problem
from rlhf.utils.results import FLAG as JSON

HELP = "help"
HELP_ALL = "help_all"
PLACE = "command line"
MANY = 10**9
LEFT = 22  # width of the column of flags in the help
METAVARS = {int: "N", float: "X", bool: "", MemorySize: "SIZE"}


class Flag(NamedTuple):
    """What a flag sets."""

    name: str  # of the setting, as typed: names of other trainers can have another meaning
    least: int = 0  # number of values
    most: int = 0
    alone: str = "true"  # the value of a flag without one
    owner: str = ""  # the commands that have the flag; empty: this one


UNKNOWN = Flag("", most=MANY)  # it takes all words that follow


@dataclass(frozen=True)
class CommandLine:
    """The flags of a command: one for each setting of its configuration class, under all names of the setting, with
    dashes or underscores. Booleans accept --x and --no-x, and --x false if the command has no words without a flag."""

    config_class: type
    name: str  # after `rlhf`; the name of the script is in rlhf.utils.command_lines
    description: str
    examples: tuple[tuple[str, str], ...] = ()  # (arguments, their effect), for --help
    # setting that the command does not use -> commands that use it
    foreign: dict[str, str] = field(default_factory=dict)
    recipes: tuple[str, ...] = ()  # values of --recipe; empty: the command has neither --recipe nor --config
    algorithms: tuple[str, ...] = ()  # values of --algorithm; empty: the command does not have it

    @property
    def settings(self) -> dict[str, Setting]:
        return {name: s for name, s in settings_of(self.config_class).items() if name not in self.foreign}

    @property
    def positional(self) -> Setting | None:
        """The setting whose value is given without a flag."""
        return next((s for s in self.settings.values() if s.positional), None)

    # --- flags to values ---------------------------------------------------------------------------------------------

    def read(self, argv: Sequence[str]) -> tuple[Layer, list[Problem]]:
        """Return the given flags as a layer, typed name -> (text, flag), and a list of errors: unknown flags, flags of
        other commands, words without a flag."""
        try:
            " ".join(argv).encode()
        except UnicodeEncodeError as error:
            place = f"{PLACE}, {error.object[error.start]!a}"
            return {}, [Problem("not valid text", place, "Use only characters of this system's encoding")]
        flags = self.flags
        own = [spelt for spelt, flag in flags.items() if not flag.owner]
        given: Layer = {}
        problems = []
        words = []
        rest = [word for word in argv if word != JSON]  # rlhf.utils.results reads it
        while rest:
            word = rest.pop(0)
            if word == "--":  # only words without a flag follow
                words += rest
                break
            spelt, equals, text = word.partition("=")
            if not word.startswith("--") and word != "-h":
                words.append(word)
                continue
            flag = flags.get(spelt.replace("_", "-"), UNKNOWN)
            values = [text] if equals else []
            while rest and not equals and len(values) < flag.most and not is_flag(rest[0]):
                values.append(rest.pop(0))
            if flag is UNKNOWN:
                problems.append(Problem(f"unknown flag {spelt}", PLACE, hint(spelt, own)))
            elif flag.owner:
                fix = "Remove it here (a shared --config file may set it)"
                problems.append(Problem(f"{spelt} belongs to {flag.owner}", PLACE, fix))
            elif flag.least <= len(values) <= flag.most:
                values = values or [flag.alone]
                given[flag.name] = (values if flag.most > 1 else values[0], spelt)
            else:
                what = "needs a value" if flag.least else "takes no value"
                problems.append(Problem(f"{spelt} {what}", PLACE, "--help-all prints all flags"))
        if self.positional is None:
            problems += [_stray(word, own) for word in words]
        elif words:
            given[self.positional.name] = (words, PLACE)
        return given, problems

    @property
    def flags(self) -> dict[str, Flag]:
        """All flags with dashes, also those that only other commands have."""
        found = {"-h": Flag(HELP), "--help": Flag(HELP), "--help-all": Flag(HELP_ALL), JSON: Flag(JSON)}
        found |= {"--recipe": Flag("recipe", 1, 1), "--config": Flag("config", 1, 1)} if self.recipes else {}
        found |= {"--algorithm": Flag("algorithm", 1, 1)} if self.algorithms else {}
        has_words = self.positional is not None
        for s in settings_of(self.config_class).values():
            owner = self.foreign.get(s.name, "")
            is_switch = s.kind is bool or bool(s.alone)
            most = MANY if s.is_list else 0 if s.kind is bool and has_words else 1
            for name in () if s.positional else s.names:
                found[flag_of(name)] = Flag(name, 0 if is_switch else 1, most, owner=owner)
                if is_switch:
                    found[flag_of(f"no_{name}")] = Flag(name, alone="false", owner=owner)
        return found

    # --- help --------------------------------------------------------------------------------------------------------

    def help(self, values: Layer, source: str, every: bool) -> str:
        """Return the text of --help, one screen with the settings that have a `brief` text, or of --help-all: `every`
        setting in its group. Both show the `values` that the command would use, and their `source`."""
        command = " ".join(script_words(self.name))
        words = "" if self.positional is None else f" [{self.positional.name.upper()} ...]"
        recipes = f"recipe: {', '.join(self.recipes)}, or a file"
        config = "YAML file of settings, which replace those of the recipe"
        files = {"--recipe NAME": recipes, "--config FILE.yaml": config} if self.recipes else {}
        algorithms = f"{', '.join(self.algorithms)}, or FILE.py:CLASS, a class in your file"
        files |= {"--algorithm NAME": algorithms} if self.algorithms else {}
        all_settings = "print all settings, with ranges and other names; --no-FLAG turns one off"
        sections = {"": {**files, "-h, --help": "print the most important settings", "--help-all": all_settings}}
        if every:
            sections[""][JSON] = "print the results, or the errors, as one JSON object, and all else on standard error"
        groups = typing.get_type_hints(self.config_class)
        for s in self.settings.values():
            if every or s.brief:
                name, text = self._row(s, values[s.name][0], every)
                sections.setdefault(groups[s.group].__doc__ if every else "", {})[name] = text
        if not every:
            sections["examples"] = {f"{command} {flags}".rstrip(): text for flags, text in self.examples}
        lines = [f"usage: {command}{words} [--FLAG VALUE ...]", "", *textwrap.wrap(self.description, _width())]
        for title, rows in sections.items():
            lines += ["", *([f"{title}:"] if title else []), *_columns(rows)]
        return "\n".join([*lines, *(["", f"values in [] are from {source}"] if source else [])])

    def _row(self, s: Setting, value: Any, every: bool) -> tuple[str, str]:
        """Return a row of the help: the flag with its value, and its meaning with the current value."""
        metavar = "LIST" if s.is_list else "|".join(s.choices) or METAVARS.get(s.kind, "NAME")
        name = f"{s.name.upper()} ..." if s.positional else f"{s.flag} {metavar}".rstrip()
        notes = [s.help if every or s.brief is True else str(s.brief)]
        is_set = value is not False and value not in (None, ())
        shown = [as_text(value, " ")] if every or is_set else []
        if every:
            name += f" (or {', '.join(map(flag_of, s.aliases))})" if s.aliases else ""
            conditions = [
                in_words(one) for one in s.conditions if dict(alternatives(one)).keys() <= self.settings.keys()
            ]
            notes += [f"unset: {s.unset}"] if s.unset else []
            notes += [f"no effect {' or '.join(conditions)}"] if conditions else []
            shown += [s.range] if s.range else []
        return name, "; ".join(notes) + (f" [{', '.join(shown)}]" if shown else "")


def _stray(word: str, known: Collection[str]) -> Problem:
    """Return the error for a word that is neither a flag nor a value. For `NAME=VALUE`, as in verl, it contains the
    flag."""
    name, equals, _ = word.partition("=")
    fix = hint(f"--{name.lstrip('+')}", known) if equals else "--help-all prints them"
    return Problem(f"unexpected word {word!r}", PLACE, f"Settings are given as flags. {fix}")


def is_flag(word: str) -> bool:
    """True if a word of a command line is a flag, and not a value such as -1, - or "- a b"."""
    return word.startswith("-") and re.fullmatch(r"-|-\d*\.?\d+|(?!--)-.* .*", word, re.DOTALL) is None


def _columns(rows: dict[str, str]) -> list[str]:
    """Return the lines of a table of two columns, wrapped to the width of the terminal. A long name has a line of its
    own."""
    lines = []
    for name, text in rows.items():
        lines += [f"  {name}"] if len(name) > LEFT else []
        first = f"  {'' if len(name) > LEFT else name:<{LEFT}}  "
        lines += textwrap.wrap(text, _width(), initial_indent=first, subsequent_indent=" " * len(first))
    return lines


def _width() -> int:
    """Characters per line of help."""
    return min(shutil.get_terminal_size().columns, 119)

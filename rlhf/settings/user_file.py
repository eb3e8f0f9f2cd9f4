"""Reads the user's `config.py`: assignments of settings, such as `learning_rate = 1e-5`. Imports no torch."""

from __future__ import annotations

import os
import symtable
import sys
import traceback
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rlhf.settings.fields import UNREADABLE, Layer, as_text, in_words, settings_of, unmet
from rlhf.settings.merge import merged
from rlhf.settings.yaml_file import settings_text
from rlhf.utils.errors import Problem, UserError


class _Names(dict[str, Any]):
    """The names of a module while it runs, with the line that set each of them last."""

    def __init__(self, **names: Any):
        super().__init__(names)
        self.lines: dict[str, int] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.lines[name] = sys._getframe(1).f_lineno
        super().__setitem__(name, value)


def read_user_file(path: Path | None, settings: Collection[str]) -> Layer:
    """Run the file and return its settings: name -> (value, "file:line"). Returns an empty layer if it does not exist.

    All public names that the file assigns must be settings. Imported names and names of functions or classes are used
    only if they are in `settings`. If the file fails, the layer contains the error, because the error matters only if
    the file is used.
    """
    if path is None or not path.is_file():
        return {}
    shown = path.name if os.path.realpath(path.parent) == os.path.realpath(".") else str(path)
    names = _Names(__name__="config", __file__=str(path))
    try:
        text = settings_text(path, shown, "Correct its permissions")
        table = symtable.symtable(text, str(path), "exec")
        exec(compile(text, str(path), "exec"), names)
    except UserError as error:
        (problem,) = error.problems
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None) or 1
        kind = "not Python" if isinstance(error, SyntaxError) else type(error).__name__
        problem = Problem(f"{kind} ({getattr(error, 'msg', error)})", f"{shown}:{line}", "Correct that line")
    else:
        assigned = [s for s in table.get_symbols() if s.is_assigned() and not (s.is_imported() or s.is_namespace())]
        public = {s.get_name() for s in assigned if not s.get_name().startswith("_")}
        places = {name: f"{shown}:{line}" for name, line in names.lines.items()}
        public -= {name for name in public if isinstance(names.get(name), types.FunctionType)}  # a lambda
        return {n: (names[n], places.get(n, shown)) for n in names if n in public or n in settings}
    return {UNREADABLE: (problem, shown)}


def edits_line(
    config_class: type,
    layers: Callable[[Layer], list[Layer]],
    user: Layer,
    unused_because: str | None,
    foreign: Collection[str] = (),
) -> str | None:
    """Return one line with the changes that config.py makes, and whether they are used; None if there are none.

    Args:
        layers: takes the settings of config.py; returns the layers of a command with the default recipe.
        user: the settings of config.py.
        unused_because: why config.py is not used; None: it is used.
        foreign: settings that the command does not use.
    """
    settings = settings_of(config_class)
    old = merged(config_class, layers({}))
    values: dict[str, Any] = {}
    edits = []
    try:
        values = {name: value for name, (value, _) in merged(config_class, layers(user)).items()}
    except UserError:
        edits.append("edited (with errors)")
    for name, value in values.items():
        if value != old[name][0] and name not in foreign:
            idle = unmet(settings[name], values)
            note = f", no effect {in_words(idle, as_flags=False)}" if idle else ""
            edits.append(f"{name} {as_text(value)} (default {as_text(old[name][0])}{note})")
    if edits and unused_because is not None:
        edits.append(f"but not used: {unused_because}")
    return ", ".join(edits) or None

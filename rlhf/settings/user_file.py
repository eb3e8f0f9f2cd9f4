"""Reads the user's `config.py`: assignments of settings, such as `learning_rate = 1e-5`. Imports no torch."""

from __future__ import annotations

import ast
import os
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FunctionType, ModuleType

from rlhf.settings.fields import UNREADABLE, Layer, as_text, settings_of, unmet
from rlhf.settings.merge import merged
from rlhf.utils.errors import Problem, UserError

NO_VALUES = (ModuleType, FunctionType, type)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
             ast.GeneratorExp)  # nodes with separate names inside  # fmt: skip


def read_user_file(path: Path | None, settings: Collection[str]) -> Layer:
    """Run the file and return its settings: name -> (value, "file:line"). Returns an empty layer if it does not exist.

    All public names that the file assigns must be settings. Imported names and names of functions or classes are used
    only if they are in `settings`. If the file fails, the layer contains the error, because the error matters only if
    the file is used.
    """
    if path is None or not path.is_file():
        return {}
    shown = path.name if os.path.realpath(path.parent) == os.path.realpath(".") else str(path)
    values: dict[str, object] = {"__name__": "config", "__file__": str(path)}
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"), str(path))
        exec(compile(tree, str(path), "exec"), values)
    except UnicodeDecodeError as error:
        problem = Problem("not UTF-8", f"{shown}, byte {error.start}", "Save the file as UTF-8")
    except OSError as error:
        problem = Problem(f"cannot be read ({error.strerror})", shown, "Correct its permissions")
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None) or 1
        kind = "not Python" if isinstance(error, SyntaxError) else type(error).__name__
        problem = Problem(f"{kind} ({getattr(error, 'msg', error)})", f"{shown}:{line}", "Correct that line")
    else:
        assigned = _assigned(tree)
        public = {n for n in assigned if not n.startswith("_") and not isinstance(values.get(n), NO_VALUES)}
        names = [name for name in values if name in settings or name in public]
        return {name: (values[name], f"{shown}:{assigned[name]}" if name in assigned else shown) for name in names}
    return {UNREADABLE: (problem, shown)}


def edits_line(
    config_class: type,
    without: Sequence[Layer],
    with_file: Sequence[Layer],
    unused_because: str | None,
    foreign: Collection[str] = (),
) -> str | None:
    """Return one line with the changes that config.py makes, and whether they are used; None if there are none.

    Args:
        without: the layers without config.py.
        with_file: the layers with config.py.
        unused_because: why config.py is not used; None: it is used.
        foreign: groups of settings that the command does not use.
    """
    settings = settings_of(config_class)
    old = merged(config_class, without)
    try:
        new = merged(config_class, with_file)
    except UserError:
        return "edited (with errors)" + (f", but not used: {unused_because}" if unused_because is not None else "")
    edits = [name for name in new if new[name][0] != old[name][0] and settings[name].group not in foreign]
    if edits and unused_because is not None:
        return f"edited ({', '.join(edits)}), but not used: {unused_because}"
    values = {name: value for name, (value, _) in new.items()}
    texts = []
    for name in edits:
        condition = unmet(settings[name], values)
        idle = "" if condition is None else f", no effect {condition.text(as_flags=False)}"
        texts.append(f"{name} {as_text(values[name])} (default {as_text(old[name][0])}{idle})")
    return ", ".join(texts) or None


def _assigned(tree: ast.Module) -> dict[str, int]:
    """Return the names that the module assigns outside functions and classes -> the last line that does so."""
    lines = {}
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = max(node.lineno, lines.get(node.id, 0))
        nodes += [] if isinstance(node, SCOPES) else list(ast.iter_child_nodes(node))
    return lines

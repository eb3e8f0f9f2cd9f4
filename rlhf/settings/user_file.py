"""Reads the user's `config.py`: assignments of settings, such as `learning_rate = 1e-5`. Imports no torch."""

from __future__ import annotations

import ast
import os
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FunctionType, ModuleType

from rlhf.settings.fields import Layer, as_text, settings_of
from rlhf.settings.merge import values_of
from rlhf.utils.errors import UserError


def read_user_file(path: Path | None) -> Layer:
    """Run the file and return what it assigns: name -> (value, "file:line"). Names with a leading underscore,
    modules, functions and classes are no settings. An empty layer if there is no such file. Raises UserError if the
    file is not Python or fails."""
    if path is None or not path.is_file():
        return {}
    shown = _shown(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        tree = ast.parse(text, str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {shown}, byte {error.start}. Save the file as UTF-8") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise UserError(f"not Python ({getattr(error, 'msg', error)}): {shown}:{line}. Correct that line") from None
    values: dict[str, object] = {"__name__": "config", "__file__": str(path)}
    try:
        exec(compile(tree, str(path), "exec"), values)
    except Exception as error:
        line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)][-1]
        raise UserError(f"{type(error).__name__} ({error}): {shown}:{line}. Correct that line") from None
    return {
        name: (values[name], f"{shown}:{line}")
        for name, line in _assigned(tree).items()
        if name in values and not isinstance(values[name], (ModuleType, FunctionType, type))
    }


def edits_line(
    config_class: type,
    without: Sequence[Layer],
    with_file: Sequence[Layer],
    unused_because: str | None,
    foreign: Collection[str] = (),
) -> str | None:
    """Return what config.py changes, and whether that is used, on one line; None if it changes nothing.

    Args:
        without, with_file: the layers of settings without config.py and with it.
        unused_because: why config.py is not used; None: it is.
        foreign: groups of settings that the command does not read.
    """
    old, settings = values_of(config_class, without), settings_of(config_class)
    try:
        new = values_of(config_class, with_file)
    except UserError:
        if unused_because is None:
            raise
        return f"edited (with errors), but not used: {unused_because}"
    edits = [name for name in new if new[name] != old[name] and settings[name].group not in foreign]
    if edits and unused_because is not None:
        return f"edited ({', '.join(edits)}), but not used: {unused_because}"
    return ", ".join(f"{name} {as_text(new[name])} (default {as_text(old[name])})" for name in edits) or None


def _assigned(tree: ast.Module) -> dict[str, int]:
    """Every public name that the module assigns outside functions and classes -> the line of its last assignment."""
    lines: dict[str, int] = {}
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not node.id.startswith("_"):
            lines[node.id] = max(node.lineno, lines.get(node.id, 0))
        own_names = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp,
                     ast.DictComp, ast.GeneratorExp)  # fmt: skip
        nodes += [] if isinstance(node, own_names) else list(ast.iter_child_nodes(node))
    return lines


def _shown(path: Path) -> str:
    """The path as messages show it: its name alone in the working directory."""
    return path.name if os.path.realpath(path.parent) == os.path.realpath(".") else str(path)

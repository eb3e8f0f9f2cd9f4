"""The texts that the library can print, and the commands that can print each of them.

Both are read from the syntax trees of rlhf/: a new message is found without a change here.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import command_line
from rlhf.settings.evaluation import COMPARISON, EVALUATION, EXPORT, PLOT
from rlhf.settings.flags import CommandLine
from rlhf.settings.reward_model import LINE

ROOT = Path(__file__).resolve().parents[1]
FLAG = re.compile(r"(?<![\w-])--(?:[a-z][\w-]*[a-z0-9]|K\b)")
# command -> the function that runs it, and its command lines: one, or those of all algorithms
COMMANDS: dict[str, tuple[tuple[str, str], list[CommandLine]]] = {
    "train": (
        ("rlhf.commands.train", "train_command"),
        [*map(command_line, ALGORITHMS.values()), command_line(ALGORITHMS["ppo"], chosen=True)],
    ),
    "reward-model": (("rlhf.commands.reward_model", "reward_model_command"), [LINE]),
    "evaluate": (("rlhf.commands.evaluate", "evaluate_command"), [EVALUATION]),
    "compare": (("rlhf.commands.compare", "compare_command"), [COMPARISON]),
    "plot": (("rlhf.commands.plot", "plot_command"), [PLOT]),
    "export": (("rlhf.commands.export", "export_command"), [EXPORT]),
}
Key = tuple[str, str]  # module, and the name of a function, a class, `Class.method` or a variable in it


@dataclass(frozen=True)
class Message:
    """A text in the code; {} stands for what is inserted when it is printed."""

    key: Key
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.key[0]}:{self.line}"


@functools.cache
def known_flags(command: str) -> frozenset[str]:
    """Return all flags of a command, under all their names."""
    return frozenset().union(*map(own_flags, COMMANDS[command][1]))


def own_flags(line: CommandLine) -> frozenset[str]:
    """Return the flags of a command line without those that only other commands have."""
    return frozenset(name for name, flag in line.flags.items() if not flag.owner)


# --- the units of the code -------------------------------------------------------------------------------------------


@functools.cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for file in sorted((ROOT / "rlhf").rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(file.read_text("utf-8"))
    return found


@functools.cache
def units() -> dict[Key, list[ast.AST]]:
    """Return the functions, classes without their methods, methods and variables of all modules."""
    found: dict[Key, list[ast.AST]] = defaultdict(list)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[module, node.name].append(node)
            elif isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
                others = [part for part in node.body if part not in methods and not isinstance(part, ast.Expr)]
                found[module, node.name] += others + node.bases  # an Expr is the docstring
                found[module, node.name] += node.decorator_list
                for method in methods:
                    found[module, f"{node.name}.{method.name}"].append(method)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                    found[module, name].append(node)
    return found


@functools.cache
def methods() -> dict[str, set[Key]]:
    """Return the methods of all classes by their names."""
    found: dict[str, set[Key]] = defaultdict(set)
    for module, name in units():
        if "." in name:
            found[name.partition(".")[2]].add((module, name))
    return found


@functools.cache
def imported() -> dict[str, dict[str, Key]]:
    """Return, for each module, the names that it imports from others of the library."""
    found: dict[str, dict[str, Key]] = {}
    for module, tree in modules().items():
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        found[module] = {a.asname or a.name: (node.module, a.name) for node in froms for a in node.names}
    return found


def resolve(module: str, name: str) -> Key | None:
    """Return the unit that a name in a module means; None for one of another library."""
    seen = set()
    while (module, name) not in seen:
        seen.add((module, name))
        if (module, name) in units():
            return module, name
        module, name = imported().get(module, {}).get(name, (module, name))
    return None


@functools.cache
def used_by(key: Key) -> frozenset[Key]:
    """Return the units that a unit may use: those that it names, and each method whose name it has as an attribute."""
    module = key[0]
    found: set[Key | None] = set()
    for node in (part for top in units()[key] for part in ast.walk(top)):
        if isinstance(node, ast.Name):
            found.add(resolve(module, node.id))
        elif isinstance(node, ast.Attribute):
            found |= methods().get(node.attr, set())
            if isinstance(node.value, ast.Name):
                owner = imported()[module].get(node.value.id)
                found.add(resolve(".".join(owner), node.attr) if owner and ".".join(owner) in modules() else None)
    return frozenset(found - {None})


@functools.cache
def reached(command: str) -> frozenset[Key]:
    """Return the units that a command may use, at least all that it does use: methods only of classes in use."""
    todo = [COMMANDS[command][0]]
    done = set(todo)
    waiting: dict[Key, set[Key]] = defaultdict(set)  # class -> methods that are used if it is
    while todo:
        key = todo.pop()
        module, name = key
        dunder = {unit for unit in units() if unit[0] == module and unit[1].startswith(f"{name}.__")}
        new = dunder | waiting.pop(key, set())
        for used in used_by(key):
            owner = (used[0], used[1].partition(".")[0])
            if "." in used[1] and owner not in done:
                waiting[owner].add(used)
            else:
                new.add(used)
        todo += new - done
        done |= new
    return frozenset(done)


# --- the texts -------------------------------------------------------------------------------------------------------


def as_text(node: ast.AST) -> str | None:
    """Return a text expression with {} for its inserted values; None for another expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Return the texts below a node, without docstrings."""
    doc = getattr(node, "body", None)
    is_doc = isinstance(doc, list) and doc and isinstance(doc[0], ast.Expr) and as_text(doc[0].value) is not None
    for child in ast.iter_child_nodes(node):
        if is_doc and child is doc[0]:
            continue
        text = as_text(child)
        if text is not None:
            yield child.lineno, text
        for part in child.values if isinstance(child, ast.JoinedStr) else [child] if text is None else []:
            if not isinstance(part, ast.Constant):  # an inserted value may contain a text
                yield from _texts(part)


@functools.cache
def messages() -> list[Message]:
    """Return every text of the library, except docstrings and the declarations of the settings."""
    declared = ("rlhf.settings.training", "rlhf.settings.reward_model", "rlhf.settings.evaluation")
    found = {
        Message(key, line, text)
        for key, nodes in units().items()
        if key[0] not in declared
        for node in nodes
        for line, text in _texts(node if not isinstance(node, ast.Constant) else ast.Expr(node))
    }
    return sorted(found, key=lambda message: (message.key[0], message.line, message.text))


@functools.cache
def fixes() -> list[Message]:
    """Return the texts that are written as the fix of an error: Problem(what, place, fix), UserError, RunError."""
    found = []
    for key, nodes in units().items():
        for call in (part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Call)):
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            given = [keyword.value for keyword in call.keywords if keyword.arg == "fix"]
            given += call.args[2:3] if name in ("Problem", "UserError", "RunError", "BadScore") else []
            given += call.args[1:2] if name in ("_problem", "read_jsonl") else []
            parts = [part for value in given for part in ast.walk(ast.Expr(value)) if as_text(part)]
            inner = {id(part) for value in parts if isinstance(value, ast.JoinedStr) for part in value.values}
            found += [Message(key, part.lineno, as_text(part)) for part in parts if id(part) not in inner]
    return found


def printed_commands() -> Iterator[tuple[Message, str]]:
    """Return the words of each printed command that are written in the code, and the name of that command."""
    for key, nodes in units().items():
        for call in (part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Call)):
            if ast.unparse(call.func) == "script_command":
                name = as_text(call.args[0]) or "train"  # otherwise the name of an algorithm
                words = [text for part in call.args[1:] if (text := as_text(part))]
                yield Message(key, call.lineno, " ".join(words)), name

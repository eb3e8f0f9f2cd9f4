"""Checks the structure of the code: imports between folders point down, one file imports TRL's PPO, and functions
are short.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf.algorithms.table import ALGORITHMS

ROOT = Path(__file__).parent.parent
# The folders and top-level modules of rlhf/, lowest level first. A file imports from its own or a lower level.
ORDER = [
    *("utils", "distributed", "settings", "algorithms.table", "checkpoints"),
    *("data", "models", "rollout", "rewards", "environments", "algorithms", "config"),
    *("demo", "trainer", "callbacks", "setup", "analysis", "reports", "run", "export", "api", "commands", "__main__"),
]
SCRIPTS = (
    "train",
    *(f"train_{name}" for name in ALGORITHMS),
    "evaluate_generations",
    "plot_training_progress",
    "compare_runs",
    "export_model",
)
PACKAGE = ROOT / "rlhf"
FILES = [*ROOT.glob("*.py"), *PACKAGE.glob("**/*.py"), *ROOT.glob("reward_model/*.py")]
LONGEST_FUNCTION = 70  # lines


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> set[str]:
    """Return all modules that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def level(module: str) -> int:
    """Return the index of a module's folder in ORDER. Commands are above all folders, other libraries below."""
    package, _, rest = module.partition(".")
    if package == "rlhf" and rest:
        if rest.startswith("algorithms.table"):
            return ORDER.index("algorithms.table")
        folder = rest.split(".")[0]
        assert folder in ORDER, f"rlhf/{folder} is new: add it to ORDER"
        return ORDER.index(folder)
    return len(ORDER) if package in (*SCRIPTS, "config", "reward_model") else -1


def upward_imports(path: Path) -> list[str]:
    """Return the imports from a higher level. Imports for annotations count, too. The package's own functions, which
    it imports when they are used, are at the top."""
    if path == PACKAGE / "__init__.py":
        return []
    return [m for m in imports_of(path) if level(m) > level(module_of(path))]


def findings(check: Callable[[Path], list[str]], files: list[Path] = FILES) -> list[str]:
    """Return what a check finds in the files, with the module."""
    assert len(files) > 150
    return [f"{module_of(path)}: {found}" for path in files for found in check(path)]


def test_imports_point_down():
    assert findings(upward_imports) == []


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import each other, directly or through others of the group."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        found: set[str] = set()
        ahead = [module]
        while ahead:
            new = imports[ahead.pop()] - found
            found |= new
            ahead += new
        reached[module] = found
    groups = {frozenset(m for m in found if module in reached[m]) for module, found in reached.items()}
    return [set(group) for group in groups if group]


def test_no_circles_of_imports():
    names = {module_of(path): path for path in PACKAGE.glob("*/**/*.py")}
    found = circles({name: imports_of(path) & names.keys() for name, path in names.items()})
    assert found == []


def test_the_check_finds_a_circle():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [{"b", "c"}]


def literal(node: ast.AST) -> str:
    """Return the text of a string in the source, with {} for what an f-string inserts."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(literal, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def whole_lines(path: Path) -> list[str]:
    """Return the errors whose first argument, what is wrong, also has the advice: a second sentence."""
    errors = ("UserError", "RunError", "Problem", "_problem")
    calls = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call) and n.args]
    whats = [literal(c.args[0]) for c in calls if isinstance(c.func, ast.Name) and c.func.id in errors]
    return [what for what in whats if re.search(r"\. [A-Z{]", what)]


def test_an_error_has_its_parts_apart():
    assert [f"{path}: {what}" for path in [*FILES, *ROOT.glob("benchmarks/*.py")] for what in whole_lines(path)] == []


def test_the_check_finds_a_line_in_one_piece(tmp_path):
    file = tmp_path / "one.py"
    file.write_text('raise UserError(f"no rows: {name}. Give some")\nraise UserError("no rows", name, "Give: some")\n')
    assert whole_lines(file) == ["no rows: {}. Give some"]


def test_init_files_of_folders_are_empty():
    folders = [path for path in FILES if path.name == "__init__.py" and path.parent != PACKAGE]
    assert [module_of(path) for path in folders if path.read_text()] == []


def test_contributing_lists_the_folders_from_top_to_bottom():
    rows = re.findall(r"^\| `(\w+)/` \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert [ORDER.index(folder) for folder in rows] == sorted(map(ORDER.index, rows), reverse=True)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring, so that an `Args:` list costs nothing."""
    first = function.body[0]
    docstring = ast.get_docstring(function) is not None
    return function.end_lineno - function.lineno + 1 - docstring * (first.end_lineno - first.lineno + 1)


def long_functions(node: ast.AST, name: str) -> Iterator[str]:
    """Yields the qualified names of the functions and methods inside a syntax tree node that are too long."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        inside = f"{name}.{child.name}" if is_function or isinstance(child, ast.ClassDef) else name
        if is_function and code_lines(child) > LONGEST_FUNCTION:
            yield inside
        yield from long_functions(child, inside)


def test_functions_are_short():
    files = PACKAGE.glob("**/*.py")
    long = [name for path in files for name in long_functions(tree_of(path), module_of(path))]
    assert long == [], f"at most {LONGEST_FUNCTION} lines"


def test_the_check_finds_a_long_function():
    body = "\n".join(["        pass"] * LONGEST_FUNCTION)
    docstring = '        """' + "\n" * LONGEST_FUNCTION + '"""'
    short = f"    def short(self):\n{docstring}\n        pass\n"
    tree = ast.parse(f"class A:\n{short}    async def long(self):\n{body}\n")
    assert list(long_functions(tree, "module")) == ["module.A.long"]


# names of one role: a command's start, a demo's questions, the tables of a page
SAME_ROLE = {"main", "ask", "questions", "Question", "tables"}


def public_names(tree: ast.Module) -> list[str]:
    """Return the functions and classes of a file that other files may import."""
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, defined) and not node.name.startswith("_")]


def test_each_public_name_means_one_thing():
    """A name of two files would mean two things to a reader, or one thing would be written twice."""
    places: dict[str, list[str]] = {}
    for path in PACKAGE.glob("**/*.py"):
        for name in public_names(tree_of(path)):
            places.setdefault(name, []).append(module_of(path))
    assert len(places) > 1000 and places["Screen"] == ["rlhf.utils.console"]
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in SAME_ROLE} == {}


# of transformers' TrainerState and of rlhf.trainer.progress
COUNTERS = {
    *("global_step", "episode", "optimizer_steps", "episodes", "completion_tokens", "resampled_episodes"),
    *("peak_memory", "last_good_update", "skipped", "skipped_in_a_row"),
}


def assigned_attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yields the attributes of other objects than `self` that a syntax tree assigns, deletes, or adds to."""
    for one in ast.walk(node):
        is_assigned = isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load)
        if is_assigned and not (isinstance(one.value, ast.Name) and one.value.id == "self"):
            yield one


def moved_counters(path: Path) -> list[str]:
    """Return the counters of a training run that a file outside the trainer moves."""
    if PACKAGE / "trainer" in path.parents:
        return []
    return [f"line {one.lineno}: {one.attr}" for one in assigned_attributes(tree_of(path)) if one.attr in COUNTERS]


def test_only_the_trainer_moves_the_counters_of_a_run():
    assert findings(moved_counters) == []


def test_the_check_finds_a_moved_counter(tmp_path):
    file = tmp_path / "one.py"
    file.write_text("trainer.host.state.global_step = 3\nself.episodes = 0\ntrainer.progress.skipped += 1\n")
    assert moved_counters(file) == ["line 1: global_step", "line 3: skipped"]


def names_of_exceptions(function: ast.AST) -> set[str]:
    """Return the names that hold an exception in a function: those of handlers, what it raises, and parameters."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.ExceptHandler):
            names.add(node.name)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name):
            names.add(node.exc.id)
        elif isinstance(node, ast.arg) and re.search(r"Error|Exception", ast.unparse(node.annotation or node)):
            names.add(node.arg)
    return names - {"self"}


def marked_exceptions(path: Path) -> list[str]:
    """Return the attributes that a file sets on exceptions: a fact is a field of an own class, given to it when it is
    raised."""
    found = []
    for node in tree_of(path).body:
        for function in ast.walk(node):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                names = names_of_exceptions(function)
                marks = [a for a in assigned_attributes(function) if ast.unparse(a.value) in names]
                calls = [c for c in ast.walk(function) if isinstance(c, ast.Call) and ast.unparse(c.func) == "setattr"]
                marks += [call for call in calls if ast.unparse(call.args[0]) in names]
                found += [f"line {mark.lineno}: {ast.unparse(mark)}" for mark in marks]
    return sorted(set(found))


def test_errors_carry_their_facts_in_fields():
    assert findings(marked_exceptions) == []


def test_the_check_finds_a_marked_exception(tmp_path):
    file = tmp_path / "one.py"
    file.write_text(
        "def f(given: OSError | None):\n    given.started = True\n    own = UserError()\n    own.by_all = True\n"
        "    try:\n        g()\n    except ValueError as found:\n        setattr(found, 'a', 1)\n    raise own\n"
    )
    assert marked_exceptions(file) == ["line 2: given.started", "line 4: own.by_all", "line 8: setattr(found, 'a', 1)"]


def test_trl_experimental_is_imported_in_one_file():
    uses = {module_of(path) for path in FILES if any(m.startswith("trl.experimental") for m in imports_of(path))}
    assert uses == {"rlhf.models.trl_ppo"}


@pytest.mark.parametrize("line", ["from rlhf.trainer import loop", "import config", "from train_ppo import main"])
def test_the_check_finds_an_import_from_a_higher_level(tmp_path, monkeypatch, line):
    """Inside a function, and under TYPE_CHECKING."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    bad = tmp_path / "rlhf" / "utils" / "files.py"
    bad.parent.mkdir(parents=True)
    for text in ("def f():\n    {}\n", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"):
        bad.write_text(text.format(line))
        assert upward_imports(bad)
    bad.write_text("import json\nfrom rlhf.utils import system\n")
    assert not upward_imports(bad)


# libraries that take up to 8 seconds to import together
HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes", "scipy", "pandas",
         "matplotlib", "tensorboard")  # fmt: skip
MISSING = {
    "evaluate_generations.py": [["--model-path", "./none"], ["--tokens", "./none"]],
    "compare_runs.py": [["none", "neither"]],
    "plot_training_progress.py": [["none"]],
    "export_model.py": [["none", "--to", "gguf"], []],
    "-m reward_model.train": [["--pairs", "none.tsv"], ["--base-model", "./none"]],
}
DEMO = ["--recipe", "demo", "--output"]
TRAINING = [
    ["--prompts", "no/such/folder/"],
    ["--prompts", "none.tsv"],
    [*DEMO, str(ROOT / "rlhf")],
    [*DEMO, "none", "--dry-run"],
    ["--resume", "--output", "none"],
    ["--actor-model", "tests", "--rm-model", "none", "--reward-func", "length_penalty", "--prompts", "x.csv"],
    ["--reward-func", "none.py:f"],
]


COMMANDS = [*(f"{script}.py" for script in SCRIPTS), "-m reward_model.train"]
SAME_CODE = ["train.py", *(f"train_{name}.py" for name in ALGORITHMS if name != "ppo")]  # as train_ppo.py


@pytest.mark.parametrize("command", [pytest.param(c, marks=pytest.mark.ci) if c in SAME_CODE else c for c in COMMANDS])
def test_help_and_errors_in_inputs_import_no_slow_library(command, tmp_path):
    """In a folder without demo parts, and in under a second of CPU time each."""
    words = command.split()
    run, name = ("run_module", words[1]) if len(words) > 1 else ("run_path", str(ROOT / words[0]))
    code = f"""
import runpy, sys, time
sys.path.insert(0, {str(ROOT)!r})
before = 0
for arguments in {[["--help"], ["--batch-sise"], *MISSING.get(command, TRAINING)]}:
    sys.argv = ["x", *arguments]
    try:
        runpy.{run}({name!r}, run_name="__main__")
    except SystemExit:
        pass
    found = [name for name in {HEAVY} if name in sys.modules]
    now = time.process_time()
    assert not found and now - before < 1, (arguments, found, now - before)
    before = now
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def strings_of(tree: ast.AST) -> Iterator[str]:
    """Yields the strings of a file, without its docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def loads_without_the_check(tree: ast.AST) -> list[str]:
    """Return the calls of transformers' Auto classes that do not turn off the code of model folders."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        ast.unparse(call.func)
        for call in calls
        if ast.unparse(call.func).startswith("Auto") and call.func.attr in ("from_pretrained", "from_config")
        if not any(
            k.arg is None or (k.arg == "trust_remote_code" and ast.unparse(k.value) == "False") for k in call.keywords
        )
    ]


def test_models_are_loaded_without_their_code():
    """TRL's class receives a model that is loaded already."""
    found = findings(lambda path: loads_without_the_check(tree_of(path)))
    assert found == ["rlhf.models.actor_critic: AutoModelForCausalLMWithValueHead.from_pretrained"]


# what writes on the console; rlhf.utils.errors.print_line and rlhf.utils.console.Screen escape control characters
PRINTERS = {
    "rlhf.utils.errors": ["os.write", "print"],
    "rlhf.utils.streams": ["print"],  # below errors: the loss of stdout, in the system's words
    "rlhf.utils.console": ["Console", "Console", "Live", "Table", "Text", "console.print", "console.print",
                           "console.print"],
}  # fmt: skip
WRITES = {"print", "Console", "Live", "Table", "Text", "tqdm", "StreamHandler", "basicConfig"}
STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__", "console", "traceback", "os")


def printers(tree: ast.AST) -> list[str]:
    """Return what a file uses to write on the console: names such as print, and methods of a stream or a console."""
    calls = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in WRITES and isinstance(node.ctx, ast.Load):
            found += [node.id] if node.id == "print" or id(node) in calls else []
        elif isinstance(node, ast.Attribute) and (node.attr.startswith(("write", "print")) or node.attr in WRITES):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            found += [f"{owner}.{node.attr}"] if owner in STREAMS else []
    return sorted(found)


def test_one_place_prints():
    found = {module_of(path): names for path in FILES if (names := printers(tree_of(path)))}
    assert found == PRINTERS, "use print_line or Screen"


NAMES = re.compile(rf"(?<![a-z_])(train_)?({'|'.join(ALGORITHMS)})(?![a-z_])", re.IGNORECASE)


def test_only_the_algorithms_folder_names_algorithms():
    """And the settings of one algorithm."""
    others = [path for path in PACKAGE.glob("**/*.py") if path.parent.name != "algorithms"]
    named = [path for path in others if any(map(NAMES.search, strings_of(tree_of(path))))]
    assert [module_of(path) for path in named] == ["rlhf.settings.training"]


def test_each_algorithm_has_a_row_and_a_class():
    from rlhf.algorithms.classes import CLASSES
    from rlhf.algorithms.table import ALGORITHMS

    assert ALGORITHMS.keys() == CLASSES.keys()

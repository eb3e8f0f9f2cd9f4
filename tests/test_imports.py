"""Imports between folders point down only, and one file alone knows where TRL keeps PPO."""

from __future__ import annotations

import ast
import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The folders of rlhf/, bottom first, with the root's modules at their places among them.
ORDER = [
    *("utils", "recipes", "settings", "checkpoints", "config", "data", "models", "rollout", "rewards", "algorithms"),
    *("demo", "trainer", "callbacks", "setup", "analysis", "reports", "run", "api"),
]
NOT_MOVED_YET = {row["old"] for row in csv.DictReader((ROOT / "docs" / "moves.csv").open())}
FILES = [*ROOT.glob("*.py"), *ROOT.glob("rlhf/**/*.py"), *ROOT.glob("reward_model/*.py")]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def level(module: str) -> int:
    """The place of a module's folder in ORDER; commands are above all folders, other libraries below."""
    if module in ORDER:
        return ORDER.index(module)
    package, _, rest = module.partition(".")
    if package == "reward_model" and module in NOT_MOVED_YET:
        return -1
    if package != "rlhf":
        return len(ORDER) if (ROOT / f"{module.replace('.', '/')}.py").is_file() else -1
    folder = rest.split(".")[0]
    if (ROOT / "rlhf" / f"{folder}.py").is_file() and f"rlhf.{folder}" in NOT_MOVED_YET:
        return -1
    return ORDER.index(folder) if folder else -1


def arrows_up(path: Path) -> list[str]:
    """The imports that point up, annotations' imports among them."""
    return [m for m in imports_of(path) if level(m) > level(module_of(path))]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_arrow_points_up(path):
    if path.name == "__init__.py":
        assert path.read_text() == "", "packages are folders; what they hold is imported by name"
    elif module_of(path) not in NOT_MOVED_YET:
        assert arrows_up(path) == []


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_trl_experimental_is_imported_in_one_file(path):
    uses = [m for m in imports_of(path) if m.startswith("trl.experimental")]
    assert not uses or module_of(path) == "rlhf.models.trl_ppo"


def test_the_check_sees_an_arrow_that_points_up(tmp_path, monkeypatch):
    bad = tmp_path / "rlhf" / "algorithms" / "objectives.py"
    bad.parent.mkdir(parents=True)
    (tmp_path / "rlhf" / "trainer").mkdir()
    bad.write_text("def f():\n    from rlhf.trainer import loop\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert set(arrows_up(bad)) == {"rlhf.trainer", "rlhf.trainer.loop"}


SCRIPTS = ("train_ppo", "train_grpo", "evaluate_generations", "plot_training_progress", "compare_runs")


@pytest.mark.parametrize("command", [*([f"{script}.py"] for script in SCRIPTS), ["-m", "reward_model.train"]])
def test_help_and_mistakes_do_not_wait_for_torch(command):
    watch = "import sys, runpy; sys.argv = {argv}\ntry: runpy.{run}({name!r}, run_name='__main__')\n"
    watch += "except SystemExit: pass\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    run, name = ("run_module", command[1]) if command[0] == "-m" else ("run_path", command[0])
    for argument in ("--help", "--batch-sise"):
        code = watch.format(argv=["x", argument], run=run, name=name)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

"""Imports point down only (DESIGN: the house), and one file alone knows where TRL keeps PPO."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = [
    {"rlhf.errors", "rlhf.libraries", "rlhf.files", "rlhf.commands", "rlhf.replacing",
     "rlhf.printing", "rlhf.system", "rlhf.runlogs", "rlhf.checkpoints", "rlhf.stopping",
     "rlhf.knobs", "rlhf.cli", "recipes"},
    {"config", "rlhf.demo.families", "rlhf.demo.tasks"},
    {"rlhf.objectives", "rlhf.controllers", "rlhf.best", "rlhf.inputs", "rlhf.hub", "rlhf.prompts", "rlhf.models",
     "rlhf.actor_critic", "rlhf.determinism", "rlhf.packing", "rlhf.fidelity", "rlhf.footprint", "rlhf.trl_ppo",
     "rlhf.console", "rlhf.pictures", "rlhf.pages",
     "rlhf.statistics", "rlhf.curves", "reward_model.scorer"},
    {"rlhf.rollout", "rlhf.decoding", "rlhf.engines", "rlhf.vllm_engine", "rlhf.rewards",
     "rlhf.evaluation", "rlhf.weights", "rlhf.guard", "rlhf.report", "rlhf.metrics",
     "rlhf.curve_pictures", "rlhf.trained", "rlhf.tokens", "rlhf.dealing"},
    {"rlhf.loop", "rlhf.ppo_trainer", "rlhf.grpo_trainer", "rlhf.callbacks", "rlhf.outcome", "rlhf.seeds",
     "rlhf.api", "rlhf.resume", "rlhf.trainer_state", "rlhf.incidents", "rlhf.replay", "rlhf.preflight", "rlhf.checks",
     "rlhf.assembly", "rlhf.plan", "rlhf.memory", "reward_model.training", "rlhf.export",
     "rlhf.model_card", "rlhf.chat", "rlhf.demo.start_model", "rlhf.demo.pairs", "rlhf.demo.parts",
     "rlhf.measuring", "rlhf.audit", "rlhf.verdict", "rlhf.budgets", "rlhf.report_pictures",
     "rlhf.evaluation_report", "rlhf.comparison_report", "rlhf.comparison_tables", "rlhf.token_page"},
    {"train_ppo", "train_grpo", "evaluate_generations", "plot_training_progress", "compare_runs",
     "reward_model.train"},
]  # fmt: skip
LEVEL_OF = {module: level for level, modules in enumerate(LEVELS) for module in modules}
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


def arrows_up(path: Path) -> list[str]:
    here = LEVEL_OF[module_of(path)]
    return [m for m in imports_of(path) if LEVEL_OF.get(m, -1) > here]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_arrow_points_up(path):
    if path.name == "__init__.py":
        assert path.read_text() == "", "packages are folders; what they hold is imported by name"
        return
    assert module_of(path) in LEVEL_OF, "a new module: give it its level above"
    assert arrows_up(path) == []


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_trl_experimental_is_imported_in_one_file(path):
    uses = [m for m in imports_of(path) if m.startswith("trl.experimental")]
    assert not uses or module_of(path) == "rlhf.trl_ppo"


def test_the_check_sees_an_arrow_that_points_up(tmp_path, monkeypatch):
    bad = tmp_path / "rlhf" / "objectives.py"
    bad.parent.mkdir()
    bad.write_text("def f():\n    from rlhf import ppo_trainer\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert arrows_up(bad) == ["rlhf.ppo_trainer"]


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

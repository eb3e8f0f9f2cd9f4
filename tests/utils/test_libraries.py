"""Tests of the imports of slow libraries: a progress line, no compiler, no search for garbage, and python -OO."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scripts.test_scripts import ROOT

CODE = """
import gc, sys
sys.path.insert(0, {root!r})
from rlhf.utils.console import Screen
from rlhf.utils.libraries import import_libraries
import_libraries(Screen())
print("compiler", "torch._inductor.compile_fx" in sys.modules)
kept = gc.get_freeze_count()
print("searched", gc.get_stats()[0]["collections"], "kept", kept > 100_000)
assert gc.isenabled()
import_libraries(Screen())  # in a program that has torch, whose objects may become garbage
assert gc.get_freeze_count() <= kept
import torch
calls = []
def backend(graph, example_inputs):
    calls.append(graph)
    return graph.forward
assert torch.equal(torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2)), torch.ones(2))
print("compiled", len(calls))
import os
assert "TORCHDYNAMO_DISABLE" not in os.environ
"""


@pytest.mark.ci
def test_the_compiler_is_not_imported():
    """Afterwards, torch.compile works."""
    code = CODE.format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "loading the libraries: torch" in done.stdout
    assert "compiler False" in done.stdout and "compiled 1" in done.stdout
    searched, _, kept = done.stdout.partition("searched ")[2].split()[:3]
    assert int(searched) < 200 and kept == "True"


COMMANDS = (
    ("train_grpo.py", "--recipe", "demo", "--num-iterations", "1"),
    ("evaluate_generations.py", "--model-path", "no-model"),
    ("compare_runs.py", "no-model"),
    ("reward_model/train.py",),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_python_without_docstrings_is_one_line(words, tmp_path):
    """transformers reads docstrings at import: it would raise a ValueError that looks like a bug of this project."""
    command = [sys.executable, "-OO", str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "PYTHONOPTIMIZE" in line and "-OO" in line
    assert list(tmp_path.iterdir()) == []


def test_a_plot_needs_no_docstrings(tmp_path):
    """It does not import transformers."""
    command = [sys.executable, "-OO", str(ROOT / "plot_training_progress.py"), "no-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "no-run" in done.stderr and "PYTHONOPTIMIZE" not in done.stderr
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from rlhf.utils.libraries import check_libraries; "
    code += "check_libraries('matplotlib', 'tensorboard')"
    subprocess.run([sys.executable, "-OO", "-c", code], check=True)

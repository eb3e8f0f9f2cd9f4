"""Tests of the imports of slow libraries: a progress line, and torch's compiler is not imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scripts.test_scripts import ROOT

CODE = """
import sys
sys.path.insert(0, {root!r})
from rlhf.utils.console import Screen
from rlhf.utils.libraries import import_libraries
import_libraries(Screen())
print("compiler", "torch._inductor.compile_fx" in sys.modules)
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

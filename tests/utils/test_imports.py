"""Tests of the imports of slow libraries: a progress line, and torch's compiler is imported only if it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scripts.test_scripts import ROOT

CODE = """
import sys
sys.path.insert(0, {root!r})
from rlhf.utils.console import Screen
from rlhf.utils.imports import import_libraries
import_libraries(Screen(), compiled={compiled})
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


@pytest.mark.parametrize("compiled", [False, True])
def test_the_compiler_is_imported_only_if_it_is_used(compiled):
    """Afterwards, torch.compile works in both cases."""
    code = CODE.format(root=str(ROOT), compiled=compiled)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "loading the libraries: torch" in done.stdout
    assert f"compiler {compiled}" in done.stdout and "compiled 1" in done.stdout

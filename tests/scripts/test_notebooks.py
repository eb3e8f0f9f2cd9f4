"""Runs a notebook in a real kernel: what a cell shows while a model trains.

tests/real/test_tutorial.py runs the example.
"""

from __future__ import annotations

import json
import re

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests.documents import ROOT
from tests.notebooks import EXAMPLE, executed

SETUP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from rlhf.api import make_trainer
from rlhf.config import make_config
"""


def test_the_example_has_no_outputs_and_shows_every_step():
    notebook = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    code = "".join(line for cell in cells for line in cell["source"])
    assert all(word in code for word in ("make_config(", "make_trainer(", ".train()", "output=", "compare_runs.py"))


@pytest.mark.ci
def test_many_updates_are_one_output_and_an_error_in_training_is_one_line(start_model, tmp_path):
    cells = [
        SETUP,
        f"""
settings = dict(actor_model={str(start_model)!r}, batch_size=1, max_new_tokens=2, ppo_epochs=1, eval_every=1000)
def words(completions, **_):
    return [float(len(text.split())) for text in completions]
metrics = make_trainer(make_config(**settings, num_iterations=60), ["a cat?"], words).train()
print(metrics["avg_reward"] == metrics["rewards/mean"])
""",
        """
def fails(completions, **_):
    raise ValueError("a mistake")
make_trainer(make_config(**settings, num_iterations=2), ["a cat?"], fails).train()
""",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    with pytest.raises(CellExecutionError):
        executed(notebook, tmp_path)
    _, training, failing = notebook.cells
    kinds = [output.output_type for output in training.outputs]
    assert sorted(kinds) == ["display_data", "stream"]
    text = "".join(output.text for output in training.outputs if output.output_type == "stream")
    assert "\x1b" not in text and text.endswith("True\n") and len(text.splitlines()) <= 16
    shown = next(output for output in training.outputs if output.output_type == "display_data")
    assert shown.data["text/plain"].startswith("update 60/60")
    (error,) = [output for output in failing.outputs if output.output_type == "error"]
    (line,) = error.traceback
    assert re.match(r"error: .* raised ValueError: a mistake: reward function 'fails'", line), line

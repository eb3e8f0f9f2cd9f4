"""Runs notebooks in a real kernel: the example, and what a cell shows while a model trains."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from rlhf.checkpoints.run_record import RunRecord
from tests.documents import ROOT

EXAMPLE = ROOT / "examples" / "train_in_a_notebook.ipynb"
SETUP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from rlhf.api import make_trainer
from rlhf.config import make_config
"""


def executed(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Return the notebook with its outputs. Streams of one name are joined, as a notebook shows them."""
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", coalesce_streams=True, resources={"metadata": {"path": folder}}
    )
    return client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})  # other tests use the other cores


def test_the_example_has_no_outputs_and_shows_every_step():
    notebook = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    code = "".join(line for cell in cells for line in cell["source"])
    assert all(word in code for word in ("make_config(", "make_trainer(", ".train()", "output=", "resume=True"))


@pytest.mark.ci
def test_the_example_notebook_runs(tmp_path):
    notebook = nbformat.read(EXAMPLE, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert '".."' in first.source
    first.source = first.source.replace('".."', repr(str(ROOT)))
    done = executed(notebook, tmp_path)
    training = next(cell for cell in done.cells if "trainer.train()" in cell.source)
    kinds = [output.output_type for output in training.outputs]
    assert kinds.count("display_data") == 1 and len(kinds) <= 3, "one output is updated, with text above and below it"
    shown = next(output for output in training.outputs if output.output_type == "display_data")
    assert shown.data["text/plain"].startswith("update 12/12 | score")
    (error,) = [output for cell in done.cells for output in cell.get("outputs", []) if output.output_type == "error"]
    assert error.traceback == [
        "error: unknown setting max_new_token: make_config(max_new_token=). Did you mean max_new_tokens?"
    ]
    run = RunRecord.read(tmp_path / "notebook_run")
    assert run.status == "finished" and run.spent.updates == 15
    scores = [evaluation["score"] for evaluation in run.best.evaluations]
    assert max(scores[1:]) > scores[0], "the share of right answers rises"


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

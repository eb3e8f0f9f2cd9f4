"""Executes notebooks in a real kernel."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.documents import ROOT

EXAMPLE = ROOT / "examples" / "train_in_a_notebook.ipynb"


def executed(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Return the notebook with its outputs. Streams of one name are joined, as a notebook shows them."""
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", coalesce_streams=True, resources={"metadata": {"path": folder}}
    )
    return client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})  # other tests use the other cores

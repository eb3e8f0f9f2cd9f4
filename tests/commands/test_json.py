"""Tests `--json`: standard output has one JSON object, whatever the command, libraries or functions print."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf.utils.results import json_ready
from tests.scripts.test_scripts import run

ROOT = Path(__file__).parents[2]
PRINTS = """
import os
def loud(completions, **_):
    print("printed by a function")
    os.system("echo printed by a child process")
    return [float(len(text)) for text in completions]
"""
FEW = ["--num-iterations", "2", "--max-new-tokens", "6", "--eval-prompts", "4", "--batch-size", "2"]


@pytest.fixture
def answer(request, tmp_path):
    """Return a function that runs a command with --json and returns its object and what stderr has."""
    start = request.getfixturevalue("forks").run if hasattr(os, "fork") else run

    def ask(script: str, *flags: object, status: int = 0) -> tuple[dict[str, Any], str]:
        words = ["-m", script] if script == "rlhf" else [str(ROOT / script)]
        done = start([*words, *map(str, flags), "--json"], tmp_path)
        assert done.returncode == status, done.stderr
        assert done.stdout.count("\n") == 1, done.stdout
        return json.loads(done.stdout), done.stderr

    return ask


@pytest.fixture
def inputs(start_model, pairs_file, tmp_path) -> list[object]:
    """Return the flags of a run whose reward function prints."""
    (tmp_path / "loud.py").write_text(PRINTS, encoding="utf-8")
    return ["--actor-model", start_model, "--prompts", pairs_file, "--rm-model", "none", "--reward-func",
            "loud.py:loud", *FEW]  # fmt: skip


@pytest.mark.ci
def test_training_evaluation_plot_and_comparison(answer, inputs, tmp_path):
    found, printed = answer("train_ppo.py", *inputs, "--output", "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert found["runs"] == {"run": record} and record["status"] == "finished"
    assert found["budget"]["updates"] == 2 and found["predicted_peak_bytes"] > 0 and "KL" in found["plan"]
    assert "update 2/2" in printed and "printed by a function" in printed and "by a child process" in printed

    trust = ["--trust-reward-code", "--num-prompts", 3, "--completions", 2]
    found, printed = answer("evaluate_generations.py", "--model-path", "run", *trust)
    page = json.loads((tmp_path / "evaluation_output" / "evaluation.json").read_text("utf-8"))
    assert {name: found[name] for name in page} == page and page["prompts"]
    assert Path(found["page"]) == Path("evaluation_output", "evaluation.html") and "saved:" in printed

    found, _ = answer("plot_training_progress.py", "run")
    ends = found["runs"]["run"]
    assert ends["updates"] == 2 and ends["rewards/mean"] > 0 and ends["kl_divergence"] is not None
    assert (tmp_path / found["picture"]).is_file() and (tmp_path / found["table"]).is_file()

    found, _ = answer("compare_runs.py", "run", *trust, "--limit-minutes", 0)
    page = json.loads((tmp_path / "comparison_output" / "comparison.json").read_text("utf-8"))
    assert {name: found[name] for name in page} == page and page["headline"]

    found, printed = answer("train_ppo.py", "--resume", "--output", "run")
    assert list(found["runs"]) == ["run"], "a finished run prints where it is"


@pytest.mark.ci
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
def test_exports(answer, inputs, tmp_path):
    answer("train_ppo.py", *inputs, "--output", "run")
    found, printed = answer("export_model.py", "run", "--to", "gguf")
    compared = found["difference_nats"]
    assert (tmp_path / found["folder"] / found["file"]).is_file() and "ollama create" in printed
    assert 0 <= compared["mean"] <= compared["largest"] < 0.1 and compared["tokens"] > 4
    found, _ = answer("export_model.py", "run", "--to", "verl")
    assert (tmp_path / found["folder"] / "run.sh").is_file()
    assert found["prompts"] > 0 and any("--critic" in line for line in found["no_counterpart"])


@pytest.mark.ci
def test_seeds(answer, inputs, tmp_path):
    found, printed = answer("train_grpo.py", *inputs, "--K", 2, "--seeds", 1, 2, "--output", "many")
    assert list(found["runs"]) == ["many_seed1", "many_seed2"] and "2 seeds" in printed
    table = json.loads((tmp_path / "many_seeds.json").read_text("utf-8"))
    assert found["figures"] == table["figures"] and found["algorithm"] == "grpo"


@pytest.mark.ci
def test_plan_checks_and_parts(answer, inputs):
    found, _ = answer("train_ppo.py", *inputs, "--dry-run", "--eval-every", 100)
    assert found["budget"] == {
        "updates": 2, "episodes": 4, "optimizer_steps": 8, "completion_tokens_at_most": 24
    }  # fmt: skip
    assert found["plan"]["algorithm"] and any("evaluation" in line for line in found["warnings"])
    found, printed = answer("train_ppo.py", *inputs, "--check", "reward", "prompts", status=2)
    assert found["error"]["fix"] and found["reward"]["prompts"] > 0 and found["prompts"]["samples"] == 8
    assert found["error"]["what"] in printed
    found, _ = answer("train_ppo.py", *inputs, "--check", "update")
    assert {check["ok"] for check in found["checks"]} == {True}
    found, _ = answer("train_ppo.py", *inputs, "--write-parts", "parts")
    assert sum(found["rows"].values()) > 100


def test_reward_model(answer, start_model, pairs_file):
    flags = ["--pairs", pairs_file, "--base-model", start_model, "--actor-model", "none", "--rm-output", "reward"]
    found, printed = answer("reward_model/train.py", *flags)
    assert found["reward_model"] == "reward" and 0 <= found["accuracy"] <= 1 and len(json.dumps(found)) < 10_000
    assert found["weakness"] is None or found["weakness"] in printed


@pytest.mark.ci
def test_chat(inputs, start_model, tmp_path):
    flags = ["--chat", "--json", "--model-path", str(start_model), "--max-new-tokens", "4"]
    done = run([str(ROOT / "evaluate_generations.py"), *flags], tmp_path, typed="What is a cat?\nAnd a table?\n")
    replies = json.loads(done.stdout)["replies"]
    assert len(replies) == 2 and all(reply in done.stderr for reply in replies)


@pytest.mark.parametrize("script", ["train_ppo.py", "evaluate_generations.py", "rlhf"])
def test_errors(answer, script):
    words = {"train_ppo.py": [], "evaluate_generations.py": [], "rlhf": ["ppo"]}[script]
    found, printed = answer(script, *words, "--temperature", "warm", "--seed", -1, status=2)
    errors = [found["error"], *found["more_errors"]]
    assert list(found) == ["error", "more_errors"] and len(errors) == 2
    assert sorted(error["place"].split()[0] for error in errors) == ["--seed", "--temperature"]
    for error in errors:
        assert error["what"] in printed and set(error) == {"what", "place", "fix", "settings"}


def test_an_error_has_its_settings(answer, inputs):
    found, _ = answer("train_ppo.py", *inputs, "--minibatches", 3, status=2)
    assert found["error"]["settings"] == ["minibatches"] and "--minibatches 3" in found["error"]["place"]


def test_an_error_of_the_system(answer, inputs, tmp_path):
    (tmp_path / "file").touch()
    found, _ = answer("train_ppo.py", *inputs, "--output", "file/run", status=2)
    assert "file" in found["error"]["place"]


def test_values_that_json_does_not_have():
    assert json_ready({"a": [float("nan"), 1.5], "b": {2}}) == {"a": [None, 1.5], "b": [2]}

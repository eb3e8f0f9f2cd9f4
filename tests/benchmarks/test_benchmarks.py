"""Tests the benchmark scripts end to end with tiny models: their numbers and the files that they write."""

from __future__ import annotations

import importlib
import json
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchmarks import operators
from benchmarks.work import Work, make_models
from tests.scripts.test_scripts import ROOT, run
from tests.test_structure import imports_of, module_of

SCRIPTS = ("against_trl", "epoch", "gpu_limits", "memory", "minutes_to_result", "on_gpu", "operators",
           "processes", "real_smollm2", "reference_pipeline", "side_by_side", "stock_sums")  # fmt: skip
TINY = ["--size", "tiny", "--device", "cpu", "--threads", "1"]
SHORT = [*TINY, "--prompt-length", "8", "--ppo-epochs", "2"]


def figures(folder: Path, script: str, *flags: str) -> tuple[dict, str]:
    """Run a benchmark. Return its JSON file and its console output."""
    file = folder / "figures.json"
    done = run([f"benchmarks/{script}.py", *flags, "--write", str(file)], ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text(encoding="utf-8")), done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_printed(script, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{script}").main(["--help"])
    assert ended.value.code == 0 and "--" in capsys.readouterr().out


@pytest.mark.ci
def test_against_trl_reports_equal_work(tmp_path):
    """GRPO. The benchmark of an epoch runs TRL's PPO."""
    batch = ["--algorithm", "grpo", "--dtype", "bfloat16", "--batch-size", "2", "--K", "3"]
    found, printed = figures(tmp_path, "against_trl", *SHORT, *batch, "--reply-length", "6", "--pairs", "1")
    assert found["optimizer_steps"] == {"ours": 4, "stock": 4}, "2 updates (including the warm-up) of 2 epochs"
    tokens = 2 * 3 * 6
    assert found["completion_tokens"] == {"ours": [tokens], "stock": [tokens]}, "every completion has the full length"
    seconds = found["seconds"]
    memory = found["memory"]
    assert seconds["stock"]["whole"] / seconds["ours"]["whole"] == pytest.approx(found["update_ratio"]["median"])
    assert 0 < sum(seconds["ours"][part] for part in ("rollout", "score", "update")) <= seconds["ours"]["whole"]
    assert all(0 < side["above_imports"] < side["peak"] for side in memory.values())
    assert found["memory_ratio"] == pytest.approx(memory["ours"]["peak"] / memory["stock"]["peak"])
    assert set(found["versions"]) >= {"torch", "transformers", "trl", "peft"} and found["machine"]["processor"]
    assert "one update, median" in printed


@pytest.mark.ci
def test_operators_of_the_tiny_model(tmp_path):
    """The limits are two thirds of the counts before the own forward pass (docs/performance.md, "Operators"). The
    optimizer step has 4 more, because the critic has its own parameter groups."""
    work = Work(folder=str(tmp_path), prompt_length=8, reply_length=8, ppo_epochs=2)
    make_models(work)
    counts = operators.summary(operators.count(work))
    assert 100 < counts["decoding step"]["operator"] <= 198 * 2 / 3
    assert 200 < counts["micro-batch"]["operator"] <= 665 * 2 / 3
    assert counts["micro-batch"]["operator"] < counts["optimizer step"]["operator"] <= 695 * 2 / 3 + 4


@pytest.mark.proof
def test_epoch_benchmark_reports_how_much_is_extrapolated(tmp_path):
    sizes = ["--prompts", "100", "--rollout-batch", "8", "--updates", "1", "--reply-length", "6", "--stock"]
    found, printed = figures(tmp_path, "epoch", *SHORT, *sizes)
    assert found["said"] == "measured 1 of 13 updates; the rest is extrapolated" and found["said"] in printed
    assert found["completion_tokens"] == {"ours": 2 * 8 * 6, "stock": 2 * 8 * 6}, "including the warm-up"
    assert found["optimizer_steps"] == {"ours": 2 * 2 * 2, "stock": 2 * 2 * 2}, "updates, epochs, minibatches"
    for side in found["sides"].values():
        seconds = side["seconds_per_update"]["median"]
        assert side["minutes_per_epoch"]["median"] == pytest.approx(13 * seconds / 60)
        assert side["completion_tokens_per_s"] == pytest.approx(8 * 6 / seconds)


def test_benchmarks_import_one_another_in_one_direction():
    imports = {module_of(file): imports_of(file) for file in (ROOT / "benchmarks").glob("*.py")}
    TopologicalSorter(imports).prepare()  # raises CycleError

"""Tests the benchmark scripts end to end with tiny models: their numbers and the files that they write."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import operators, scaling_model
from benchmarks.techniques import TECHNIQUES
from benchmarks.work import Work, make_models
from tests.scripts.test_scripts import ROOT, run

SCRIPTS = ("against_trl", "cost_curve", "demo_checker", "epoch", "gpu_limits", "gpu_plan", "knobs", "memory", "on_gpu",
           "operators", "processes", "real_smollm2", "reference_pipeline", "scan_against_rise", "scan_each_topic",
           "side_by_side", "stock_sums", "techniques")  # fmt: skip
TINY = ["--size", "tiny", "--device", "cpu", "--threads", "1"]
SHORT = [*TINY, "--prompt-length", "8", "--ppo-epochs", "2"]


def figures(folder: Path, script: str, *flags: str) -> tuple[dict, str]:
    """Run a benchmark. Return its JSON file and its console output."""
    file = folder / "figures.json"
    done = run([f"benchmarks/{script}.py", *flags, "--json", str(file)], ROOT)
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
    seconds, memory = found["seconds"], found["memory"]
    assert seconds["stock"]["whole"] / seconds["ours"]["whole"] == pytest.approx(found["update_ratio"]["median"])
    assert 0 < sum(seconds["ours"][part] for part in ("rollout", "score", "update")) <= seconds["ours"]["whole"]
    assert all(0 < side["above_imports"] < side["peak"] for side in memory.values())
    assert found["memory_ratio"] == pytest.approx(memory["ours"]["peak"] / memory["stock"]["peak"])
    assert set(found["versions"]) >= {"torch", "transformers", "trl", "peft"} and found["machine"]["processor"]
    assert "one update, median" in printed


@pytest.mark.ci
def test_cost_curve_writes_json_and_picture(tmp_path):
    flags = ["--algorithm", "grpo", "--K", "2", "--batch-size", "2", "--reply-length", "4", "--repeats", "1",
             "--max-batch", "2", "--max-length", "32", "--picture", str(tmp_path / "curve.png")]  # fmt: skip
    found, _ = figures(tmp_path, "cost_curve", *SHORT, *flags)
    batch, length = found["curves"]["batch"], found["curves"]["length"]
    assert [(p["size"], p["completion_tokens"]) for p in batch] == [(1, 1 * 2 * 4), (2, 2 * 2 * 4)]
    assert [(p["size"], p["completion_tokens"]) for p in length] == [(16, 2 * 2 * 16), (32, 2 * 2 * 32)]
    for points in (batch, length):
        one, other = (p["seconds"] / p["completion_tokens"] for p in points)
        assert points[1]["ratio"] == pytest.approx(other / one)
    assert found["within"] == (max(found["largest_ratio"].values()) <= 1.2)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")


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


@pytest.mark.ci
def test_each_technique_and_its_reference_do_the_same_work(tmp_path):
    """Layers by hand: the reference rollout takes 16 steps for each of 4 batches. Two prompts of 8 tokens
    have 6 completions each, and the last token of a completion is not an input of the model."""
    sizes = ["--batch-size", "4", "--prompt-length", "16", "--reply-length", "16", "--pairs", "1"]
    techniques = figures(tmp_path, "techniques", *TINY, *sizes)[0]["techniques"]
    assert set(techniques) == set(TECHNIQUES) - {"rollout_graph"}, "a CUDA graph needs a GPU"
    for name, result in techniques.items():
        tokens, seconds = result["completion_tokens"], result["seconds"]
        assert tokens["ours"] == tokens["plain"] > 0, name
        assert seconds["plain"] / seconds["ours"] == pytest.approx(result["ratio"]["median"])
    assert techniques["rollout"]["same_tokens"] == techniques["rollout_stopping"]["same_tokens"] == 1.0
    assert techniques["rollout"]["steps"]["plain"] == 4 * 16 > techniques["rollout"]["steps"]["ours"]
    assert techniques["shared_prompt"]["layer_tokens"] == {"ours": 2 * 8 + 12 * 15, "plain": 12 * 8 + 12 * 15}
    assert techniques["packed"]["layer_tokens"]["ours"] < techniques["packed"]["layer_tokens"]["plain"]
    for name in ("fused_head", "fused_head_frozen"):
        assert 0 < techniques[name]["peak_bytes"]["ours"] < techniques[name]["peak_bytes"]["plain"], name


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


def test_estimate_for_several_gpus_is_the_table_in_the_docs():
    """A ring of N GPUs sends 2 (N - 1) messages of 1 / N of the gradients."""
    link = scaling_model.Link("a link", bytes_per_s=10.0, latency_s=0.5)
    assert scaling_model.sum_seconds(40.0, 4, link) == pytest.approx(6 * (10 / 10 + 0.5))
    assert "\n".join(scaling_model.table()) in (ROOT / "docs" / "several_gpus.md").read_text(encoding="utf-8")

"""Tests the benchmark scripts end to end with tiny models: their JSON files and console output."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import operators
from benchmarks.comparison import compare
from benchmarks.cost_curve import doublings
from benchmarks.epoch import completion_tokens, epoch_estimate
from benchmarks.machine import tensor_peak
from benchmarks.techniques import TECHNIQUES, spread
from benchmarks.work import (
    EOS,
    FIRST_LETTER,
    Work,
    letter,
    make_models,
    make_tokenizer,
    prompt_ids,
    prompt_lengths,
    varied,
)
from benchmarks.worker import Worker
from rlhf.utils.errors import RunError
from tests.scripts.test_scripts import ROOT, run

SHORT = ["--size", "tiny", "--device", "cpu", "--threads", "1", "--prompt-length", "8", "--ppo-epochs", "2"]
RUNS = {
    "ppo": ["--algorithm", "ppo", "--dtype", "float32", "--batch-size", "3"],
    "grpo": ["--algorithm", "grpo", "--dtype", "bfloat16", "--batch-size", "2", "--K", "3"],
}
EPISODES = {"ppo": 3, "grpo": 6}


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("grpo", marks=pytest.mark.ci)])
def test_against_trl_reports_equal_work(algorithm, tmp_path):
    file = tmp_path / "figures.json"
    flags = [*SHORT, *RUNS[algorithm], "--reply-length", "6", "--pairs", "1", "--json", str(file)]
    done = run(["benchmarks/against_trl.py", *flags], ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["optimizer_steps"] == {"ours": 4, "stock": 4}, "2 updates (including the warm-up) of 2 epochs"
    tokens = EPISODES[algorithm] * 6
    assert found["completion_tokens"] == {"ours": [tokens], "stock": [tokens]}, "every completion has the full length"
    assert found["update_ratio"]["median"] == found["update_ratio"]["pairs"][0] > 0
    seconds = found["seconds"]
    assert seconds["stock"]["whole"] / seconds["ours"]["whole"] == pytest.approx(found["update_ratio"]["median"])
    assert 0 < sum(seconds["ours"][part] for part in ("rollout", "score", "update")) <= seconds["ours"]["whole"]
    check_memory(found)
    assert set(found["versions"]) >= {"torch", "transformers", "trl", "peft"} and found["python"]
    assert found["machine"]["processor"] and found["machine"]["threads_used"] == 1
    assert found["machine"]["memory_bytes"] > 0 and found["machine"]["cores"] and found["machine"]["card"] is None
    assert 0 <= found["machine"]["busy_before_percent"] <= 100
    assert found["command"] == ["against_trl.py", *flags]
    assert found["settings"]["algorithm"] == algorithm and found["settings"]["reply_length"] == 6
    assert "one update, median" in done.stdout and "optimizer steps" in done.stdout


def check_memory(found: dict) -> None:
    """Checks that peak memory was measured in a separate process for each implementation."""
    memory = found["memory"]
    for side in memory.values():
        assert 0 < side["above_imports"] < side["peak"]
    assert memory["ours"]["peak"] != memory["stock"]["peak"]
    assert found["memory_ratio"] == pytest.approx(memory["ours"]["peak"] / memory["stock"]["peak"])
    above = memory["ours"]["above_imports"] / memory["stock"]["above_imports"]
    assert found["memory_ratio_above_imports"] == pytest.approx(above)


def measured(steps: int, seconds: float) -> dict:
    return {"seconds": seconds, "parts": {"rollout": seconds / 2}, "completion_tokens": 6, "optimizer_steps": steps,
            "memory": {"peak": 4, "above_imports": 2}}  # fmt: skip


def test_median_and_range_of_pairs_match_hand_computed_values():
    facts = {side: {"machine": {"busy_before_percent": 0.0}, "mixed_precision": "no"} for side in ("ours", "stock")}
    pairs = [{"ours": measured(2, ours), "stock": measured(2, stock)} for ours, stock in ((1, 3), (2, 3), (1, 2))]
    found = compare(Work("nowhere"), facts, pairs)
    assert found["update_ratio"] == {"median": 2.0, "lowest": 1.5, "highest": 3.0, "pairs": [3.0, 1.5, 2.0]}
    assert found["seconds"] == {"ours": {"whole": 1, "rollout": 0.5}, "stock": {"whole": 3}}


def test_different_numbers_of_optimizer_steps_are_an_error():
    with pytest.raises(RunError, match="optimizer steps {'ours': 2, 'stock': 3}"):
        compare(Work("nowhere"), {}, [{"ours": measured(2, 1.0), "stock": measured(3, 1.0)}])


def test_error_of_a_stopped_worker_has_its_last_output_lines(tmp_path):
    work_file = Work(str(tmp_path)).write(tmp_path / "work.json")
    with pytest.raises(RunError, match=r"worker stopped \(exit status 1\): neither(.|\n)*KeyError"):  # noqa: SIM117
        with Worker("neither", work_file) as worker:
            worker.go()


def test_prompts_have_the_given_length_and_survive_decoding_and_encoding():
    work, tokenizer = Work("nowhere", prompt_length=5, updates=2, batch_size=3), make_tokenizer(64)
    prompts = prompt_ids(work, 64)
    assert len(prompts) == 6 and {len(ids) for ids in prompts} == {5} and min(map(min, prompts)) > EOS
    texts = ["".join(map(letter, ids)) for ids in prompts]
    assert tokenizer(texts, add_special_tokens=False).input_ids == prompts
    assert tokenizer(texts[0] + texts[1]).input_ids == prompts[0] + prompts[1]
    assert tokenizer.decode([*prompts[0], EOS], skip_special_tokens=True) == texts[0]
    assert ord(letter(3)) == FIRST_LETTER + 3


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        ("against_trl", "--pairs"),
        ("cost_curve", "--max-batch"),
        ("techniques", "--positions"),
        ("epoch", "--rollout-batch"),
    ],
)
def test_help_and_invalid_flags(script, flag):
    with_help = run([f"benchmarks/{script}.py", "--help"], ROOT)
    assert with_help.returncode == 0 and flag in with_help.stdout
    invalid = run([f"benchmarks/{script}.py", flag, "0"], ROOT)
    assert invalid.returncode == 2 and "0 is below 1" in invalid.stderr


# --- the cost of a token ---------------------------------------------------------------------------------------------


def test_doublings_match_hand_computed_values():
    assert doublings(1, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert doublings(16, 40) == [16, 32]
    assert doublings(16, 8) == [16], "at least one point"


@pytest.mark.ci
def test_cost_curve_writes_json_and_picture(tmp_path):
    file, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    flags = [*SHORT, "--algorithm", "grpo", "--K", "2", "--batch-size", "2", "--reply-length", "4", "--repeats", "1"]
    flags += ["--max-batch", "2", "--max-length", "32", "--json", str(file), "--picture", str(picture)]
    done = run(["benchmarks/cost_curve.py", *flags], ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    batch, length = found["curves"]["batch"], found["curves"]["length"]
    assert [(p["size"], p["completion_tokens"]) for p in batch] == [(1, 1 * 2 * 4), (2, 2 * 2 * 4)]
    assert [(p["size"], p["completion_tokens"]) for p in length] == [(16, 2 * 2 * 16), (32, 2 * 2 * 32)]
    for points in (batch, length):
        one, other = (p["seconds"] / p["completion_tokens"] for p in points)
        assert points[0]["ratio"] is None and points[1]["ratio"] == pytest.approx(other / one)
    assert found["largest_ratio"] == {"batch": batch[1]["ratio"], "length": length[1]["ratio"]}
    assert found["limit"] == 1.2 and "ms per completion token" in done.stdout
    assert found["within"] == (max(found["largest_ratio"].values()) <= 1.2)
    assert ("no doubling increases the time per completion token by more than 20%" in done.stdout) == found["within"]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n") and picture.stat().st_size > 10_000


# --- single techniques -----------------------------------------------------------------------------------------------


def test_varied_lengths_have_the_given_mean():
    lengths = varied(19.2, 64, 128, seed=1)
    assert sum(lengths) / 128 == pytest.approx(19.2, abs=0.2)
    assert min(lengths) == 1 and max(lengths) == 64 and len(set(lengths)) > 20
    assert lengths == varied(19.2, 64, 128, seed=1) != varied(19.2, 64, 128, seed=2)
    assert sorted(lengths) == sorted(varied(19.2, 64, 128, seed=2)), "the seed changes only the order"


def test_peak_memory_matches_hand_computed_values():
    def allocate():
        freed = torch.zeros(1000)  # 4,000 bytes
        del freed
        torch.zeros(500) + torch.zeros(500)  # 3 x 2,000 bytes at once

    assert tensor_peak("cpu", allocate)[1] == pytest.approx(6000, abs=200)
    assert spread([3.0, 1.5, 2.0]) == {"median": 2.0, "lowest": 1.5, "highest": 3.0, "pairs": [3.0, 1.5, 2.0]}


@pytest.mark.ci
def test_operators_of_the_tiny_model(tmp_path):
    """The limits are two thirds of the counts before the own forward pass (docs/performance.md, "Operators")."""
    work = Work(folder=str(tmp_path), prompt_length=8, reply_length=8, ppo_epochs=2)
    make_models(work)
    counts = operators.summary(operators.count(work))
    assert 100 < counts["decoding step"]["operator"] <= 198 * 2 / 3
    assert 300 < counts["micro-batch"]["operator"] <= 665 * 2 / 3
    assert counts["micro-batch"]["operator"] < counts["optimizer step"]["operator"] <= 695 * 2 / 3


@pytest.mark.ci
def test_each_technique_and_its_reference_do_the_same_work(tmp_path):
    file = tmp_path / "techniques.json"
    sizes = ["--batch-size", "4", "--prompt-length", "16", "--reply-length", "16"]
    flags = ["--size", "tiny", "--device", "cpu", "--threads", "1", *sizes, "--pairs", "1", "--json", str(file)]
    done = run(["benchmarks/techniques.py", *flags], ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert set(found["techniques"]) == set(TECHNIQUES) - {"rollout_graph"}, "a CUDA graph needs a GPU"
    for name, result in found["techniques"].items():
        tokens, seconds, ratio = result["completion_tokens"], result["seconds"], result["ratio"]
        assert tokens["ours"] == tokens["plain"] > 0, name
        assert seconds["plain"] / seconds["ours"] == pytest.approx(ratio["median"]) and len(ratio["pairs"]) == 1
        assert name in done.stdout
    check_layers(found["techniques"])
    for name in ("fused_head", "fused_head_frozen"):
        memory = found["techniques"][name]["peak_bytes"]
        assert 0 < memory["ours"] < memory["plain"], name
    assert found["machine"]["processor"] and found["versions"]["torch"] and found["command"][0] == "techniques.py"


def check_layers(techniques: dict) -> None:
    """Compares with hand-computed values. The reference rollout takes 16 steps for each of 4 batches. Two prompts of 8
    tokens have 6 completions each, and the last token of a completion is not an input of the model."""
    for name in ("rollout", "rollout_stopping"):
        result = techniques[name]
        assert result["same_tokens"] == 1.0, "both engines sample the same completions"
        assert result["completion_tokens"]["ours"] == pytest.approx(16 * 0.3 * 16, abs=4), (
            "16 completions with a mean length of 0.3 x 16"
        )
    assert techniques["rollout"]["steps"]["plain"] == 4 * 16 > techniques["rollout"]["steps"]["ours"]
    assert techniques["rollout_stopping"]["steps"]["plain"] <= 4 * 16
    assert techniques["shared_prompt"]["layer_tokens"] == {"ours": 2 * 8 + 12 * 15, "plain": 12 * 8 + 12 * 15}
    assert techniques["shared_prompt"]["completion_tokens"]["ours"] == 12 * 16
    packed = techniques["packed"]
    assert (
        packed["layer_tokens"]["plain"] % 4 == 0 and packed["layer_tokens"]["ours"] < packed["layer_tokens"]["plain"]
    )


# --- an epoch --------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_epoch_benchmark_reports_how_much_is_extrapolated(tmp_path):
    file = tmp_path / "epoch.json"
    sizes = ["--prompts", "100", "--rollout-batch", "8", "--updates", "1", "--reply-length", "6", "--stock"]
    done = run(["benchmarks/epoch.py", *SHORT, *sizes, "--json", str(file)], ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["said"] == "measured 1 of 13 updates; the rest is extrapolated" and found["said"] in done.stdout
    assert found["updates"] == {"measured": 1, "of_the_epoch": 13} and found["settings"]["minibatches"] == 2
    assert found["completion_tokens"] == {"ours": 2 * 8 * 6, "stock": 2 * 8 * 6}, "including the warm-up"
    assert found["optimizer_steps"] == {"ours": 2 * 2 * 2, "stock": 2 * 2 * 2}, "updates, epochs, minibatches"
    for side in found["sides"].values():
        seconds = side["seconds_per_update"]["median"]
        assert side["minutes_per_epoch"]["median"] == pytest.approx(13 * seconds / 60)
        assert side["completion_tokens_per_s"] == pytest.approx(8 * 6 / seconds)
        assert 0 < side["memory"]["above_imports"] < side["memory"]["peak"]
    assert set(found["sides"]["ours"]["shares"]) == {"rollout", "score", "update"}
    assert 0 < sum(found["sides"]["ours"]["shares"].values()) <= 1
    assert found["ratio"]["pairs"] and found["machine"]["processor"] and found["versions"]["trl"]


def test_epoch_estimate_matches_hand_computed_values():
    timings = [{"seconds": s, "parts": {"rollout": s / 2, "score": 0.0, "update": s / 4}, "memory": {"peak": 4}}
            for s in (2.0, 4.0, 3.0)]  # fmt: skip
    side = epoch_estimate(timings, tokens=60, whole=100)
    assert side["minutes_per_epoch"] == {
        "median": 5.0,
        "lowest": pytest.approx(10 / 3),
        "highest": pytest.approx(20 / 3),
    }
    assert side["completion_tokens_per_s"] == 20 and side["shares"] == {"rollout": 0.5, "score": 0.0, "update": 0.25}


def test_varied_prompt_lengths_have_the_given_mean_and_maximum():
    work = Work("nowhere", batch_size=64, prompt_length=256, updates=2, varied=True)
    lengths = prompt_lengths(work)
    assert len(lengths) == 128 and max(lengths) == 256 and sum(lengths) / 128 == pytest.approx(128, abs=1)


def test_completion_tokens_of_trl_are_counted_like_ours():
    # 2 prompts of 1 to 8 tokens with 3 completion tokens each. TRL counts all input tokens minus 2 x 8
    work = Work("nowhere", batch_size=2, prompt_length=8, updates=1, varied=True)
    timings = [{"ours": {"completion_tokens": 6}, "stock": {"completion_tokens": sum(prompt_lengths(work)) + 6 - 16}}]
    assert completion_tokens(work, "ours", timings) == completion_tokens(work, "stock", timings) == 6


def test_rollout_batch_must_be_a_multiple_of_the_minibatch_size():
    done = run(["benchmarks/epoch.py", "--rollout-batch", "6"], ROOT)
    assert done.returncode and "not a multiple of the minibatch size 4" in done.stderr

"""The benchmarks end to end, as a user runs them, in the tiny size: what they promise is in their files."""

from __future__ import annotations

import json

import pytest

from benchmarks.comparison import compare
from benchmarks.cost_curve import doublings
from benchmarks.side import Side
from benchmarks.work import EOS, FIRST_LETTER, Work, letter, make_tokenizer, prompt_ids
from rlhf.errors import RunError
from tests.test_scripts import ROOT, run

SHORT = ["--size", "tiny", "--device", "cpu", "--threads", "1", "--prompt-length", "8", "--ppo-epochs", "2"]
RUNS = {
    "ppo": ["--algorithm", "ppo", "--dtype", "float32", "--batch-size", "3"],
    "grpo": ["--algorithm", "grpo", "--dtype", "bfloat16", "--batch-size", "2", "--K", "3"],
}
EPISODES = {"ppo": 3, "grpo": 6}


@pytest.mark.parametrize("algorithm", RUNS)
def test_against_trl_tells_all_it_promises_of_equal_work(algorithm, tmp_path):
    file = tmp_path / "figures.json"
    flags = [*SHORT, *RUNS[algorithm], "--reply-length", "6", "--pairs", "1", "--json", str(file)]
    done = run(["benchmarks/against_trl.py", *flags], ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["optimizer_steps"] == {"ours": 4, "stock": 4}, "2 updates of 2 passes, the warm-up among them"
    tokens = EPISODES[algorithm] * 6
    assert found["reply_tokens"] == {"ours": [tokens], "stock": [tokens]}, "every reply has its full length"
    assert found["update_ratio"]["median"] == found["update_ratio"]["pairs"][0] > 0
    spent = found["seconds"]
    assert spent["stock"]["whole"] / spent["ours"]["whole"] == pytest.approx(found["update_ratio"]["median"])
    assert 0 < sum(spent["ours"][part] for part in ("rollout", "score", "update")) <= spent["ours"]["whole"]
    check_memory(found)
    assert set(found["versions"]) >= {"torch", "transformers", "trl", "peft"} and found["python"]
    assert found["machine"]["processor"] and found["machine"]["threads_used"] == 1
    assert found["machine"]["memory_bytes"] > 0 and found["machine"]["cores"] and found["machine"]["card"] is None
    assert 0 <= found["machine"]["busy_before_percent"] <= 100
    assert found["command"] == ["against_trl.py", *flags]
    assert found["settings"]["algorithm"] == algorithm and found["settings"]["reply_length"] == 6
    assert "an update, median" in done.stdout and "optimizer steps" in done.stdout


def check_memory(found: dict) -> None:
    """A fresh process of each side: more than the imports, and not what a process that measures both would hold."""
    memory = found["memory"]
    for side in memory.values():
        assert 0 < side["above_imports"] < side["peak"]
    assert memory["ours"]["peak"] != memory["stock"]["peak"]
    assert found["memory_ratio"] == pytest.approx(memory["ours"]["peak"] / memory["stock"]["peak"])
    above = memory["ours"]["above_imports"] / memory["stock"]["above_imports"]
    assert found["memory_ratio_above_imports"] == pytest.approx(above)


def told(steps: int, seconds: float) -> dict:
    return {"seconds": seconds, "parts": {"rollout": seconds / 2}, "reply_tokens": 6, "optimizer_steps": steps,
            "memory": {"peak": 4, "above_imports": 2}}  # fmt: skip


def test_the_median_of_pairs_and_their_spread_by_hand():
    facts = {side: {"machine": {"busy_before_percent": 0.0}, "mixed_precision": "no"} for side in ("ours", "stock")}
    pairs = [{"ours": told(2, ours), "stock": told(2, stock)} for ours, stock in ((1, 3), (2, 3), (1, 2))]
    found = compare(Work("nowhere"), facts, pairs)
    assert found["update_ratio"] == {"median": 2.0, "lowest": 1.5, "highest": 3.0, "pairs": [3.0, 1.5, 2.0]}
    assert found["seconds"] == {"ours": {"whole": 1, "rollout": 0.5}, "stock": {"whole": 3}}


def test_unlike_optimizer_steps_are_an_error():
    with pytest.raises(RunError, match="optimizer steps {'ours': 2, 'stock': 3}"):
        compare(Work("nowhere"), {}, [{"ours": told(2, 1.0), "stock": told(3, 1.0)}])


def test_a_side_that_stops_is_told_with_its_last_lines(tmp_path):
    work_file = Work(str(tmp_path)).write(tmp_path / "work.json")
    with pytest.raises(RunError, match=r"it stopped \(exit status 1\): neither(.|\n)*KeyError"):  # noqa: SIM117
        with Side("neither", work_file) as side:
            side.go()


def test_prompts_have_their_length_and_survive_any_rendering():
    work, tokenizer = Work("nowhere", prompt_length=5, updates=2, batch_size=3), make_tokenizer(64)
    prompts = prompt_ids(work, 64)
    assert len(prompts) == 6 and {len(ids) for ids in prompts} == {5} and min(map(min, prompts)) > EOS
    texts = ["".join(map(letter, ids)) for ids in prompts]
    assert tokenizer(texts, add_special_tokens=False).input_ids == prompts
    assert tokenizer(texts[0] + texts[1]).input_ids == prompts[0] + prompts[1]
    assert tokenizer.decode([*prompts[0], EOS], skip_special_tokens=True) == texts[0]
    assert ord(letter(3)) == FIRST_LETTER + 3


@pytest.mark.parametrize(("script", "flag"), [("against_trl", "--pairs"), ("cost_curve", "--max-batch")])
def test_help_and_mistakes_are_answered(script, flag):
    helped = run([f"benchmarks/{script}.py", "--help"], ROOT)
    assert helped.returncode == 0 and flag in helped.stdout
    mistaken = run([f"benchmarks/{script}.py", flag, "0"], ROOT)
    assert mistaken.returncode == 2 and "0 is below 1" in mistaken.stderr


# --- the cost of a token ---------------------------------------------------------------------------------------------


def test_doublings_by_hand():
    assert doublings(1, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert doublings(16, 40) == [16, 32]
    assert doublings(16, 8) == [16], "a point at least"


def test_the_cost_curve_and_its_picture(tmp_path):
    file, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    flags = [*SHORT, "--algorithm", "grpo", "--K", "2", "--batch-size", "2", "--reply-length", "4", "--repeats", "1"]
    flags += ["--max-batch", "2", "--max-length", "32", "--json", str(file), "--picture", str(picture)]
    done = run(["benchmarks/cost_curve.py", *flags], ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    batch, length = found["curves"]["batch"], found["curves"]["length"]
    assert [(p["size"], p["reply_tokens"]) for p in batch] == [(1, 1 * 2 * 4), (2, 2 * 2 * 4)]
    assert [(p["size"], p["reply_tokens"]) for p in length] == [(16, 2 * 2 * 16), (32, 2 * 2 * 32)]
    for points in (batch, length):
        one, other = (p["seconds"] / p["reply_tokens"] for p in points)
        assert points[0]["ratio"] is None and points[1]["ratio"] == pytest.approx(other / one)
    assert found["largest_ratio"] == {"batch": batch[1]["ratio"], "length": length[1]["ratio"]}
    assert found["limit"] == 1.2 and "ms per reply token" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG\r\n") and picture.stat().st_size > 10_000

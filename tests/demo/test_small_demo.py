"""Tests all steps of the demo on a small scale. tests/demo/test_demo.py tests the full demo."""

from __future__ import annotations

import json
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import compare_runs
import evaluate_generations
import plot_training_progress
from rlhf.algorithms.table import ALGORITHMS
from rlhf.analysis.groups import compared_pairs
from rlhf.commands.train import train_command
from rlhf.data.examples import examples_of
from rlhf.data.splits import question_hash
from rlhf.demo import ready
from tests.documents import ROOT, commands
from tests.scripts.test_scripts import run

pytestmark = pytest.mark.ci
FEW = ["--recipe", "demo", "--num-iterations", "2", "--eval-every", "1", "--eval-prompts", "16", "--record-tokens",
       "--allow-weak-reward-model"]  # fmt: skip
RUNS = [f"{algorithm}_training_output" for algorithm in ALGORITHMS]


@pytest.fixture
def small(made_once, monkeypatch) -> Path:
    """Return the folder of the small demo, which becomes the test's working folder."""
    folder = made_once("small_demo", train_all)
    monkeypatch.chdir(folder)
    return folder


def train_all(folder: Path) -> None:
    """Trains PPO first, which makes the demo parts, then the other algorithms. Each run's output goes to a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        use_small_parts(patch)
        for name in ALGORITHMS:
            with Path(f"{name}.txt").open("w", encoding="utf-8") as printed, redirect_stdout(printed):
                train_command(name, FEW)


def use_small_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ready, "QUESTIONS", ready.QUESTIONS // 8)
    patch.setattr(ready, "SAMPLES_PER_QUESTION", ready.SAMPLES_PER_QUESTION // 2)


def finished(name: str) -> dict:
    run = json.loads(Path(name, "run.json").read_text(encoding="utf-8"))
    assert run["status"] == "finished"
    return run


def test_ppo_makes_the_demo_parts_and_trains(small):
    printed = Path("ppo.txt").read_text(encoding="utf-8")
    assert "demo: sampling 3 completions for each of 375 questions" in printed
    record = json.loads(Path("demo_parts", "reward_model", "metrics.json").read_text(encoding="utf-8"))
    assert len(record["by_flaw"]) >= 3 and record["accuracy"] > 0.5
    run = finished(RUNS[0])
    assert run["spent"]["episodes"] == 2 * 64 and run["figures"]["prompts"] == 16
    assert 0 <= run["figures"]["gold_before"] <= 1 and len(run["figures"]["gold_rise_interval"]) == 2


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "ppo"])
def test_other_algorithms_use_the_same_parts_and_episodes(small, algorithm):
    printed = Path(f"{algorithm}.txt").read_text(encoding="utf-8")
    assert "demo parts: cached" in printed
    for words in ("before -> after", "random evaluation", "gold quality", "not used in RL training", "saved:",
                  "next:"):  # fmt: skip
        assert words in printed
    ppo = finished(RUNS[0])
    other = finished(f"{algorithm}_training_output")
    assert ppo["spent"]["episodes"] == other["spent"]["episodes"]
    assert ppo["spent"]["optimizer_steps"] == other["spent"]["optimizer_steps"]


def test_runs_are_evaluated_plotted_and_compared(small):
    evaluate_generations.main(["--model-path", RUNS[0], "--num-prompts", "8"])
    evaluation = json.loads(Path("evaluation_output", "evaluation.json").read_text(encoding="utf-8"))
    assert evaluation["facts"]["judge"] == "gold quality" and len(evaluation["prompts"]) == 8
    evaluate_generations.main(["--tokens", RUNS[0]])
    assert Path("evaluation_output", "tokens.html").is_file()
    plot_training_progress.main(RUNS)
    assert Path("training_progress.png").is_file()
    compare_runs.main([*RUNS, "--num-prompts", "8", "--limit-minutes", "0.02"])
    verdict = json.loads(Path("comparison_output", "comparison.json").read_text(encoding="utf-8"))["verdict"]
    assert "by the judge (gold quality, not used in RL training)" in verdict[0]
    assert len(verdict) == len(compared_pairs(RUNS)) + len(RUNS)  # pairs, and each against the start model
    assert all("by the judge" in sentence for sentence in verdict)


def test_the_output_of_trl_dpo_is_an_arm(small, monkeypatch):
    """The commands of docs/evaluation.md, with one step of DPO."""
    page = [command for command in commands(ROOT / "docs" / "evaluation.md") if "dpo_" in command]
    split, dpo, compare = map(shlex.split, page)
    use_small_parts(monkeypatch)
    assert split[:2] == ["python", "train_ppo.py"]
    train_command("ppo", split[2:])
    rows = list(map(json.loads, Path("dpo_parts", "pairs", "train.jsonl").read_text(encoding="utf-8").splitlines()))
    trained = json.loads(Path("demo_parts", "reward_model", "metrics.json").read_text(encoding="utf-8"))
    questions = {question_hash(example) for example in examples_of([row["prompt"] for row in rows])}
    assert len(rows) > 50 and questions == set(trained["train_questions"])  # those of the demo's reward model
    cpu = [] if torch.cuda.is_available() else ["--use_cpu", "--bf16", "false"]
    done = run(["-c", "from trl.cli import main; main()", *dpo[1:], "--max_steps", "1", *cpu], small)
    assert done.returncode == 0, done.stderr[-3000:]
    assert compare[4:] == ["--arm", "DPO=./dpo_model", "best-of-4"]
    compare_runs.main([RUNS[0], "--arm", "DPO=./dpo_model", "best-of-2", "--num-prompts", "8", "--limit-minutes", "0"])
    report = json.loads(Path("comparison_output", "comparison.json").read_text(encoding="utf-8"))
    (figures,) = report["figures"]["DPO"].values()
    assert list(report["arms"]) == ["PPO", "DPO", "best-of-2"] and figures["kl"] is not None

"""Runs the commands of docs/tutorial.md in order, with one small update per training and few prompts."""

from __future__ import annotations

import importlib
import shlex

import pytest

from rlhf.checkpoints.run_record import RunRecord
from tests.documents import ROOT, commands

pytestmark = pytest.mark.ci
TRAINING = "--num-iterations 1 --batch-size 2 --K 2 --minibatches 1 --eval-prompts 4 --no-bf16 --use-lora"
FEW = {
    "train_grpo": TRAINING,
    "train_rloo": TRAINING,
    "compare_runs": "--num-prompts 2 --completions 2 --limit-minutes 0",
    "evaluate_generations": "--num-prompts 2 --completions 2",
}


def test_the_tutorial_runs_in_order_with_one_update(smollm2, large_folder, monkeypatch):
    monkeypatch.chdir(large_folder)
    (large_folder / "my_questions.jsonl").write_text(
        "".join(f'{{"question": "How much is {a} plus 3?", "answer": "{a + 3}"}}\n' for a in range(40)),
        encoding="utf-8",
    )
    done = []
    for command in commands(ROOT / "docs" / "tutorial.md"):
        program, *words = shlex.split(command)
        if program != "python":  # pip: .ci/run installs the same packages
            continue
        script = words[0].removesuffix(".py")
        few = [] if "--check-reward" in words else FEW[script].split()
        importlib.import_module(script).main([*words[1:], *few])
        done.append(script)
    assert done == ["train_grpo", "train_grpo", "train_rloo", "compare_runs", "evaluate_generations", "train_grpo"]
    for name in ("tutorial_grpo", "tutorial_rloo", "my_run"):
        assert RunRecord.read(large_folder / name).status == "finished"
    assert (large_folder / "tutorial_verdict" / "comparison.json").is_file()

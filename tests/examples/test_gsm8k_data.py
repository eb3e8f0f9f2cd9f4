"""Tests the files of the recipe qwen3-gsm8k, its strict and lenient accuracy, and a short run of the recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import train_grpo
from examples import gsm8k_data
from rlhf.analysis.curves import read_scalars
from rlhf.checkpoints.run_record import RunRecord
from rlhf.rewards.eval_functions import exact_match, last_number

ANSWER = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72 altogether.\n#### 72"
# completion, strict accuracy (exact_match), lenient accuracy (last_number)
COMPLETIONS = [
    ("48 / 2 = 24, and 48 + 24 = 72.\n#### 72", 1, 1),
    ("#### 72\nThe answer is 72.", 1, 1),
    ("#### 72\nWas it 24?", 1, 0),  # the source's "custom_flexible" stops at the mark
    ("48 + 24 = 72. The answer is 72 clips.", 0, 1),
    ("The answer is **72**", 0, 1),
    ("\\boxed{72}", 1, 1),  # exact_match accepts this form, too
    ("72", 1, 1),
    ("#### 24", 0, 0),
    ("First 72, then 24", 0, 0),
    ("", 0, 0),
]


@pytest.mark.parametrize(("completion", "strict", "lenient"), COMPLETIONS)
def test_strict_and_lenient_accuracy_of_a_completion(completion, strict, lenient):
    assert exact_match([completion], [ANSWER]) == [strict]
    assert last_number([completion], [ANSWER]) == [lenient]


def test_an_answer_that_was_cut_off_is_not_right():
    """#### 7 may have become #### 72."""
    assert exact_match(["#### 72"], [ANSWER], [False]) == last_number(["#### 72"], [ANSWER], [False]) == [0]


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """Write the recipe's files from 40 rows each, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for part, first in (("train", 0), ("test", 40)):
        sums = [(f"{i} + 2?", f"<<{i}+2={i + 2}>>\n#### {i + 2}") for i in range(first, first + 40)]
        rows = [{"question": question, "answer": answer} for question, answer in sums]
        Path(f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    gsm8k_data.main(["train.jsonl", "test.jsonl"])
    return tmp_path / "gsm8k_parts"


def test_questions_get_the_instruction(files):
    rows = [json.loads(line) for line in (files / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 40 and rows[0]["answer"] == "<<40+2=42>>\n#### 42"
    assert rows[0]["question"].startswith("40 + 2? ") and rows[0]["question"].endswith('"####".')


def test_the_recipe_runs_with_another_start_model(files, start_model):
    train_grpo.main(
        f"--recipe qwen3-gsm8k --actor-model {start_model} --batch-size 2 --num-iterations 1 --max-new-tokens 8 "
        "--eval-prompts 2 --no-bf16 --output run".split()
    )
    run = RunRecord.read(Path("run"))
    assert (run.status, run.spent.episodes) == ("finished", 6)
    assert {"eval/exact_match", "eval/last_number"} <= read_scalars(Path("run", "logs"))[0].keys()

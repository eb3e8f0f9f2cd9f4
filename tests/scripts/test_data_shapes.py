"""Runs rows shaped like gsm8k, UltraFeedback and Orca pairs through training and evaluation, with flags alone."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from datasets import Dataset

import evaluate_generations
from reward_model import train as train_reward_model
from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.run_record import RunRecord
from tests.documents import python_block

COUNT = 50
WORDS = "cat table river step answer question capital France number sign chat help".split()
MESSAGES_ONLY = """
def talks(prompts, completions, source):
    assert all([m["role"] for m in p] == ["system", "user"] for p in prompts), prompts
    assert all(s == "ultra" for s in source)
    return [None if i % 4 == 0 else float(len(c[0]["content"])) for i, c in enumerate(completions)]
"""


def write_lines(file: Path, rows: list[dict]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def gsm8k(made_once) -> list[str]:
    """Rows with a question, and a solution that ends with `#### 42`; the checker of the page on rewards."""

    def fill(folder: Path) -> None:
        for part, first in (("train", 0), ("test", COUNT)):
            rows = [
                {"question": f"A cat has {i} and 2. How many?", "answer": f"{i}+2=<<{i}+2={i + 2}>>\n#### {i + 2}"}
                for i in range(first, first + COUNT)
            ]
            write_lines(folder / f"{part}.jsonl", rows)
        (folder / "checker.py").write_text(python_block("# checker.py"), encoding="utf-8")

    folder = made_once("shape_gsm8k", fill)
    rules = ["--reward-func", f"{folder}/checker.py:correct", "--eval-func", "exact_match"]
    return [folder / "train.jsonl", folder / "test.jsonl", "--rm-model", "none", *rules]


@pytest.fixture(scope="module")
def ultrafeedback(made_once, reward_folder) -> list[str]:
    """Pairs of whole chats, whose common beginning is the prompt, in a Parquet file."""

    def fill(folder: Path) -> None:
        def chats(i: int) -> dict:
            start = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"What is {WORDS[i % 12]} number {i}?"},
            ]
            good, bad = ({"role": "assistant", "content": f"{WORDS[(i + k) % 12]} " * (k + 1)} for k in (1, 4))
            return {"chosen": [*start, good], "rejected": [*start, bad], "source": "ultra", "score_chosen": 8.0}

        for part, first in (("train", 0), ("test", COUNT)):
            rows = [chats(i) for i in range(first, first + COUNT)]
            Dataset.from_list(rows).to_parquet(folder / f"{part}.parquet")
        (folder / "rules.py").write_text(MESSAGES_ONLY, encoding="utf-8")

    folder = made_once("shape_ultrafeedback", fill)
    model = ["--rm-model", reward_folder, "--allow-weak-reward-model"]
    rules = ["--reward-func", f"{folder}/rules.py:talks"]
    return [folder / "train.parquet", folder / "test.parquet", *model, *rules]


@pytest.fixture(scope="module")
def orca(made_once, start_model) -> list[str]:
    """Pairs with a system message, in a JSON array, and a reward model trained on them."""

    def fill(folder: Path) -> None:
        for part, first in (("train", 0), ("test", COUNT)):
            rows = [
                {"system": "Answer step by step." if i % 3 else "", "question": f"Name {WORDS[i % 12]} {i}.",
                 "chosen": f"help {WORDS[i % 12]}", "rejected": f"sign {WORDS[i % 7]}"}
                for i in range(first, first + COUNT)
            ]  # fmt: skip
            (folder / f"{part}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        words = ["--pairs", folder / "train.json", "--base-model", start_model, "--actor-model", start_model,
                 "--rm-output", folder / "reward_model", "--max-new-tokens", 8,
                 "--calibration-prompts", 8]  # fmt: skip
        train_reward_model.main([str(word) for word in words])

    folder = made_once("shape_orca", fill)
    model = ["--rm-model", folder / "reward_model", "--allow-weak-reward-model"]
    return [folder / "train.json", folder / "test.json", *model]


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("shape", ["gsm8k", "ultrafeedback", "orca"])
def test_rows_of_this_shape_train_and_evaluate(request, start_model, tmp_path, shape, algorithm):
    train, test, *rewards = request.getfixturevalue(shape)
    rewards = [str(word) for word in rewards]
    groups = ["--K", 4] if ALGORITHMS[algorithm].group_size > 1 else []
    words = ["--actor-model", start_model, "--prompts", train, "--output", tmp_path / "run", "--batch-size", 4,
             "--num-iterations", 2, "--max-new-tokens", 8, "--eval-prompts", 4, *rewards, *groups]  # fmt: skip
    importlib.import_module(f"train_{algorithm}").main([str(word) for word in words])
    run = RunRecord.read(tmp_path / "run")
    assert run.status == "finished" and run.spent.updates == 2 and run.prompts["rows"] == COUNT
    code = rewards[rewards.index("--reward-func") :] if "--reward-func" in rewards else []
    words = ["--model-path", tmp_path / "run", "--prompts", test, "--output", tmp_path / "report", *code]
    evaluate_generations.main([str(word) for word in [*words, "--completions", 2]])
    report = json.loads((tmp_path / "report" / "evaluation.json").read_text(encoding="utf-8"))
    assert len(report["prompts"]) == COUNT, "every row of a file given for evaluation is used"
    assert report["start"] and len(report["models"]) == 1
    figures = report["models"][0]["figures"]
    assert all(value == value for value in figures.values() if value is not None), "no figure is NaN"
    if shape == "gsm8k":
        assert "eval/exact_match_after" in run.figures
        assert figures["judge"] is None, "it equals the score on every completion"
        assert any("exact_match" in note for note in report["notes"])
    if shape == "ultrafeedback":  # a quarter of the completions has no score from the function, but all from the model
        assert None not in [c["score"] for side in report["prompts"][0]["sides"] for c in side["completions"]]

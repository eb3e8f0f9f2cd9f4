"""Runs the recipe smollm2-sums from its questions to the end, with one small update."""

from __future__ import annotations

import json

import pytest

import train_grpo
from rlhf.checkpoints.gguf import gguf_record
from rlhf.checkpoints.run_record import RunRecord
from rlhf.run.model_card import CARD_FILE

pytestmark = pytest.mark.ci


def test_the_recipe_trains_the_model_of_the_package(smollm2, large_folder, monkeypatch):
    monkeypatch.chdir(large_folder)  # the questions are written there
    train_grpo.main(
        "--recipe smollm2-sums --num-iterations 1 --batch-size 2 --K 2 --minibatches 1 --eval-prompts 4 --no-bf16 "
        "--use-lora --output run".split()
    )
    run = RunRecord.read(large_folder / "run")
    assert run.status == "finished" and run.spent.episodes == 4
    assert run.data["start_model_gguf"] == gguf_record(smollm2)
    assert run.data["start_model_gguf"]["quantization"] == "Q4_1"
    rows = [json.loads(line) for line in (large_folder / "smollm2_sums_parts" / "eval.jsonl").open(encoding="utf-8")]
    samples = sorted((large_folder / "run" / "samples").glob("*.jsonl"))
    asked = [json.loads(line)["prompt"][-1]["content"] for line in samples[-1].open(encoding="utf-8")]
    assert len(samples) == 2 and asked == [row["question"] for row in rows[:4]]
    assert run.data["start_model_gguf"]["sha256"][:12] in (large_folder / "run" / CARD_FILE).read_text("utf-8")

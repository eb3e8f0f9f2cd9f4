"""Trains a reward model on real weights for two steps, on chats whose prompt is implicit: `chosen` and `rejected` are
lists of messages that differ in the last one. Compares it with the same training written out in plain torch."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, set_seed

from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.training import train_reward_model
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.utils.console import Screen

pytestmark = pytest.mark.ci
CPU = torch.device("cpu")
LEARNING_RATE = 1e-5
SEED = 42
# earlier turns, chosen, rejected
CHATS = (
    (("Can I eat raw beans?",), "No, cook them first.", "Sure, eat them raw."),
    (("Hi!", "Hello! How can I help?", "My plant is dying."), "How often do you water it?", "Buy another one."),
    (("How do I boil an egg?",), "Eight minutes in boiling water.", "Just guess."),
    (("Is it safe to mix cleaners?",), "No, the gas can hurt you.", "Yes, always."),
    (("Tell me a joke.",), "Why did the hen cross the road?", "No."),
    (("I lost my keys.",), "Where did you last see them?", "Too bad."),
    (("What is rust?",), "Iron that reacted with oxygen.", "A colour."),
    (("Do fish sleep?", "Yes, they rest.", "With open eyes?"), "Yes, most have no eyelids.", "Who cares?"),
    (("How far is the moon?",), "About 384,000 km.", "Very far, I think."),
    (("Should I call back?",), "Yes, it may be important.", "Never."),
    (("My back hurts.",), "Stretch, and see a doctor.", "Lift something."),
    (("Name a mammal.",), "A whale.", "A trout."),
)


def write_chats(file: Path) -> list[dict]:
    """Write the rows, and return them."""
    rows = []
    for turns, *answers in CHATS:
        start = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        chosen, rejected = ([*start, {"role": "assistant", "content": answer}] for answer in answers)
        rows.append({"chosen": chosen, "rejected": rejected})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def question_hash(row: dict) -> str:
    """Return the key of a row in metrics.json."""
    question = " ".join(m["content"] for m in row["chosen"] if m["role"] == "user")
    return hashlib.sha256(question.casefold().encode()).hexdigest()[:12]


def margin(model, tokenizer, row: dict) -> Tensor:
    """Return the score of the chosen chat minus that of the rejected one, each in a forward pass without padding."""
    scores = []
    for chat in (row["chosen"], row["rejected"]):
        ids = tokenizer.apply_chat_template(chat, return_dict=False)  # with the line break after EOS, as in TRL
        scores.append(model(torch.tensor([ids])).logits[0, 0])
    return scores[0] - scores[1]


def trained_by_hand(folder: Path, tokenizer, rows: list[dict]):
    """Return a classifier after two steps of AdamW on -log sigmoid(chosen - rejected), averaged over all rows."""
    set_seed(SEED)  # of the new head
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = 0
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(2):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / 2))
        optimizer.zero_grad()
        for row in rows:
            (-logsigmoid(margin(model, tokenizer, row)) / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def test_two_steps_equal_training_by_hand(smollm2, plain_tokenizer, tmp_path, large_folder):
    """After two steps over the training pairs, margins differ from those of training by hand by at most 2% of the
    change. The saved folder gives the reward model's scores in plain transformers."""
    rows = write_chats(tmp_path / "chats.jsonl")
    flags = ["--pairs", tmp_path / "chats.jsonl", "--base-model", smollm2, "--actor-model", "none",
             "--split", "25/50/25", "--rm-output", large_folder / "rm", "--rm-batch-size", 3, "--rm-epochs", 2,
             "--rm-learning-rate", LEARNING_RATE, "--rm-seed", SEED]  # fmt: skip
    folder = train_reward_model(parse_reward_cli([str(word) for word in flags]), Screen(), CPU)
    record = json.loads((folder / "metrics.json").read_text())
    train = [row for row in rows if question_hash(row) in record["train_questions"]]
    assert len(train) == len(record["train_questions"]) == 3, "one batch has all training pairs"

    by_hand = trained_by_hand(smollm2, plain_tokenizer, train)
    set_seed(SEED)
    start = AutoModelForSequenceClassification.from_pretrained(smollm2, num_labels=1, dtype=torch.float32).eval()
    saved = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    start.config.pad_token_id = 0
    with torch.no_grad():
        margins = {name: torch.stack([margin(model, plain_tokenizer, row) for row in train])
                   for name, model in (("start", start), ("hand", by_hand), ("saved", saved))}  # fmt: skip
    change = (margins["hand"] - margins["start"]).abs()
    assert bool(((margins["saved"] - margins["hand"]).abs() < 0.02 * change).all()), margins
    assert float(change.min()) > 0.05, "two steps must change the margins"
    loaded = RewardModel.load(str(folder), CPU, None)
    row = train[0]
    scores = loaded.score(
        [row["chosen"][:-1]] * 2, [row[s][-1]["content"] for s in ("chosen", "rejected")], [True] * 2
    )
    scale = record["calibration"]["scale"]["std"]
    assert scores[0] - scores[1] == pytest.approx(float(margins["saved"][0]) / scale, rel=1e-3)

"""Tests the questions of smollm2-sums: right answers, and evaluation questions with other numbers and sentences."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from rlhf.data.examples import load_examples
from rlhf.demo import parts, ready
from rlhf.demo.sums_questions import HOLDERS, NAMES, THINGS, TOPICS, questions
from rlhf.utils.console import Screen

SIGNS = {" plus ": "+", " minus ": "-", " times ": "*"}
BY_KIND = {
    **dict.fromkeys(("add", "get more"), sum),
    **dict.fromkeys(("subtract", "give away"), lambda numbers: max(numbers) - min(numbers)),
    **dict.fromkeys(("multiply", "groups of", "price"), math.prod),
}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, str]]]:
    """The rows of the two files, as they are written: "train" and "evaluation"."""
    files = parts.question_files("smollm2-sums")
    return {part: files[name] for part, name in ready.SUMS_FILES.items()}


def numbers_of(row: dict[str, str]) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", row["question"]))


def pattern_of(row: dict[str, str]) -> str:
    """Return a question without its numbers, names and things, with a sign for the three operations."""
    text = re.sub(r"\d+", "N", row["question"].lower())
    things = "|".join([*THINGS, *HOLDERS])
    text = re.sub(rf"\b({'|'.join(NAMES).lower()})\b", "X", text)
    return re.sub(rf"\b({things})(e?s)?\b", "T", text)


def test_counts_and_topics(rows):
    assert len(rows["evaluation"]) == 264 and 1200 <= len(rows["train"]) <= 2500
    for part in rows.values():
        assert {row["topic"] for row in part} == set(TOPICS)
        assert set(map(frozenset, part)) == {frozenset(("question", "answer", "topic"))}


def test_no_question_occurs_twice(rows):
    every = [row["question"] for part in rows.values() for row in part]
    assert len({text.casefold() for text in every}) == len(every)


def test_the_answers_are_right_by_the_two_numbers_of_the_text(rows):
    for row in (*rows["train"], *rows["evaluation"]):
        numbers = numbers_of(row)
        assert len(numbers) == 2, row
        assert int(row["answer"]) == BY_KIND[row["topic"].rpartition(" ")[0]](numbers) > 0, row


def test_the_answers_of_plain_sums_are_right_by_evaluating_their_text(rows):
    evaluated = 0
    for row in (*rows["train"], *rows["evaluation"]):
        text = row["question"]
        for word, sign in SIGNS.items():
            text = text.replace(word, sign)
        if found := re.search(r"\d+ ?[-+*] ?\d+", text):
            assert eval(found[0]) == int(row["answer"]), row
            evaluated += 1
    assert evaluated > 300


def test_evaluation_shares_no_pair_of_numbers_with_training(rows):
    pairs = {part: {frozenset(numbers_of(row)) for row in found} for part, found in rows.items()}
    assert len(pairs["evaluation"]) >= 50 and not pairs["train"] & pairs["evaluation"]


def test_three_topics_share_no_sentence_pattern_with_training(rows):
    trained = {pattern_of(row) for row in rows["train"]}
    known: dict[str, set[bool]] = {}
    for row in rows["evaluation"]:
        known.setdefault(row["topic"], set()).add(pattern_of(row) in trained)
    new = {topic for topic, found in known.items() if found == {False}}
    assert new == {"give away small", "groups of small", "groups of large"}
    assert all(
        found == {True} for topic, found in known.items() if topic not in new
    )  # so the comparison can find them


def test_numbers_are_as_large_as_the_topic_says(rows):
    for row in (*rows["train"], *rows["evaluation"]):
        assert max(numbers_of(row)) <= 25, row
        if row["topic"] in ("multiply small", "multiply large"):
            assert max(numbers_of(row)) <= 10


def test_questions_depend_on_the_seed_alone():
    assert questions("train", 5, 1) == questions("train", 5, 1) != questions("train", 5, 2)
    with pytest.raises(ValueError, match="fewer than 450"):
        questions("evaluation", 450, 1)


def test_parts_are_written_once_and_again_after_a_change(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ready, "SUMS_PER_TOPIC", {"train": 3, "evaluation": 2})
    assert not ready.is_ready("smollm2-sums")
    parts.prepare_parts("smollm2-sums", Screen(), torch.device("cpu"))
    folder = Path(ready.SUMS_FOLDER)
    assert sorted(file.name for file in folder.iterdir() if file.name != ".lock") == [
        "eval.jsonl", "stamp.json", "train.jsonl"
    ]  # fmt: skip
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 33 and len(load_examples(str(folder / "eval.jsonl"))) == 22
    written = (folder / "train.jsonl").stat().st_mtime_ns
    parts.prepare_parts("smollm2-sums", Screen(), torch.device("cpu"))
    assert (folder / "train.jsonl").stat().st_mtime_ns == written
    (folder / "eval.jsonl").write_text("")
    parts.prepare_parts("smollm2-sums", Screen(), torch.device("cpu"))
    assert len(load_examples(str(folder / "eval.jsonl"))) == 22 and ready.is_ready("smollm2-sums")
    monkeypatch.setattr(ready, "SUMS_PER_TOPIC", {"train": 4, "evaluation": 2})
    assert not ready.is_ready("smollm2-sums")
    assert capsys.readouterr().out.count("smollm2-sums: wrote") == 2


@pytest.mark.parametrize("text", ["", '{"accuracy": 0.', "null"])
def test_parts_with_a_damaged_record_are_not_complete(tmp_path, text):
    made = ready.DemoParts("demo", tmp_path, ("metrics.json",), (), ())
    (tmp_path / ready.STAMP_FILE).write_text(json.dumps(made.stamp()))
    (tmp_path / "metrics.json").write_text('{"accuracy": 0.9}')
    assert made.are_complete()
    (tmp_path / "metrics.json").write_text(text)
    assert not made.are_complete()

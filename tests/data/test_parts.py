"""Tests of --write-parts: the files, what training reads of the same data, and the errors."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import train_grpo
import train_ppo
from rlhf.config import parse_cli
from rlhf.data.chat_template import encode_prompt, encode_whole
from rlhf.data.examples import answer_of, load_examples, worked_examples
from rlhf.data.parts import write_parts
from rlhf.data.prompts import load_prompts
from rlhf.data.splits import part_of, question_hash
from rlhf.data.tokenizer import load_tokenizer
from rlhf.settings.training import DataSettings
from rlhf.settings.types import Renaming, Split
from rlhf.utils.errors import UserError

NAMES = ["sft/train.jsonl", "pairs/train.jsonl", "rl/train.jsonl", "evaluation/test.jsonl"]
CHAT = [{"role": "user", "content": "a?"}]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def parts_in(folder: Path) -> dict[str, list[dict]]:
    """Return the rows of all files in a folder of parts."""
    files = sorted(folder.rglob("*.jsonl"), key=lambda file: NAMES.index(file.relative_to(folder).as_posix()))
    return {file.parent.name: list(map(json.loads, file.read_text("utf-8").splitlines())) for file in files}


def written(tmp_path: Path, prompts: str, **settings) -> tuple[dict[str, list[dict]], list[str]]:
    """Return the parts of a file, and what was printed."""
    said = []
    write_parts(DataSettings(prompts, **settings), str(tmp_path / "parts"), said.append)
    return parts_in(tmp_path / "parts"), said


def questions_of(rows: list[dict]) -> set[str]:
    return {m["content"] for row in rows for m in row["prompt"] if m["role"] == "user"}


@pytest.fixture
def repeated_pairs(tmp_path) -> str:
    """Return a file of pairs in which each question has several pairs, with different spellings and columns."""
    rows = []
    for i in range(120):
        question = f"what  is {i // 4}?" if i % 4 == 1 else f"What is {i // 4}?"
        system = "Be brief." if i % 4 == 0 else ""
        chosen = f"It is {i // 4}."
        rows.append({"system": system, "question": question, "chosen": chosen, "rejected": f"No {i}", "level": i})
    return write(tmp_path / "pairs.jsonl", rows)


@pytest.mark.parametrize("split", [None, "30/60/10", "60/30/10"])
def test_training_uses_exactly_the_rows_of_the_parts(tmp_path, repeated_pairs, start_model, split):
    """The run's prompts are those in rl and evaluation, with all columns; the reward model's pairs those in pairs."""
    words = ["--prompts", repeated_pairs, *(["--split", split] if split else [])]
    data = parse_cli(words).data
    parts, said = written(tmp_path, repeated_pairs, split=data.split)
    used = load_prompts(data, load_tokenizer(str(start_model)))
    assert parts["rl"] == [p.example.columns for p in used.train]
    assert parts["evaluation"] == [p.example.columns for p in used.evaluation]
    reward = [e for e in load_examples(repeated_pairs) if part_of(e, used.split) == "reward"]
    assert [row["chosen"][0]["content"] for row in parts["pairs"]] == [e.chosen for e in reward]
    assert [tuple(row["prompt"]) for row in parts["pairs"]] == [e.messages for e in reward]
    assert f"--split {used.split}" in said[-1]
    for name, prompts in (("rl", used.train), ("evaluation", used.evaluation)):  # read again, they are the same rows
        read = load_examples(str(tmp_path / "parts" / name))
        assert [e.messages for e in read] == [p.example.messages for p in prompts]


def test_no_question_is_in_two_parts(tmp_path, repeated_pairs):
    """In any spelling."""
    parts, _ = written(tmp_path, repeated_pairs)
    hashes = [{question_hash(e) for e in load_examples(str(tmp_path / "parts" / name))} for name in parts]
    sft, pairs, rl, evaluation = hashes
    assert list(parts) == ["sft", "pairs", "rl", "evaluation"] and sft == pairs
    assert not sft & rl and not sft & evaluation and not rl & evaluation and len(sft | rl | evaluation) == 30


def test_supervised_texts_are_distinct_chosen_completions(tmp_path, repeated_pairs):
    parts, _ = written(tmp_path, repeated_pairs)
    texts = [json.dumps(row) for row in parts["sft"]]
    chosen = {(str(row["prompt"]), row["chosen"][0]["content"]) for row in parts["pairs"]}
    assert len(texts) == len(set(texts)) < len(parts["pairs"])
    assert {(str(row["prompt"]), row["completion"][0]["content"]) for row in parts["sft"]} == chosen
    assert {row["prompt"][0]["content"] for row in parts["sft"] if len(row["prompt"]) == 2} == {"Be brief."}


ANSWERS = {
    "answer": {"prompt": "a?", "answer": "yes"},
    "number": {"prompt": "a?", "answer": 4},
    "completion": {"prompt": "a?", "completion": "yes", "answer": 4},
    "conversational": {"prompt": CHAT, "completion": [{"role": "assistant", "content": "yes"}]},
    "one message": {"prompt": CHAT, "completion": {"role": "assistant", "content": "yes"}},
    "messages": {"messages": [*CHAT, {"role": "assistant", "content": "yes"}]},
    "as text": {"messages": json.dumps([*CHAT, {"role": "assistant", "content": "yes"}]), "answer": "no"},
    "ShareGPT": {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "yes"}]},
    "pair": {"prompt": "a?", "chosen": "yes", "rejected": "no", "answer": "other"},
    "implicit": {"chosen": [*CHAT, {"role": "assistant", "content": "yes"}],
                 "rejected": [*CHAT, {"role": "assistant", "content": "no"}]},
    "none": {"prompt": "a?", "answer": None},
    "only a prompt": {"messages": CHAT},
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_the_answer_of_a_row(tmp_path, case):
    """In every format. Worked examples (--few-shot) are read in the same way."""
    file = write(tmp_path / "row.jsonl", [ANSWERS[case]])
    (example,) = load_examples(file)
    expected = {"number": "4", "none": None, "only a prompt": None}.get(case, "yes")
    assert answer_of(example) == expected and example.messages == tuple(CHAT)
    if expected is not None:
        assert worked_examples(file) == [*CHAT, {"role": "assistant", "content": expected}]


def test_a_completion_of_two_messages_is_refused(tmp_path, user_error):
    two = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "no"}]
    (example,) = load_examples(write(tmp_path / "row.jsonl", [{"prompt": CHAT, "completion": two}]))
    with user_error("row.jsonl:1"):
        answer_of(example)


@pytest.mark.parametrize("kind", ["csv", "parquet", "json", "folder"])
def test_questions_in_other_files(tmp_path, kind):
    """With renamed columns, which have their new names in the parts."""
    table = pd.DataFrame({"problem": [f"{i} + 1?" for i in range(60)], "solution": [str(i + 1) for i in range(60)]})
    file = tmp_path / ("data/train.csv" if kind == "folder" else f"data.{kind}")
    file.parent.mkdir(exist_ok=True)
    if kind == "parquet":
        table.to_parquet(file)
    elif kind == "json":
        table.to_json(file, orient="records")
    else:
        table.to_csv(file, index=False)
    columns = (Renaming.parse("prompt=problem"), Renaming.parse("answer=solution"))
    source = str(tmp_path / "data") if kind == "folder" else str(file)
    parts, said = written(tmp_path, source, columns=columns, split=Split(30, 60, 10))
    assert list(parts) == ["sft", "rl", "evaluation"] and sum(map(len, parts.values())) == 60
    for row in parts["sft"]:
        assert row["completion"][0]["content"] == str(int(row["prompt"][0]["content"].split()[0]) + 1)
    assert all(set(row) == {"prompt", "answer"} for name in ("rl", "evaluation") for row in parts[name])
    assert len(said) == len(parts) + 1


def test_values_of_tables_are_written(tmp_path):
    """Dates as texts, numbers that are not finite as null, and every column that any row has."""
    days = pd.to_datetime(["2026-01-01"] * 60)
    table = pd.DataFrame({"prompt": [f"{i}?" for i in range(60)], "answer": "a", "level": 0.5, "day": days})
    table.loc[:58, "level"] = float("nan")
    table.to_parquet(tmp_path / "data.parquet")
    parts, _ = written(tmp_path, str(tmp_path / "data.parquet"), split=Split(30, 60, 10))
    rows = [*parts["rl"], *parts["evaluation"]]
    assert {row["day"] for row in rows} == {"2026-01-01 00:00:00"} and {row["level"] for row in rows} <= {None, 0.5}


def test_plain_prompts_are_texts(tmp_path, repeated_pairs):
    parts, _ = written(tmp_path, repeated_pairs, plain_prompts=True)
    first = next(row for row in parts["pairs"] if row["prompt"].startswith("Be brief."))
    assert first["prompt"].split("\n\n")[1].lower().startswith("what") and isinstance(first["rejected"], str)
    assert all(isinstance(row["completion"], str) for row in parts["sft"])


def test_a_separate_evaluation_is_its_part_and_its_questions_in_sft_are_counted(tmp_path, repeated_pairs):
    held_out = write(tmp_path / "test.jsonl", [{"prompt": "What is 0?"}, {"prompt": "new?"}, {"prompt": "What is 2?"}])
    data = {"eval_dataset": held_out, "split": Split(90, 9, 1)}
    parts, said = written(tmp_path, repeated_pairs, **data)
    assert [row["prompt"] for row in parts["evaluation"]] == ["What is 0?", "new?", "What is 2?"]
    known = questions_of(parts["sft"]) & {"What is 0?", "What is 2?"}
    (warning,) = [line for line in said if line.startswith("warning: ")]
    assert warning.startswith(f"warning: {len(known)} evaluation prompts") and known


def test_topics_make_prompts_distinct(tmp_path):
    rows = [{"prompt": f"{i // 2}?", "answer": "a", "topic": f"topic {i % 2}"} for i in range(120)]
    file = write(tmp_path / "rows.jsonl", rows)
    data = DataSettings(file, split=Split(30, 60, 10))
    for steps, folder in ((None, "one"), (2, "two")):
        write_parts(DataSettings(file, split=data.split, steps_per_topic=steps), str(tmp_path / folder), print)
    one, two = (parts_in(tmp_path / folder) for folder in ("one", "two"))
    assert 2 * len(one["rl"]) == len(two["rl"]) and one["sft"] == two["sft"]


def test_rows_without_an_answer_are_counted(tmp_path):
    rows = [{"prompt": f"{i}?", "answer": None if i % 2 else "a"} for i in range(60)]
    parts, said = written(tmp_path, write(tmp_path / "rows.jsonl", rows), split=Split(30, 60, 10))
    (note,) = [line for line in said if line.startswith("note: ")]
    everything = 60 - len(parts["rl"]) - len(parts["evaluation"])
    assert note.startswith(f"note: {everything - len(parts['sft'])} of {everything} rows ")


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["a file", "a folder with a file"])
def test_a_folder_with_files_is_refused(tmp_path, repeated_pairs, content, user_error):
    output = tmp_path / "parts"
    (output if content == "a file" else output / "old").parent.mkdir(exist_ok=True)
    (output if content == "a file" else output / "old").write_text("mine")
    with user_error("--write-parts", str(output)):
        write_parts(DataSettings(repeated_pairs), str(output), print)
    assert (output if content == "a file" else output / "old").read_text() == "mine"


def test_an_empty_folder_is_used(tmp_path, repeated_pairs):
    (tmp_path / "parts").mkdir()
    assert len(written(tmp_path, repeated_pairs)[0]) == 4


@pytest.mark.parametrize(
    "rows, split, words",
    [
        ([{"prompt": f"{i}?", "answer": "a"} for i in range(60)], None, ("split 0/90/10", "--split", "30/60/10")),
        ([{"prompt": f"{i}?"} for i in range(60)], Split(30, 60, 10), ("rows in this part", "--columns answer=NAME")),
        ([{"prompt": f"{i}?", "answer": "a"} for i in range(60)], Split(30, 0, 70), ("--split",)),
        ([{"prompt": f"{i}?", "answer": "a"} for i in range(60)], Split(30, 70, 0), ("--split",)),
    ],
    ids=["no supervised rows", "no answers", "no prompts", "no evaluation"],
)
def test_a_part_without_rows_is_one_line(tmp_path, rows, split, words, user_error):
    file = write(tmp_path / "rows.jsonl", rows)
    with user_error(file, *words) as refused:
        written(tmp_path, file, split=split)
    assert len(refused.value.problems) == 1 and not (tmp_path / "parts").exists()


def test_the_fix_for_questions_works(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "answer": "a"} for i in range(60)])
    with pytest.raises(UserError) as refused:
        written(tmp_path, file)
    split = refused.value.problems[0].fix.split()[-1]
    assert list(written(tmp_path, file, split=Split.parse(split))[0]) == ["sft", "rl", "evaluation"]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_needs_no_model(tmp_path, repeated_pairs, capsys, monkeypatch):
    """Neither a start model nor a reward model: the parts are there to train them."""
    monkeypatch.chdir(tmp_path)
    missing = ["--actor-model", "./none", "--rm-model", "./none"]
    train_ppo.main(["--prompts", repeated_pairs, *missing, "--write-parts", "parts"])
    assert "parts" in capsys.readouterr().out and sorted(p.name for p in tmp_path.iterdir()) == [
        "pairs.jsonl",
        "parts",
    ]


def test_the_parts_of_a_demo_are_built_by_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_grpo.main(["--recipe", "demo", "--write-parts", "parts"])
    assert "not built yet" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", ["--dry-run", "--check", "--resume"])
def test_it_excludes_other_commands_that_stop(other, user_error):
    with user_error("--write-parts", other):
        parse_cli(["--write-parts", "parts", other])


@pytest.mark.ci
def test_trl_trains_on_the_tokens_that_this_project_uses(tmp_path, start_model):
    """The ids of a supervised text are those of the prompt in a run, then the completion's, which give the loss."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": f"What is {i}?", "system": "Be kind." if i % 2 else "", "answer": "a cat"} for i in range(60)]
    written(tmp_path, write(tmp_path / "rows.jsonl", rows), split=Split(30, 60, 10))
    data = load_dataset(str(tmp_path / "parts" / "sft"), cache_dir=str(tmp_path / "cache"))["train"]
    config = SFTConfig(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none")
    trainer = SFTTrainer(str(start_model), config, train_dataset=data)
    tokenizer = load_tokenizer(str(start_model))
    for row, made in zip(data, trainer.train_dataset, strict=True):
        prompt = encode_prompt(tokenizer, row["prompt"])
        whole = encode_whole(tokenizer, row["prompt"], row["completion"][0]["content"])
        assert made["input_ids"] == whole and made["input_ids"][: len(prompt)] == prompt
        assert made["labels"] == [-100] * len(prompt) + whole[len(prompt) :]

"""Tests row formats: TRL's, chats and ShareGPT, and what is refused because it would lose a message."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
from datasets import Dataset

from rlhf.data.examples import examples_of, load_examples, worked_examples
from rlhf.data.messages import chat_in
from rlhf.data.row import Example
from rlhf.data.source import DataSource
from rlhf.data.splits import split_examples
from rlhf.settings.types import Renaming, Split


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def shared(*turns: str) -> list[dict[str, str]]:
    """ShareGPT messages: the human and the model in turns."""
    return [{"from": ("human", "gpt")[i % 2], "value": turn} for i, turn in enumerate(turns)]


ASK = message("user", "Is it?")
YES = message("assistant", "Yes.")
NO = message("assistant", "No.")
BRIEF = message("system", "Be brief.")
MORE = message("user", "Why?")
GPT_YES = {"from": "gpt", "value": "Yes."}
GPT_NO = {"from": "gpt", "value": "No."}
PROMPT = [ASK]

# row -> prompt, chosen and rejected, conversational
FORMATS = {
    "prompt-only": ({"prompt": "Is it?"}, PROMPT, None, False),
    "prompt-only, conversational": ({"prompt": [BRIEF, ASK]}, [BRIEF, ASK], None, True),
    "prompt-completion": ({"prompt": "Is it?", "completion": "Yes."}, PROMPT, None, False),
    "prompt-completion, conversational": ({"prompt": [ASK], "completion": [YES]}, PROMPT, None, True),
    "explicit preference": ({"prompt": "Is it?", "chosen": "Yes.", "rejected": "No."}, PROMPT, "Yes.No.", False),
    "explicit preference, conversational": (
        {"prompt": [ASK, YES, MORE], "chosen": [YES], "rejected": [NO]}, [ASK, YES, MORE], "Yes.No.", True),
    "explicit preference that repeats the prompt": (
        {"prompt": [BRIEF, ASK], "chosen": [BRIEF, ASK, YES], "rejected": [ASK, NO]}, [BRIEF, ASK], "Yes.No.", True),
    "implicit preference": (
        {"chosen": "Is it? Yes.", "rejected": "Is it? No."}, PROMPT, " Yes. No.", False),
    "implicit preference, conversational": (
        {"chosen": [BRIEF, ASK, YES], "rejected": [BRIEF, ASK, NO]}, [BRIEF, ASK], "Yes.No.", True),
    "implicit preference, several turns": (
        {"chosen": [ASK, YES, MORE, NO], "rejected": [ASK, YES, MORE, YES]}, [ASK, YES, MORE], "No.Yes.", True),
    "UltraFeedback": (
        {"prompt": "Is it?", "prompt_id": "1", "chosen": [ASK, YES], "rejected": [ASK, NO],
         "messages": [ASK, YES], "score_chosen": 8.0}, PROMPT, "Yes.No.", False),
    "UltraChat": ({"prompt": "Is it?", "messages": [ASK, YES, MORE, NO]}, PROMPT, None, False),
    "a prompt made of the question": ({"question": "Is", "prompt": "Is it?"}, PROMPT, None, False),
    "a prompt made of the messages": ({"messages": [ASK, YES], "prompt": [BRIEF, ASK]}, [BRIEF, ASK], None, True),
    "a question next to a null prompt": ({"question": "Is it?", "prompt": None}, PROMPT, None, False),
    "messages that are the chosen chat": (
        {"messages": [ASK, YES], "chosen": [ASK, YES], "rejected": [ASK, NO]}, PROMPT, "Yes.No.", True),
    "a tuple of messages": ({"prompt": (BRIEF, ASK)}, [BRIEF, ASK], None, True),
    "parts of text": ({"prompt": [message("user", [{"type": "text", "text": t} for t in ("Is ", "it?")])]}, PROMPT,
                      None, True),
    "an empty system message": ({"conversations": [{"from": "system", "value": ""}, *shared("Is it?")]}, PROMPT,
                                None, True),
    "UltraFeedback without messages": (
        {"prompt": "Is it?", "chosen": [BRIEF, ASK, YES], "rejected": [BRIEF, ASK, NO]}, [BRIEF, ASK], "Yes.No.",
        False),
    "text and one message each": ({"prompt": "Is it?", "chosen": [YES], "rejected": [NO]}, PROMPT, "Yes.No.", False),
    "orca": ({"system": "Be brief.", "question": "Is it?", "chosen": "Yes.", "rejected": "No."}, [BRIEF, ASK],
             "Yes.No.", False),
    "messages": ({"messages": [BRIEF, ASK, YES]}, [BRIEF, ASK], None, True),
    "messages and a system column": ({"messages": [ASK, YES], "system": "Be brief."}, [BRIEF, ASK], None, True),
    "ShareGPT": ({"conversations": shared("Is it?", "Yes.", "Why?", "Because.")}, [ASK, YES, MORE], None, True),
    "ShareGPT with a system text": ({"conversations": shared("Is it?", "Yes."), "system": "Be brief."}, [BRIEF, ASK],
                                    None, True),
    "ShareGPT with other names": (
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Is it?"},
                           {"from": "observation", "value": "7"}]}, [BRIEF, ASK, message("tool", "7")], None, True),
    "ShareGPT preference": ({"conversations": shared("Is it?"), "chosen": GPT_YES, "rejected": GPT_NO},
                            PROMPT, "Yes.No.", True),
    "conversations of roles": ({"conversations": [ASK, YES]}, PROMPT, None, True),
    "null in unused columns": ({"prompt": "Is it?", "messages": None, "tools": None, "images": []}, PROMPT, None,
                               False),
    "empty columns as text": ({"prompt": "Is it?", "tools": "[]", "images": "null"}, PROMPT, None, False),
    "ShareGPT in a table with both forms": (
        {"messages": [{**m, "role": None, "content": None} for m in
                      ({"from": "system", "value": " "}, *shared("Is it?", "Yes."))]}, PROMPT, None, True),
    "roles in a table with both forms": (
        {"messages": [{**m, "from": None, "value": None} for m in (message("system", ""), ASK, YES)]}, PROMPT, None,
        True),
    "a pair in a table with both forms": (
        {"prompt": "Is it?", "chosen": [{**GPT_YES, "role": None, "content": None}], "rejected": [NO]}, PROMPT,
        "Yes.No.", False),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMATS)
def test_every_format_is_read(tmp_path, case):
    row, prompt, completions, conversational = FORMATS[case]
    (tmp_path / "a.json").write_text(json.dumps([row]))
    for example in (*load_examples(str(tmp_path / "a.json")), *examples_of([row])):
        assert list(example.messages) == prompt
        assert (example.chosen is None) == (completions is None)
        assert completions is None or example.chosen + example.rejected == completions
        assert example.conversational == conversational
        assert example.columns in (row, json.loads(json.dumps(row))), "reward functions receive all columns"


LONG = message("user", "It's {a} {b}, isn't \"it\"?\nOr is it [{'role': 'user'}] {'x': 1} {'y': 2}, null, None?" * 3)
CHAT_TEXTS = {
    "JSON": json.dumps([BRIEF, ASK, YES, LONG]),
    "JSON with a null": json.dumps([BRIEF, ASK, YES, {**LONG, "name": None}], indent=2),
    "Python": f" {[BRIEF, ASK, YES, LONG]}\n",
    "numpy": str(np.array([BRIEF, ASK, YES, LONG], object)),
    "ShareGPT": json.dumps([{"from": "system", "value": "Be brief."}, *shared("Is it?", "Yes.", LONG["content"])]),
}
ORDINARY = [
    *("Is it?", "[", "[{", "[]", "[{}]", "[1, {", '[{"from": "Rome", "to": "Paris"}]', '[{"role": "user"}, 3]'),
    *("Sort this: " + CHAT_TEXTS["JSON"], CHAT_TEXTS["JSON"] + " What is that?", "[{" * 2_000, "[{" + "-" * 9_000),
    *("[{'role': open('/etc/passwd'), 'content': 1}]", "[{'role': 'user', 'content': 'a'}, *b]", "[{[]: 1}]"),
]


@pytest.mark.parametrize("case", CHAT_TEXTS)
def test_a_chat_as_text_is_found_and_the_advice_works(case, tmp_path):
    """It is read in a chat's column. In another column it is a text, and the warning has the flag that cures this."""
    text = CHAT_TEXTS[case]
    expected = (BRIEF, ASK, YES, LONG)
    rows = [{"prompt": "Is it?"}, {"prompt": text}, {"prompt": text}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    source = DataSource(str(tmp_path / "rows.json"))
    said = []
    assert [e.messages for e in load_examples(source, say=said.append)[1:]] == [(message("user", text),)] * 2
    (line,) = [line for line in said if "'prompt'" in line]
    assert line.startswith("warning: 2 of 3 rows ") and "rows.json row 1" in line
    advice = re.search(r"--columns (\S+)", line)[1]
    (tmp_path / "rows.json").write_text(json.dumps(rows[1:]))
    renamed = replace(source, columns=(Renaming(advice),))
    said = []
    (first, _) = load_examples(renamed, say=said.append)
    assert first.messages == expected and first.conversational
    assert not any("chat as text" in line for line in said)
    (tmp_path / "rows.json").write_text(json.dumps([{"conversations": text, "chosen": "Yes.", "rejected": "No."}]))
    assert load_examples(source, pairs=True)[0].messages == expected


@pytest.mark.parametrize("text", ORDINARY)
def test_other_texts_are_no_chats(text):
    said = []
    (example,) = examples_of([text], say=said.append)
    assert example.messages == (message("user", text),) and said == []


def test_a_long_text_that_looks_like_a_chat_is_read_quickly():
    """A chat that json.dumps has written twice, and a text of its beginnings. Each took minutes."""
    twice = json.dumps(json.dumps([{"role": "user", "content": "a word " * 20_000}] * 2))[1:-1]
    started = time.perf_counter()
    assert chat_in(twice) is None and chat_in("[{" + r"\"role\": \"user\", " * 20_000) is None
    assert time.perf_counter() - started < 5


def test_chats_as_text_are_found_wherever_prompts_are_read(tmp_path):
    text = CHAT_TEXTS["JSON"]
    said = []
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"ask": text}) + "\n")
    load_examples(DataSource(str(file), columns=(Renaming("question=ask"),), flag="--eval-dataset"), say=said.append)
    file.write_text(json.dumps({"prompt": "a", "chosen": text, "rejected": "b"}) + "\n")
    load_examples(DataSource(str(file), flag="--pairs"), pairs=True, say=said.append)
    sides = {"chosen": json.dumps([ASK, YES]), "rejected": json.dumps([ASK, NO])}  # the prompt is a part of the text
    file.write_text(json.dumps(sides) + "\n")
    load_examples(DataSource(str(file), flag="--pairs"), pairs=True, say=said.append)
    file.write_text(json.dumps({"prompt": text, "answer": "7"}) + "\n")
    worked_examples(str(file), said.append)
    examples_of(["a", text, {"prompt": text}], say=said.append)
    lines = [line for line in said if "chat as text" in line]
    columns = [re.search(r"the column '(\w+)'", line)[1] for line in lines]
    assert columns == ["question", "chosen", "chosen", "rejected", "prompt", "prompt"]
    assert "--columns messages=ask" in lines[0], "the column's own name"
    assert [line for line in lines[1:5] if "--columns" in line] == []
    assert lines[5].startswith("warning: 2 of 3 ") and "prompt 2" in lines[5]


REFUSED = {
    "only text": ({"text": "a"}, ["'text'", "--columns prompt=text"]),
    "Alpaca": ({"instruction": "a", "output": "b"}, ["--columns prompt=instruction"]),
    "Alpaca with an input": (
        {"instruction": "a", "input": "c", "output": "b"}, ["'input'", "'prompt'"]),
    "WildChat": ({"conversation": [ASK, YES]}, ["--columns messages=conversation"]),
    "a name with a space": ({"prompt ": "a"}, ["--columns 'prompt=prompt '"]),
    "a started completion": (
        {"prompt": [ASK, YES], "chosen": [YES], "rejected": [NO]}, ["assistant", "end of prompt"]),
    "a started completion in a chat of a pair": (
        {"messages": [ASK, message("assistant", "Well,")], "chosen": "Yes.", "rejected": "No."},
        ["assistant", "end of messages: "]),
    "an image part": ({"prompt": [message("user", [{"type": "image"}])]}, ["content is a list"]),
    "pairs whose prompt has another name": (
        {"instruction": "Is it?", "chosen": "It is.", "rejected": "It is not."}, ["--columns prompt=instruction"]),
    "pairs with a misspelt prompt": ({"promt": "a", "chosen": "It is.", "rejected": "It was."}, ["prompt=promt"]),
    "no common beginning": ({"chosen": "Yes.", "rejected": "No."}, ["columns ['chosen', 'rejected']"]),
    "one side is the beginning": ({"chosen": "It is", "rejected": "It is not"}, ["rejected "]),
    "equal sides": ({"chosen": "It is", "rejected": "It is", "rejected_ended": False}, ["chosen equals rejected"]),
    "equal chats": ({"chosen": [ASK, YES], "rejected": [ASK, YES]}, ["chosen equals rejected"]),
    "a text and a chat": ({"chosen": "Is it? Yes.", "rejected": [ASK, NO]}, ["chosen and rejected"]),
    "several turns that differ": (
        {"chosen": [ASK, YES, MORE, NO], "rejected": [ASK, NO, MORE, YES]},
        ["chosen ", "(roles: assistant, user, assistant)"]),
    "more messages after an explicit prompt": (
        {"prompt": [ASK], "chosen": [YES, MORE, NO], "rejected": [NO]}, ["chosen ", "roles: "]),
    "a completion of the user": ({"prompt": [ASK], "chosen": [MORE], "rejected": [NO]}, ["(roles: user)"]),
    "chats of another prompt": (
        {"prompt": "What?", "chosen": [ASK, YES], "rejected": [ASK, NO]}, ["chosen and rejected"]),
    "chats that begin differently": (
        {"chosen": [ASK, YES], "rejected": [MORE, NO]}, ["chosen and rejected"]),
    "chats without a user": ({"chosen": [YES], "rejected": [NO]}, ["user message"]),
    "two system texts": ({"messages": [BRIEF, ASK], "system": "Be kind."}, ["system messages: "]),
    "an unknown name in ShareGPT": ({"conversations": [{"from": "robot", "value": "a"}]}, ["chat role 'robot'"]),
    "both forms without a role": (
        {"messages": [{"role": None, "content": None, "from": None, "value": None}]}, ["chat role None"]),
    "another key in a chat": ({"conversations": [{"speaker": "human", "text": "a"}]}, ['{"role"']),
    "tools": ({"prompt": "a", "tools": [{"name": "f"}]}, ["column 'tools': ", "--columns NEW=tools"]),
    "a tool call": (
        {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [1]}, MORE]}, ["tool_calls"]),
    "images": ({"prompt": "a", "images": ["a.png"]}, ["column 'images': "]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_would_lose_something_are_refused(case, user_error):
    row, parts = REFUSED[case]
    with user_error(*parts, "prompt 1") as caught:
        examples_of([row])
    assert "\n" not in str(caught.value)


CONTAINERS = {
    "a path": ("data.jsonl", ["a str: prompts. ", "--prompts FILE"]),
    "a row": ({"prompt": "a"}, ["a dict: prompts. "]),
    "a table": (pandas.DataFrame([{"prompt": "a"}]), ["a DataFrame: ", 'to_dict("records")']),
    "an Arrow table": (pyarrow.table({"prompt": ["a"]}), ["a Table: ", "to_pylist()"]),
    "a column of an Arrow table": (pyarrow.table({"prompt": ["a"]})["prompt"], ["a ChunkedArray: ", "to_pylist()"]),
    "a generator": ((text for text in "ab"), ["a generator: prompts. "]),
    "a streamed Dataset": (Dataset.from_dict({"prompt": ["a"]}).to_iterable_dataset(), ["IterableDataset: prompts. "]),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_prompts_in_python_are_a_list(case, user_error):
    prompts, parts = CONTAINERS[case]
    with user_error(*parts):
        examples_of(prompts)


def test_rows_in_python(user_error):
    """A Dataset of `datasets` is a list of rows; renaming is for rows only; bad rows may be skipped."""
    rows = Dataset.from_list([{"ask": "a", "n": 1}, {"ask": "", "n": 2}])
    said = []
    columns = (Renaming("prompt=ask"),)
    (example,) = examples_of(rows, False, columns, 50.0, said.append)
    assert example.columns == {"prompt": "a", "n": 1} and said[0].startswith("note: skipped 1 of 2 rows")
    with user_error("2"):
        examples_of(rows, columns=columns)
    assert [e.messages for e in examples_of(["b", {"ask": "a"}], columns=columns)] == [
        (message("user", "b"),), (message("user", "a"),)
    ]  # fmt: skip
    with user_error("1"):
        examples_of([{1: "x", "prompt": "a"}])
    with user_error("'tools'", "prompt 1"):
        examples_of([{"prompt": "a", "tools": np.array(["f", "g"])}])


TABLE = {  # a column's name -> three values: one is missing where pandas can leave one out
    "messages": [[message("user", f"What is {word}?")] for word in "abc"],
    "topic": pandas.Categorical(["x", None, "y"]),
    "flaw": [None, "wrong", None],
    "rejected_ended": [True, None, False],
    "number": [1.5, np.nan, 2.0],
    "int": np.array([1, 2, 3], "int32"),
    "Int64": pandas.array([1, None, 3], "Int64"),
    "boolean": pandas.array([True, None, False], "boolean"),
    "string": pandas.array(["a", None, "b"], "string"),
    "missing": pandas.Series(["a", pandas.NA, "b"], dtype=object),
    "vector": [np.array([1.0, np.nan]), np.array([2.0]), None],
    "words": [np.array(["a", "b"]), np.array([], object), None],
    "nested": [[[1], [2, 3]], [[4]], []],
    "object": [{"a": 1, "b": [1, 2]}, {"a": None, "b": []}, None],
}
OTHER_TYPES = {  # those that JSON does not have
    "when": pandas.to_datetime(["2026-01-01 10:00", "2026-01-02 10:00", None]),
    "where": pandas.to_datetime(["2026-01-01", "2026-01-02", None]).tz_localize("Europe/Paris"),
    "span": pandas.to_timedelta([1, 2, None], unit="s"),
    "times": [[pandas.Timestamp("2026-01-01")], [], None],
    "day": [date(2026, 1, 1), None, date(2026, 1, 2)],
    "price": [Decimal("1.5"), None, Decimal("2.5")],
    "bytes": [b"\0", b"1", None],
}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rows_of_pandas_are_those_of_the_file(tmp_path, suffix):
    """As made in a program, and as pandas reads them: arrays in place of lists, at every depth."""
    table = pandas.DataFrame({**TABLE, **(OTHER_TYPES if suffix == "parquet" else {})})
    file = tmp_path / f"table.{suffix}"
    if suffix == "parquet":
        table.to_parquet(file)
        read = pandas.read_parquet(file)
    else:
        table.to_json(file, orient="records", lines=True)
        read = table
    of_file = load_examples(str(file))
    assert [e.topic for e in of_file] == ["x", None, "y"]
    for rows in (table.to_dict("records"), read.to_dict("records")):
        assert examples_of(rows) == of_file


def test_other_values_of_numpy_in_python():
    rows = Dataset.from_list([{"prompt": [ASK], "n": 1}]).with_format("numpy")
    (example,) = examples_of(rows)
    assert example.conversational and type(example.columns["n"]) is int
    times = np.array(["2026-01-01", "NaT"], "datetime64[ns]")
    (example,) = examples_of([{"prompt": np.str_("a"), "times": times, "pair": (np.float32(0.5), 1)}])
    assert type(example.messages[0]["content"]) is str
    assert example.columns == {"prompt": "a", "times": [datetime(2026, 1, 1), None], "pair": [0.5, 1]}
    assert [e.messages for e in examples_of(pandas.Series([np.array([ASK])]))] == [(ASK,)]
    (example,) = examples_of([{"prompt": "a", "deep": json.loads("[" * 700 + "]" * 700)}])
    assert len(example.columns["deep"]) == 1


# --- the data of three well-known tasks ------------------------------------------------------------------------------


def parts(rows: list[dict], folder: Path) -> dict[str, list[Example]]:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    examples = load_examples(str(folder / "rows.jsonl"))
    found = split_examples(examples, Split(40, 40, 20))
    assert sum(map(len, found.values())) == len(rows) == 50 and all(found.values())
    return found


def test_gsm8k_rows_are_split_and_keep_the_answer(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(50)]
    for part in parts(rows, tmp_path).values():
        for e in part:
            assert e.messages == (message("user", e.columns["question"]),) and not e.conversational
            assert eval(e.messages[0]["content"][8:-1]) == int(e.columns["answer"].split("#### ")[1])


def test_ultrafeedback_rows_are_split_into_prompt_and_completions(tmp_path):
    chats = [[message("user", f"Question {i}?"), message("assistant", f"{side} {i}")]
             for i in range(50) for side in ("good", "bad")]  # fmt: skip
    rows = [{"chosen": chats[2 * i], "rejected": chats[2 * i + 1], "score_chosen": 8.0} for i in range(50)]
    for part in parts(rows, tmp_path).values():
        for e in part:
            number = e.messages[0]["content"].removeprefix("Question ").removesuffix("?")
            assert (e.chosen, e.rejected, len(e.messages)) == (f"good {number}", f"bad {number}", 1)
            assert e.conversational and e.columns["score_chosen"] == 8.0


def test_orca_rows_are_split_with_their_system_text(tmp_path):
    rows = [{"system": "Be brief." if i % 2 else "", "question": f"Question {i}?", "chosen": f"good {i}",
             "rejected": f"bad {i}"} for i in range(50)]  # fmt: skip
    for part in parts(rows, tmp_path).values():
        for e in part:
            number = int(e.messages[-1]["content"].removeprefix("Question ").removesuffix("?"))
            assert len(e.messages) == 1 + number % 2 and (e.chosen, e.rejected) == (f"good {number}", f"bad {number}")

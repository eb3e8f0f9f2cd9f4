"""Tests the kinds of data sources (files, folders, saved datasets, hub datasets) and the flags that describe them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config import make_config, parse_cli
from rlhf.data import tables
from rlhf.data.examples import load_examples
from rlhf.data.folders import split_of
from rlhf.data.readers import read_file
from rlhf.data.source import DataSource
from rlhf.settings.evaluation import parse_comparison_cli, parse_evaluation_cli
from rlhf.settings.reward_model import may_have_pairs, parse_reward_cli
from rlhf.settings.types import Renaming
from rlhf.utils.errors import UserError
from tests.systems import make_link

ROWS = [{"prompt": f"question {i}?", "answer": i, "note": "None" if i % 2 else None} for i in range(4)]


def write(file: Path, text: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def write_csv(file: Path, between: str = ",") -> Path:
    lines = ["prompt answer note".split(), *([r["prompt"], str(r["answer"]), r["note"] or ""] for r in ROWS)]
    return write(file, "\n".join(between.join(line) for line in lines))


def jsonl(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_parquet(file: Path, rows: list[dict] = ROWS) -> Path:
    Dataset.from_list(rows).to_parquet(str(file))
    return file


def save(folder: Path, data: Dataset | DatasetDict) -> Path:
    data.save_to_disk(str(folder))
    return folder


# each makes a source with ROWS
SOURCES = {
    "JSONL": lambda p: write(p / "a.jsonl", jsonl(*ROWS)),
    "a JSON array": lambda p: write(p / "a.json", json.dumps(ROWS, indent=2)),
    "a JSON array in .jsonl": lambda p: write(p / "a.jsonl", json.dumps(ROWS)),
    "JSONL in .csv": lambda p: write(p / "a.csv", jsonl(*ROWS)),
    "CSV": lambda p: write_csv(p / "a.csv"),
    "CSV with a byte-order mark": lambda p: write(p / "a.csv", b"\xef\xbb\xbf" + write_csv(p / "b").read_bytes()),
    "CSV with semicolons": lambda p: write_csv(p / "a.csv", ";"),
    "TSV": lambda p: write_csv(p / "a.tsv", "\t"),
    "Parquet": lambda p: write_parquet(p / "a.parquet"),
    "Parquet in .jsonl": lambda p: write_parquet(p / "a.jsonl"),
    "a saved Dataset": lambda p: save(p / "saved", Dataset.from_list(ROWS)),
    "a saved DatasetDict": lambda p: save(
        p / "saved", DatasetDict(test=Dataset.from_list(ROWS[:1]), train=Dataset.from_list(ROWS))
    ),
    "a saved DatasetDict with one split": lambda p: save(p / "saved", DatasetDict(test=Dataset.from_list(ROWS))),
    "a folder of two kinds": lambda p: [write(p / "d" / "1.jsonl", jsonl(*ROWS[:2])),
                                        write_parquet(p / "d" / "2.parquet", ROWS[2:])][0].parent,
    "a folder with splits": lambda p: [write(p / "d" / "test.jsonl", jsonl(*ROWS[:1])),
                                       write(p / "d" / ".hidden.jsonl", "{"), write(p / "d" / "README.md", "a"),
                                       write_parquet(p / "d" / "train-00000-of-00001.parquet")][0].parent,
    "a folder of folders": lambda p: [write(p / "d" / "validation" / "a.jsonl", jsonl(*ROWS[:1])),
                                      write(p / "d" / "train" / "a.jsonl", jsonl(*ROWS))][0].parent.parent,
}  # fmt: skip


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_the_same_rows(tmp_path, kind, capsys):
    source = SOURCES[kind](tmp_path)
    before = sorted(tmp_path.rglob("*"))
    examples = load_examples(str(source))
    assert [e.messages[0]["content"] for e in examples] == [row["prompt"] for row in ROWS]
    answers = [0, 1, 2, 3]
    is_text = kind.startswith(("CSV", "TSV"))
    assert [e.columns["answer"] for e in examples] == (list("0123") if is_text else answers)
    assert [e.columns["note"] for e in examples] == [None, "None", None, "None"], "an empty cell, and the text None"
    assert sorted(tmp_path.rglob("*")) == before, "no cache is written next to the data"
    assert capsys.readouterr() == ("", ""), "no progress bar"


@pytest.mark.parametrize("kind", SOURCES)
def test_changed_data_is_read_again(tmp_path, kind, monkeypatch):
    """Same size and same time of change, so that a cache could not notice it."""
    monkeypatch.setitem(ROWS[3], "prompt", "question X?")
    SOURCES[kind](tmp_path / "1") if (tmp_path / "1").mkdir() is None else None
    source = SOURCES[kind](tmp_path)
    times = {file: file.stat() for file in tmp_path.rglob("*")}
    assert load_examples(str(source))[3].question == "question x?"
    monkeypatch.undo()
    if source.is_dir():
        import shutil

        shutil.rmtree(source)
    SOURCES[kind](tmp_path)
    for file, stat in times.items():
        if file.exists():
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load_examples(str(source))[3].question == "question 3?"


def test_json_files_do_not_import_datasets(tmp_path):
    write(tmp_path / "a.json", json.dumps(ROWS))
    code = (
        "import sys; from rlhf.data.readers import read_file; from pathlib import Path; "
        "read_file(Path('a.json'), None); assert not {'datasets', 'torch', 'pandas'} & set(sys.modules)"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": path})


# --- positions and errors --------------------------------------------------------------------------------------------

BAD = {
    "an array": ("a.json", '[\n  {"prompt": "a"},\n  {"prompt":\n    ""}\n]', "a.json 1"),
    "a broken element": ("a.json", '[{"prompt": "a"},\n{oops}]', "a.json:2"),
    "a cut array": ("a.json", '[{"prompt": "a"},\n{"prom', "a.json:2"),
    "an array without its end": ("a.json", '[{"prompt": "a"}\n', "a.json:2 ','"),
    "a comma too many": ("a.json", '[{"prompt": "a"},\n]', "a.json:"),
    "no comma": ("a.json", '[{"prompt": "a"}\n{"prompt": "b"}]', "',' a.json:2"),
    "one object": ("a.json", '{\n"prompt": "a"\n}', "a.json:1"),
    "text after an array": ("a.json", '[{"prompt": "a"}]\n[]', "a.json:2"),
    "quotes with backslashes": ("a.csv", 'prompt,answer\n"a ""b"" c",1\n"a \\"b\\" c",2\n', "a.csv:3"),
    "an empty array": ("a.json", "[]", "a.json"),
    "a bad row of a CSV file": ("a.csv", "prompt,answer\na,1\n,2\n", "a.csv 1"),
    "a CSV row with a cell too many": ("a.csv", "prompt\na\nb,c\n", "3 2 a.csv"),
    "a first CSV row with a cell too many": ("a.csv", "prompt\na,b\n", "a.csv 2"),
    "an open quote": ("a.csv", 'prompt\na\n"b\n', "a.csv"),
    "a CSV row cut off": ("a.csv", "prompt,answer\na,1\nb", "a.csv"),
    "a column twice": ("a.csv", "prompt,prompt\na,b\n", "'prompt' a.csv:1"),
    "a CSV file that is not UTF-8": ("a.csv", b"prompt\ncaf\xe9\n", "a.csv 10"),
    "an empty CSV file": ("a.csv", "", "a.csv"),
    "a CSV file without rows": ("a.csv", "prompt,answer\n", "a.csv"),
    "a cut Parquet file": ("a.parquet", b"PAR1\x15\x04", "a.parquet"),
    "a text in .parquet": ("a.parquet", "prompt\na\n", "a.parquet"),
    "gzip": ("a.jsonl", b"\x1f\x8b\x08", "a.jsonl"),
    "an Excel file": ("a.csv", b"PK\x03\x04", "a.csv"),
    "a folder without data": ("README.md", "a", "--prompts"),
    "a folder of a model": ("config.json", "{}", "config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_reported_in_one_line_each(tmp_path, case, user_error):
    name, content, parts = BAD[case]
    file = write(tmp_path / name, content)
    with user_error(*parts.split()) as caught:
        load_examples(str(tmp_path if "folder" in case else file))
    assert all("\n" not in problem and len(problem) < 500 for problem in map(str, caught.value.problems))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(rows=st.lists(JSON_VALUES, max_size=5), indent=st.sampled_from([None, 0, 2]), ascii=st.booleans())
def test_json_arrays_are_read_as_json_loads_reads_them(tmp_path_factory, rows, indent, ascii):
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii)
    file = tmp_path_factory.getbasetemp() / "array.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass" if ascii else "replace"))
    found = read_file(file, DataSource("array.json"))
    if ascii:
        assert [row for _, row in found] == rows
    assert [where.split("array.json ")[1] for where, _ in found] == [f"row {i}" for i in range(len(rows))]


# --- splits and configurations ---------------------------------------------------------------------------------------


def test_split_is_chosen_by_flag(tmp_path, user_error):
    parts = DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1]))
    folder = str(save(tmp_path / "saved", parts))
    assert len(load_examples(DataSource(folder, dataset_split="test"))) == 1
    with user_error("'tests'", "--prompts"):
        load_examples(DataSource(folder, dataset_split="tests"))
    other = str(save(tmp_path / "other", DatasetDict(a=parts["train"], b=parts["test"])))
    with user_error("'train'", "--dataset-split"):
        load_examples(other)
    single = str(save(tmp_path / "single", parts["train"]))
    with user_error("--dataset-split test"):
        load_examples(DataSource(single, dataset_split="test"))
    with user_error("--dataset-split test", "--prompts"):
        load_examples(DataSource(str(write(tmp_path / "a.jsonl", jsonl(*ROWS))), dataset_split="test"))
    with user_error("--dataset-config", "--prompts"):
        load_examples(DataSource(folder, dataset_config="main"))


def test_files_without_a_split_are_ignored_only_if_the_flag_names_one(tmp_path, user_error):
    """`latest_eval.jsonl` has the word of a split by chance. Training on it alone would be a silent mistake."""
    for name in ("contest.jsonl", "latest_eval.jsonl"):
        write(tmp_path / name, jsonl({"prompt": name}))
    with user_error(": --prompts ", ", latest_eval.jsonl ", "'test', contest.jsonl ", "--dataset-split test"):
        load_examples(str(tmp_path))
    source = DataSource(str(tmp_path), dataset_split="test")
    assert [e.question for e in load_examples(source)] == ["latest_eval.jsonl"]


def test_folders_are_read_with_the_folders_inside_and_without_compressed_files(tmp_path, user_error):
    write(tmp_path / "data" / "more" / "b.jsonl", jsonl({"prompt": "b"}))
    write(tmp_path / "data" / "a.jsonl", jsonl({"prompt": "a"}))
    make_link(tmp_path / "data" / "more" / "circle", tmp_path / "data")
    assert [e.question for e in load_examples(str(tmp_path / "data"))] == ["a", "b"]
    write(tmp_path / "data" / "c.jsonl.gz", b"\x1f\x8b")
    with user_error("c.jsonl"):
        load_examples(str(tmp_path / "data"))


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes with a name on Windows")
def test_pipes_and_broken_links_are_named_as_such(tmp_path, user_error):
    """`--prompts <(cat file)` gives the name of a pipe, which exists and cannot be read twice."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    for name, problem in (("pipe.jsonl", "regular file: "), ("link.jsonl", "not found: ")):
        with user_error(f"{problem}{tmp_path / name}") as caught:
            load_examples(str(tmp_path / name))
        assert "?" not in str(caught.value)


def test_all_broken_files_of_a_folder_are_reported(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, "{oops}\n")
    with pytest.raises(UserError) as caught:
        load_examples(str(tmp_path))
    assert [re.search(r"[ab]\.jsonl:1", problem)[0] for problem in map(str, caught.value.problems)] == [
        "a.jsonl:1",
        "b.jsonl:1",
    ]


@pytest.mark.parametrize(("name", "split"), [
    ("train-00000-of-00002.parquet", "train"), ("my_dev.csv", "validation"), ("evaluation.json", "test"),
    ("test/a.jsonl", "test"), ("test/train.jsonl", "train"), ("trainer.jsonl", None), ("latest.jsonl", None),
    ("constraint.json", None), ("training2.json", "train"),
])  # fmt: skip
def test_split_of_a_file_name(name, split):
    assert split_of(Path(name)) == split


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub dataset with two configurations: a local clone of it stands for the hub."""
    clone = tmp_path / "clone"
    write(clone / "main" / "train.jsonl", jsonl(*ROWS))
    write(clone / "main" / "test.jsonl", jsonl(*ROWS[:1]))
    write(clone / "other" / "test.jsonl", jsonl(*ROWS[:2]))
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("main", "other"))
    write(clone / "README.md", f"---\nconfigs:\n{configs}---\n")
    monkeypatch.setattr(tables, "find_on_hub", lambda name, *_: str(clone))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return clone


def test_configuration_and_split_of_a_hub_dataset(hub, user_error):
    assert len(load_examples(DataSource("openai/gsm", "main"))) == 4
    assert len(load_examples(DataSource("openai/gsm", "main", "test"))) == 1
    assert len(load_examples(DataSource("openai/gsm", "other", "test"))) == 2
    with user_error("--prompts openai/gsm", "--dataset-config", "main", "other"):
        load_examples(DataSource("openai/gsm"))
    with user_error("--prompts openai/gsm", "--dataset-config mian", "--dataset-config"):
        load_examples(DataSource("openai/gsm", "mian"))
    with user_error("--prompts openai/gsm", "--dataset-config other", "--dataset-split"):
        load_examples(DataSource("openai/gsm", "other"))


# --- columns ---------------------------------------------------------------------------------------------------------


def renamed(*names: str) -> tuple[Renaming, ...]:
    return tuple(map(Renaming.parse, names))


def test_columns_get_new_names(tmp_path, user_error):
    rows = [{"problem": f"{i} + 1?", "solution": i + 1, "prompt": "not used"} for i in range(3)]
    file = str(write(tmp_path / "a.jsonl", jsonl(*rows)))
    examples = load_examples(DataSource(file, columns=renamed("prompt=problem", "answer=solution", "kind=prompt")))
    assert [e.question for e in examples] == ["0 + 1?", "1 + 1?", "2 + 1?"]
    assert examples[0].columns == {"prompt": "0 + 1?", "answer": 1, "kind": "not used"}
    with user_error("'problm'", "--columns", "--prompts"):
        load_examples(DataSource(file, columns=renamed("prompt=problm", "kind=prompt")))
    with user_error("'prompt'", "--columns"):
        load_examples(DataSource(file, columns=renamed("prompt=problem")))


def test_column_that_is_not_the_prompt_cannot_get_the_name_of_one(tmp_path, user_error):
    file = str(write(tmp_path / "a.jsonl", jsonl({"prompt": "a", "text": "b"})))
    with user_error("'prompt'", "'question': --columns question=text, ", "prompt=text OTHER=prompt"):
        load_examples(DataSource(file, columns=renamed("question=text")))
    (example,) = load_examples(DataSource(file, columns=renamed("prompt=text", "old=prompt")))
    assert example.question == "b"


@pytest.mark.parametrize(("row", "parts"), [
    ({"prompt": "a", "system_prompt": "Be kind."}, ["'system_prompt'", "--columns system="]),
    ({"prompt": "a", "input": "b", "output": "c"}, ["'input'", "'prompt'"]),
    ({"prompt": "a", "history": [["b", "c"]]}, ["'history'"]),
    ({"prompt": "a", "system_prompt": "", "input": "b", "history": []}, []),
])  # fmt: skip
def test_columns_that_may_belong_to_the_prompt_are_reported_once(tmp_path, row, parts):
    text = []
    load_examples(str(write(tmp_path / "a.jsonl", jsonl(row))), say=text.append)
    assert len(text) == bool(parts) and all(part in text[0] for part in parts)


def test_rows_that_differ_in_any_column_are_not_duplicates(tmp_path):
    text = []
    rows = [{"prompt": "a", "answer": i} for i in range(4)]
    load_examples(str(write(tmp_path / "a.jsonl", jsonl(*rows))), say=text.append)
    assert text == []
    load_examples(str(write(tmp_path / "a.jsonl", jsonl(*rows, rows[0]))), say=text.append)
    assert len(text) == 1 and text[0].startswith("warning: 1 of 5 rows ")


def test_small_numbers_of_json_are_read(tmp_path):
    rows = '{"prompt": "a", "answer": 0.0e9}\n{"prompt": "b", "answer": 5e-324}\n{"prompt": "c", "answer": 1e308}'
    assert [e.columns["answer"] for e in load_examples(str(write(tmp_path / "a.jsonl", rows)))] == [0, 5e-324, 1e308]


def test_empty_name_of_data_is_refused(user_error):
    """A variable of the shell that is not set: `--prompts "$DATA"`. As a path, the empty text is this folder."""
    for parse, flag in (
        (parse_cli, "--prompts"), (parse_reward_cli, "--pairs"), (parse_evaluation_cli, "--prompts"),
        (lambda argv: parse_comparison_cli(["run", *argv]), "--prompts"),
    ):  # fmt: skip
        with user_error(flag[2:], flag):
            parse([flag, ""])
    with user_error("prompts"):
        make_config(prompts=" ")


def test_columns_as_flags_and_in_yaml_and_python(tmp_path, user_error):
    file = write(tmp_path / "a.yaml", "columns:\n  prompt: question\n  answer: solution\n")
    words = ("prompt=question", "answer=solution")
    for argv in (["--columns", *words], ["--columns", ",".join(words)], ["--config", str(file)]):
        assert parse_cli(argv).data.columns == words
        assert parse_reward_cli(argv).data.columns == words
    assert make_config(columns={"prompt": "question", "answer": "solution"}).data.columns == words
    for bad, parts in (
        ("prompt", ("columns is 'prompt': --columns. ", "NEW=OLD")),
        ("a=b,c=b", ("'b' ", ": --columns a=b c=b. ")),
        ("a=b,a=c", ("'a' ", ": --columns")),
    ):
        for parse in (parse_cli, parse_reward_cli):
            with user_error(*parts):
                parse(["--columns", bad])


def test_pairs_are_recognised_in_every_kind_of_file(tmp_path):
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    for name, content, expected in (
        ("a.jsonl", jsonl(pair), True), ("b.jsonl", jsonl({"prompt": "chosen one"}), False),
        ("a.json", json.dumps([pair], indent=1), True), ("b.json", json.dumps([{"prompt": "a"}]), False),
        ("a.csv", "prompt,chosen,rejected\n", True), ("b.csv", "prompt\nchosen\n", False), ("a.parquet", "", True),
    ):  # fmt: skip
        assert may_have_pairs(str(write(tmp_path / name, content))) is expected, name
    file = write(tmp_path / "c.jsonl", jsonl({"prompt": "a", "good": "b", "bad": "c"}))
    assert may_have_pairs(str(file), ("chosen=good",)) and may_have_pairs(str(file), {"chosen": "good"})


def test_saved_dataset_without_the_end_of_a_file_is_incomplete(tmp_path, user_error):
    """Cut between two batches, it would be read without an error."""
    saved = save(tmp_path / "saved", Dataset.from_list(ROWS))
    (part,) = saved.glob("*.arrow")
    write(part, part.read_bytes()[:-8])
    with user_error(saved):
        load_examples(str(saved))


def test_columns_of_a_parquet_file_that_cannot_be_read(tmp_path, user_error):
    scores = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    pa.parquet.write_table(pa.table({"prompt": ["a"], "scores": scores}), tmp_path / "a.parquet")
    with user_error("map", "a.parquet"):
        load_examples(str(tmp_path / "a.parquet"))


@pytest.mark.ci
def test_a_column_with_few_different_texts_may_be_longer_than_an_array(tmp_path, monkeypatch):
    """3 GB of texts in a small file: Arrow's arrays of texts have 32-bit positions, so the file is read in parts."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 1500, pa.int32()), ["a" * 10**6, "b" * 10**6])
    pa.parquet.write_table(pa.table({"prompt": texts}), tmp_path / "a.parquet")
    monkeypatch.setattr(tables, "BATCH", 10)
    monkeypatch.setattr(tables, "_rows", lambda place, parts: [part.num_rows for part in parts])  # without the texts
    assert tables.read_parquet(tmp_path / "a.parquet") == [10] * 300


@pytest.mark.parametrize("several", ["d/a.jsonl,d/b.jsonl", "d/*.jsonl"])
def test_several_files_are_given_as_their_folder(tmp_path, several):
    for name in "ab":
        write(tmp_path / "d" / f"{name}.jsonl", jsonl({"prompt": name}))
    with pytest.raises(UserError) as caught:
        load_examples(str(tmp_path / several))
    (problem,) = caught.value.problems
    assert problem.place == str(tmp_path / several) and "a folder with several" in problem.fix
    assert [e.question for e in load_examples(str(tmp_path / "d"))] == ["a", "b"]


def test_null_in_a_table_is_reported_as_in_json(tmp_path, user_error):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": None, "rejected": None}]
    first, second = load_examples(str(write_parquet(tmp_path / "a.parquet", rows)))
    assert first.chosen == "b" and second.chosen is None, "a row without a pair"
    for row, problem in (
        ({**rows[0], "rejected": None}, "rejected is null"), ({**rows[0], "prompt": None}, "prompt is null"),
    ):  # fmt: skip
        with user_error(problem, "a.parquet row 1. "):
            load_examples(str(write_parquet(tmp_path / "a.parquet", [rows[0], row])))


def test_header_of_a_csv_file_may_have_spaces(tmp_path):
    (example,) = load_examples(str(write(tmp_path / "a.csv", "prompt , answer\na,007\n")))
    assert example.columns == {"prompt": "a", "answer": "007"}
    file = str(write(tmp_path / "a.jsonl", jsonl({"prompt ": "a"})))
    columns = parse_cli(["--columns", "prompt=prompt "]).data.columns
    assert load_examples(DataSource(file, columns=columns))[0].question == "a"


def test_all_cells_of_csv_are_text(tmp_path):
    content = "ask,chosen,rejected,answer,share,whole\n07,4,5,4,0.50,true\n8,6,7,,1,False\n"
    file = str(write(tmp_path / "a.csv", content))
    first, second = load_examples(DataSource(file, columns=renamed("prompt=ask", "rejected_ended=whole")))
    assert (first.question, first.chosen, first.rejected, second.question) == ("07", "4", "5", "8")
    assert [e.columns["answer"] for e in (first, second)] == ["4", None]
    assert [e.columns["share"] for e in (first, second)] == ["0.50", "1"]
    assert [e.rejected_ended for e in (first, second)] == [True, False]


# --- rows that cannot be used ----------------------------------------------------------------------------------------


def with_bad_rows(bad: int, rows: int = 100) -> str:
    return jsonl(*({"prompt": "" if i < bad else f"question {i}"} for i in range(rows)))


def test_bad_rows_of_a_file_are_refused_and_the_error_names_the_flag(tmp_path, user_error):
    file = str(write(tmp_path / "a.jsonl", with_bad_rows(7)))
    with pytest.raises(UserError) as caught:
        load_examples(file)
    lines = caught.value.report().splitlines()
    assert len(lines) == 6 and lines[-1] == "and 2 more"
    assert "(7 of 100)" in lines[0] and lines[0].endswith("--skip-bad-rows 7")
    with user_error("2", "3", "--skip-bad-rows 66.7"):
        load_examples(str(write(tmp_path / "b.jsonl", with_bad_rows(2, 3))))
    with pytest.raises(UserError) as caught:
        load_examples(str(write(tmp_path / "b.jsonl", with_bad_rows(2999, 3000))))
    assert "--skip-bad-rows" not in str(caught.value), "the flag accepts less than 100"
    with user_error("--skip-bad-rows 7"):
        load_examples(DataSource(file, skip_bad_rows=6.9))


def test_bad_rows_are_skipped_with_a_count_and_the_first_five(tmp_path):
    file = str(write(tmp_path / "a.jsonl", with_bad_rows(7)))
    text = []
    assert len(load_examples(DataSource(file, skip_bad_rows=7), say=text.append)) == 93
    assert " 7 of 100 rows " in text[0] and text[0].endswith(f": {file}")
    assert f": {file}:1, " in text[1] and len(text) == 7 and text[6] == "  and 2 more"


@pytest.mark.parametrize(
    ("end", "kind"), [('{"prompt": "a', "JSON"), ("{oops}\n", "JSON"), ('{"prompt": "caf\\xe9"}', "UTF-8")]
)
def test_broken_json_and_invalid_utf8_are_never_skipped(tmp_path, end, kind, user_error):
    content = with_bad_rows(0).encode() + end.encode().replace(b"\\xe9", b"\xe9")
    with user_error(f"not {kind}", "a.jsonl"):
        load_examples(DataSource(str(write(tmp_path / "a.jsonl", content)), skip_bad_rows=50))


def test_all_rows_bad_is_an_error_whatever_may_be_skipped(tmp_path):
    file = str(write(tmp_path / "a.jsonl", with_bad_rows(3, 3)))
    with pytest.raises(UserError) as caught:
        load_examples(DataSource(file, skip_bad_rows=99))
    assert "--skip-bad-rows" not in str(caught.value)


def test_a_column_that_all_rows_lack_is_reported_once(tmp_path, user_error):
    file = str(write(tmp_path / "a.json", json.dumps([{"problem": "1 + 1?", "answer": 2}] * 9, indent=2)))
    with user_error(f": {file} row 0. ", "--columns prompt=problem. ", " 9 rows "):
        load_examples(file)
    with user_error('"chosen"', '"rejected"', "2"):
        load_examples(str(write(tmp_path / "b.jsonl", jsonl(*ROWS[:2]))), pairs=True)


def test_one_percent_of_the_rows_of_a_hub_dataset_may_be_bad(hub, user_error):
    train = hub / "main" / "train.jsonl"
    text = []
    (hub / "main" / "test.jsonl").unlink()
    write(train, with_bad_rows(1))
    assert len(load_examples(DataSource("openai/gsm", "main"), say=text.append)) == 99
    assert ": openai/gsm row 0. " in text[1]
    write(hub / "other" / "test.jsonl", with_bad_rows(2))
    with user_error("0", "--skip-bad-rows 2"):
        load_examples(DataSource("openai/gsm", "other", "test"))

"""Read and check the rows of a JSONL file, a hub dataset or a Python list."""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.hub import require_hub
from rlhf.utils.paths import is_path, missing_path

_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
MAX_INVALID_SHARE = 0.05  # invalid rows of a hub dataset: up to this share they are skipped
REPEATED_SHARE = 0.05  # duplicate rows: above this share a warning is printed
COLUMNS = ("system", "question", "prompt", "messages", "chosen", "rejected", "rejected_ended", "topic", "flaw")
ROLES = ("system", "user", "assistant", "tool")
EXPECTED_COLUMNS = '"question", "prompt" or "messages" (a preference pair also needs "chosen" and "rejected")'


@dataclass(frozen=True)
class Example:
    """One row of data: a prompt and, for preference pairs, its two completions."""

    messages: tuple[dict[str, str], ...]
    chosen: str | None = None
    rejected: str | None = None
    rejected_ended: bool = True  # False: the completion was cut off, so no EOS follows it
    topic: str | None = None
    flaw: str | None = None  # what is wrong with the rejected completion, if the data contains it
    columns: dict[str, Any] = field(default_factory=dict)  # all columns of the row, for reward functions
    conversational: bool = False  # the row's prompt is a list of messages, so reward functions receive messages

    @property
    def question(self) -> str:
        """The text of the user messages, normalised as the key for splits.

        Questions that differ only in case, spacing, invisible characters or Unicode form (NFC or NFD) are equal.
        """
        text = "\n".join(m["content"] for m in self.messages if m["role"] == "user")
        visible = "".join(c for c in unicodedata.normalize("NFC", text).casefold() if unicodedata.category(c) != "Cf")
        return unicodedata.normalize("NFC", " ".join(visible.split()))


def load_examples(
    source: str, pairs: bool = False, say: Callable[[str], None] = print, topics: bool = False
) -> list[Example]:
    """Return all rows of a local JSONL file or of a hub dataset's train split, in order.

    Raises UserError that lists every invalid row with its position. Users cannot correct a hub dataset, so up to 5% of
    its rows may be invalid: they are skipped. Skipped rows and more than 5% of duplicate rows are reported with `say`.

    Args:
        source: path of a JSONL file, or name of a hub dataset.
        pairs: if True, every row needs "chosen" and "rejected".
        say: prints one line.
        topics: if True, every row needs a "topic".
    """
    file = Path(source).expanduser()
    is_local = is_path(source) or file.exists()
    rows = _read_jsonl(str(file)) if is_local else _read_hub(source)
    every = dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row)
    columns = every.keys() & set(COLUMNS)
    examples, problems = [], []
    for where, row in rows:
        try:
            examples.append(_example(row, where, pairs, columns, topics, every))
        except UserError as error:
            problems += error.problems
    if problems and not is_local and len(problems) <= MAX_INVALID_SHARE * len(rows):
        say(f"skipped {len(problems)} of {len(rows):,} rows because they are invalid. First error: {problems[0]}")
    else:
        raise_if(problems)
    if not examples:
        raise UserError(f"no rows: {source}. Each line must be a JSON object with {EXPECTED_COLUMNS}")
    repeated = len(examples) - len({json.dumps((e.messages, e.chosen, e.rejected)) for e in examples})
    if repeated > REPEATED_SHARE * len(examples):
        say(f"warning: {repeated} of {len(examples):,} rows are duplicates: {source}. Remove them if unintended")
    return examples


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {file}, byte {error.start}. Save the file as UTF-8") from None


def _read_jsonl(path: str) -> list[tuple[str, Any]]:
    if not Path(path).is_file():
        raise missing_path(path, "data file", "Give a JSONL file or a hub dataset's name")
    kind = _other_format(Path(path))
    if kind:
        raise UserError(f"{kind}, not JSONL: {path}:1. Convert it to a file with one JSON object per line")
    rows, problems, lines = [], [], read_text(Path(path)).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}, {line.strip()[:40]!r}"
        try:
            rows.append((where, json.loads(line, object_pairs_hook=_unique_keys)))
        except (ValueError, RecursionError) as error:  # also a number with thousands of digits, or deep nesting
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            cut = ". Is the file incomplete?" if number == len(lines) else ""
            problems.append(f"not JSON ({reason}): {where}. Write one JSON object per line{cut}")
    raise_if(problems)
    return rows


def _other_format(file: Path) -> str | None:
    """Return the name of a data format other than JSONL, judged by the file's suffix and first bytes, or None."""
    if file.suffix.lower() in (".csv", ".tsv"):
        return "a CSV file"
    with file.open("rb") as stream:
        start = stream.read(64)
    if start.startswith(b"PAR1"):
        return "a Parquet file"
    if start.startswith(b"ARROW1"):
        return "an Arrow file"
    return "a JSON array" if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[") else None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError for a duplicate key: json.loads would use its last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(n for n in names if names.count(n) > 1)!r}")
    return found


def _read_hub(name: str) -> list[tuple[str, Any]]:
    from datasets import load_dataset

    source = require_hub(name, "dataset", "a JSONL file")
    return [(f"{name} row {i}", row) for i, row in enumerate(load_dataset(source, split="train"))]


def _example(
    row: Any,
    where: str,
    pairs: bool,
    columns: Set[str] = frozenset(),
    topics: bool = False,
    others: Iterable[str] = (),
) -> Example:
    """Return one checked row. Raises UserError if the row is invalid; `where` is its position.

    `columns` are the names of COLUMNS that occur in the data. `others` are all column names of the data; those that
    this row does not have become None in `Example.columns`.
    """
    if not isinstance(row, dict):
        raise UserError(f"not a JSON object: {where}. Each row must be an object with {EXPECTED_COLUMNS}")
    _check_spelling(row, where, columns)
    messages = _messages(row, where)
    has_pair = "chosen" in row or "rejected" in row
    if pairs and not has_pair:
        raise UserError(
            f'no "chosen" and "rejected": {where}, columns {sorted(row)}. A reward model is trained on pairs'
        )
    topic = _typed(row, "topic", str, None, where)
    if topics and not (topic or "").strip():
        raise UserError(
            f'no "topic": {where}, columns {sorted(row)}. Add a topic to every row, or remove --steps-per-topic'
        )
    example = Example(
        messages=tuple(messages),
        chosen=_completion(row, "chosen", where) if has_pair else None,
        rejected=_completion(row, "rejected", where) if has_pair else None,
        rejected_ended=_typed(row, "rejected_ended", bool, True, where),
        topic=topic,
        flaw=_typed(row, "flaw", str, None, where),
        columns={**dict.fromkeys(others), **row},
        conversational="messages" in row or isinstance(row.get("prompt"), list),
    )
    if has_pair and example.chosen == example.rejected and example.rejected_ended:
        raise UserError(f"chosen equals rejected: {where}. Correct or remove that row")
    return example


def _check_spelling(row: dict, where: str, columns: Set[str]) -> None:
    """Raise UserError for a column whose name looks like a misspelling of a column that other rows have."""
    for name in row.keys() - set(COLUMNS):
        near = difflib.get_close_matches(name, sorted(columns - row.keys()), n=1, cutoff=0.8)
        if near:
            raise UserError(f"unknown column {name!r}: {where}. Did you mean {near[0]!r}, which other rows have?")


def _messages(row: dict, where: str) -> list[dict[str, str]]:
    chat = row.get("messages", row.get("prompt") if isinstance(row.get("prompt"), list) else None)
    if chat is not None:
        return _chat(chat, where)
    key = next((k for k in ("question", "prompt") if k in row), None)
    if key is None:
        raise UserError(f"no prompt: {where}, columns {sorted(row)}. Each row needs {EXPECTED_COLUMNS}")
    system = row.get("system")
    messages = [] if system in (None, "") else [{"role": "system", "content": _text(system, "system", where)}]
    return [*messages, {"role": "user", "content": _text(row[key], key, where)}]


def _chat(chat: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(chat, list) or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in chat):
        raise UserError(f'not a list of {{"role", "content"}} messages: {where}. Correct or remove that row')
    messages = [{"role": m["role"], "content": _text(m["content"], "content", where)} for m in chat]
    unknown = [m["role"] for m in messages if m["role"] not in ROLES]
    if unknown:
        raise UserError(f"unknown chat role {unknown[0]!r}: {where}. Use one of {', '.join(ROLES)}")
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # the chat ends with a completion: the prompt is everything before it
    if not any(m["role"] == "user" for m in messages):
        raise UserError(f"no user message in the chat: {where}. Add one")
    return messages


def _completion(row: dict, key: str, where: str) -> str:
    if key not in row:
        raise UserError(f'no "{key}": {where}, columns {sorted(row)}. A pair needs both "chosen" and "rejected"')
    value = row[key]
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    return _text(value, key, where)


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{key} is {_shown(value)}, not text: {where}. Correct or remove that row")
    if not value.strip():
        raise UserError(f"{key} is empty: {where}. Correct or remove that row")
    found = _NOT_TEXT.search(value)
    if found:
        what = "a NUL character" if found[0] == "\0" else "a lone surrogate"
        raise UserError(f"{key} contains {what} (character {found.start() + 1}): {where}. Correct or remove that row")
    return value


def _typed(row: dict, key: str, kind: type, default: Any, where: str) -> Any:
    """Return an optional column's value, or the default if the row does not have it. Raises UserError if its type is
    not `kind`."""
    value = row.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        expected = {bool: "true or false", str: "text"}[kind]
        raise UserError(f"{key} is {_shown(value)}, not {expected}: {where}. Correct or remove that row")
    return value


def _shown(value: Any) -> str:
    """Return a value for an error message. Lists and objects are shown by their type only: they may be deep."""
    kinds = {list: "a list", dict: "an object"}
    return kinds.get(type(value)) or json.dumps(value, default=str)[:40]


GivenPrompt = str | Sequence[dict[str, str]] | dict[str, Any]


def examples_of(prompts: Sequence[GivenPrompt], topics: bool = False) -> list[Example]:
    """Return checked rows for prompts given in Python. Raises UserError that lists every invalid prompt.

    Each prompt is a text, a chat of {"role", "content"}, or a row with a data file's columns. Only a row can have a
    topic.
    """
    examples, problems = [], []
    every = dict.fromkeys(name for prompt in prompts if isinstance(prompt, dict) for name in prompt)
    for i, prompt in enumerate(prompts):
        is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str)
        row = prompt if isinstance(prompt, dict) else {"messages": list(prompt)} if is_chat else {"prompt": prompt}
        try:
            examples.append(_example(row, f"prompt {i + 1}", pairs=False, topics=topics, others=every))
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return examples

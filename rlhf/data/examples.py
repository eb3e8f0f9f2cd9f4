"""Rows of a JSONL file, of a hub dataset or of a Python list, read and checked."""

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
FORGIVEN_SHARE = 0.05  # of a hub dataset's rows
REPEATED_SHARE = 0.05  # of the rows, above which it is told
COLUMNS = ("system", "question", "prompt", "messages", "chosen", "rejected", "rejected_ended", "topic", "flaw")
ROLES = ("system", "user", "assistant", "tool")
READABLE = '"question" (or "prompt"), or "messages"; pairs have "chosen" and "rejected" beside it'


@dataclass(frozen=True)
class Example:
    """One row of data: a prompt, and for pairs its two replies."""

    messages: tuple[dict[str, str], ...]
    chosen: str | None = None
    rejected: str | None = None
    rejected_ended: bool = True  # False: the reply was cut off, so that no EOS follows it
    topic: str | None = None
    flaw: str | None = None  # what is wrong with the rejected reply, where the data says so
    columns: dict[str, Any] = field(default_factory=dict)  # the whole row, for reward functions

    @property
    def question(self) -> str:
        """What the user says, as the key for splits: case, spacing, invisible characters and the Unicode form (NFC or
        NFD) do not make it another question."""
        text = "\n".join(m["content"] for m in self.messages if m["role"] == "user")
        shown = "".join(c for c in unicodedata.normalize("NFC", text).casefold() if unicodedata.category(c) != "Cf")
        return unicodedata.normalize("NFC", " ".join(shown.split()))


def load_examples(
    source: str, pairs: bool = False, say: Callable[[str], None] = print, topics: bool = False
) -> list[Example]:
    """All rows of a local JSONL file or of a hub dataset's train split, in order.

    `pairs` asks for a chosen and a rejected reply in every row, `topics` for a topic. Raises UserError with every bad
    row's place. Of a hub dataset, which its user cannot correct, up to 5% of bad rows are left out and told through
    `say`; so is a share of repeated rows above 5%.
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
    if problems and not is_local and len(problems) <= FORGIVEN_SHARE * len(rows):
        say(f"{len(problems)} of {len(rows):,} rows are left out, the first because {problems[0]}")
    else:
        raise_if(problems)
    if not examples:
        raise UserError(f"no rows: {source}. Each line is a JSON object with {READABLE}")
    repeated = len(examples) - len({json.dumps((e.messages, e.chosen, e.rejected)) for e in examples})
    if repeated > REPEATED_SHARE * len(examples):
        say(f"warning: {repeated} of {len(examples):,} rows repeat another: {source}. Remove them, if that is a slip")
    return examples


def read_text(file: Path) -> str:
    """A UTF-8 file's text, with or without a byte-order mark."""
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
            rows.append((where, json.loads(line, object_pairs_hook=_without_repeats)))
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, too, or nesting as deep
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            cut = ". Was the file cut off there?" if number == len(lines) else ""
            problems.append(f"not JSON ({reason}): {where}. One JSON object per line{cut}")
    raise_if(problems)
    return rows


def _other_format(file: Path) -> str | None:
    """Names another format in which data comes, as far as the file's name and its beginning show it."""
    if file.suffix.lower() in (".csv", ".tsv"):
        return "a CSV file"
    with file.open("rb") as stream:
        start = stream.read(64)
    if start.startswith(b"PAR1"):
        return "a Parquet file"
    if start.startswith(b"ARROW1"):
        return "an Arrow file"
    return "a JSON array" if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[") else None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError if a key stands in it twice, of which Python would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
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
    """`columns`: those of COLUMNS that rows of this data have; `others`: all that they have, None in this row if it
    lacks one."""
    if not isinstance(row, dict):
        raise UserError(f"not a JSON object: {where}. Each row is an object with {READABLE}")
    _check_spelling(row, where, columns)
    messages = _messages(row, where)
    has_pair = "chosen" in row or "rejected" in row
    if pairs and not has_pair:
        raise UserError(
            f'no "chosen" and "rejected": {where}, columns {sorted(row)}. A reward model learns from pairs'
        )
    topic = _typed(row, "topic", str, None, where)
    if topics and not (topic or "").strip():
        raise UserError(
            f"no topic: {where}, columns {sorted(row)}. Give every row one, or leave out --steps-per-topic"
        )
    example = Example(
        messages=tuple(messages),
        chosen=_reply(row, "chosen", where) if has_pair else None,
        rejected=_reply(row, "rejected", where) if has_pair else None,
        rejected_ended=_typed(row, "rejected_ended", bool, True, where),
        topic=topic,
        flaw=_typed(row, "flaw", str, None, where),
        columns={**dict.fromkeys(others), **row},
    )
    if has_pair and example.chosen == example.rejected and example.rejected_ended:
        raise UserError(f"chosen equals rejected: {where}. Correct or remove that row")
    return example


def _check_spelling(row: dict, where: str, columns: Set[str]) -> None:
    """A column of the other rows that this one lacks, and one spelt much like it: a slip, no column to pass over."""
    for name in row.keys() - set(COLUMNS):
        near = difflib.get_close_matches(name, sorted(columns - row.keys()), n=1, cutoff=0.8)
        if near:
            raise UserError(f"unknown column {name!r}: {where}. Did you mean {near[0]!r}, as in other rows?")


def _messages(row: dict, where: str) -> list[dict[str, str]]:
    chat = row.get("messages", row.get("prompt") if isinstance(row.get("prompt"), list) else None)
    if chat is not None:
        return _chat(chat, where)
    key = next((k for k in ("question", "prompt") if k in row), None)
    if key is None:
        raise UserError(f"no prompt: {where}, columns {sorted(row)}. A row has {READABLE}")
    system = row.get("system")
    messages = [] if system in (None, "") else [{"role": "system", "content": _text(system, "system", where)}]
    return [*messages, {"role": "user", "content": _text(row[key], key, where)}]


def _chat(chat: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(chat, list) or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in chat):
        raise UserError(f'messages are not a list of {{"role", "content"}}: {where}. Write them as a chat')
    messages = [{"role": m["role"], "content": _text(m["content"], "content", where)} for m in chat]
    unknown = [m["role"] for m in messages if m["role"] not in ROLES]
    if unknown:
        raise UserError(f"unknown chat role {unknown[0]!r}: {where}. Roles are {', '.join(ROLES)}")
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # a finished chat: what we want is the prompt before its last reply
    if not any(m["role"] == "user" for m in messages):
        raise UserError(f"a chat without a user's message: {where}. Add one")
    return messages


def _reply(row: dict, key: str, where: str) -> str:
    if key not in row:
        raise UserError(f"no {key!r}: {where}, columns {sorted(row)}. A pair has both replies")
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
        raise UserError(f"{key} holds {what} (character {found.start() + 1}): {where}. Correct or remove that row")
    return value


def _typed(row: dict, key: str, kind: type, default: Any, where: str) -> Any:
    """What a row may say beside its texts: of `kind`, or the default where it says nothing."""
    value = row.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        expected = {bool: "true or false", str: "text"}[kind]
        raise UserError(f"{key} is {_shown(value)}, not {expected}: {where}. Correct or remove that row")
    return value


def _shown(value: Any) -> str:
    """A value in a fault: one that holds others, however deep, by its kind."""
    kinds = {list: "a list", dict: "an object"}
    return kinds.get(type(value)) or json.dumps(value, default=str)[:40]


GivenPrompt = str | Sequence[dict[str, str]] | dict[str, Any]


def examples_of(prompts: Sequence[GivenPrompt], topics: bool = False) -> list[Example]:
    """Prompts given in Python, each a text, a chat of {"role", "content"}, or a row with a data file's columns, which
    it must be to have a topic. Raises UserError with every fault."""
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

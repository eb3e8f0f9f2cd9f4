"""Data of any shape -> rows with their positions. JSONL and JSON arrays are read here, everything else in tables.py.

The kind of a file is found from its content, then from its suffix.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf.data import tables
from rlhf.data.folders import files_of_split, saved_splits
from rlhf.data.source import DataSource
from rlhf.utils.errors import UserError, print_line, raise_if
from rlhf.utils.paths import local_path, missing_path

Row = tuple[str, Any]  # position for error messages, and the row
_REFUSED = {  # first bytes -> format
    b"\x1f\x8b": "a gzip file",
    b"PK\x03\x04": "a ZIP or Excel file",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"\x80\x04\x95": "a pickle",
    b"SQLite format": "an SQLite database",
}


def read_rows(source: DataSource, say: Callable[[str], None] = print_line) -> list[Row]:
    """Return all rows of a source in order, as (position, row). Raises UserError that lists every row that cannot be
    read."""
    if not source.is_local:
        return tables.read_hub(source)
    if source.dataset_config is not None:
        raise UserError(
            f"--dataset-config is for hub datasets: {source.flag} {source.name}, {source.dataset_config}. Remove it, "
            "or give the folder of that configuration"
        )
    path = Path(local_path(source.name))
    if path.is_dir():
        if saved_splits(path) is not None:
            return tables.read_saved(path, source)
        return _read_files(files_of_split(path, source, say), source)
    if source.dataset_split is not None:
        raise UserError(
            f"a file has no splits: --dataset-split {source.dataset_split}, {source.flag} {source.name}. Remove "
            "--dataset-split"
        )
    if not path.is_file():
        raise missing_path(source.name, "data file", "Give a data file, a folder or a hub dataset's name")
    return read_file(path, source)


def _read_files(files: Sequence[Path], source: DataSource) -> list[Row]:
    """Return the rows of all files. Raises UserError with the problems of every file that cannot be read."""
    rows, problems = [], []
    for file in files:
        try:
            rows += read_file(file, source)
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return rows


def read_file(file: Path, source: DataSource) -> list[Row]:
    """Return the rows of one data file."""
    with file.open("rb") as stream:
        start = stream.read(64)
    refused = next((kind for magic, kind in _REFUSED.items() if start.startswith(magic)), None)
    if refused:
        raise UserError(f"{refused}, not a data file: {file}. Unpack or export it as JSONL, CSV or Parquet")
    if start.startswith(b"PAR1"):
        return tables.read_parquet(file)
    if start.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return tables.read_arrow(file)
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    suffix = file.suffix.lower()
    if suffix in (".parquet", ".arrow"):
        raise UserError(f"not {suffix[1:].capitalize()}, or cut off: {file}. Write the file again")
    text = read_text(file)
    if suffix in (".csv", ".tsv") and first not in (b"{", b"["):
        return tables.read_csv(file, text, source.before_renaming(["rejected_ended"]))
    return list(_array_rows(file, text)) if first == b"[" else _line_rows(file, text)


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {file}, byte {error.start}. Save the file as UTF-8") from None


# --- JSON ------------------------------------------------------------------------------------------------------------


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError for a duplicate key: json.loads would use its last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(n for n in names if names.count(n) > 1)!r}")
    return found


class _OutOfRange(ValueError):
    """A number of a JSON text that a float cannot hold."""


def _float(text: str) -> float:
    """Return a JSON number as a float. Raises _OutOfRange where `float` would return infinity, or 0 for a number that
    is not 0."""
    value = float(text)
    if math.isinf(value) or (value == 0 and re.search("[1-9]", text.lower().partition("e")[0])):
        raise _OutOfRange(f"the number {text:.40} is too {'small' if value == 0 else 'large'} for a float")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_float=_float)
_SPACE = re.compile(r"[ \t\r\n]*")  # JSON's white space
CUT = ". Is the file incomplete?"
AS_TEXT = "Write it as text, in quotes"


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _line_rows(file: Path, text: str) -> list[Row]:
    """Return the rows of a JSONL file. Raises UserError that lists every line that is not JSON."""
    rows, problems, lines = [], [], text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}, {line.strip()[:40]!r}"
        try:
            rows.append((where, _DECODER.decode(line)))
        except _OutOfRange as error:
            problems.append(f"{error}: {where}. {AS_TEXT}")
        except (ValueError, RecursionError) as error:  # also a number with thousands of digits, or deep nesting
            cut = CUT if number == len(lines) else ""
            problems.append(f"not JSON ({_reason(error)}): {where}. Write one JSON object per line{cut}")
    if file.suffix.lower() == ".json" and (
        _is_object(text) if problems else len(rows) == 1 and _holds_rows(rows[0][1])
    ):
        raise UserError(f"one JSON object, not an array of rows: {file}:1. Write [...] around the rows")
    raise_if(problems)
    return rows


def _is_object(text: str) -> bool:
    """True if a text is one JSON object."""
    try:
        return isinstance(_DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def _holds_rows(row: Any) -> bool:
    """True if an object has nothing but one list of objects that are not messages, such as {"data": [...]}."""
    (found, *others) = row.values() if isinstance(row, dict) and row else (None,)
    objects = isinstance(found, list) and found and all(isinstance(value, dict) for value in found)
    return bool(objects and not others and found[0].keys().isdisjoint(("role", "from")))


def _array_rows(file: Path, text: str) -> Iterator[Row]:
    """Yield the elements of a JSON array, with the line on which each starts. Raises UserError for the first element
    that is not JSON: the position of the next one is then unknown."""
    line, counted = 1, 0

    def where(at: int) -> str:
        nonlocal line, counted
        line, counted = line + text.count("\n", counted, at), at
        return f"{file}:{line}, {' '.join(text[at : at + 80].split())[:40]!r}"

    def broken(reason: str, at: int) -> UserError:
        cut = "" if text.rstrip().endswith("]") else CUT
        return UserError(f"not JSON ({reason}): {where(at)}. Write a JSON array of objects{cut}")

    place = _skip(text, _skip(text, 0) + 1)  # after the opening bracket
    closed = text.startswith("]", place)
    while not closed:
        try:
            row, end = _DECODER.raw_decode(text, place)
        except _OutOfRange as error:
            raise UserError(f"{error}: {where(place)}. {AS_TEXT}") from None
        except (ValueError, RecursionError) as error:
            raise broken(_reason(error), place) from None
        yield where(place), row
        place = _skip(text, end)
        closed = text.startswith("]", place)
        if not closed and not text.startswith(",", place):
            raise broken("Expecting ',' or ']'", place)
        place = place if closed else _skip(text, place + 1)
    if _skip(text, place + 1) < len(text):
        raise broken("Extra data after the array", _skip(text, place + 1))


def _skip(text: str, place: int) -> int:
    """Return the position of the next character that is not white space."""
    return _SPACE.match(text, place).end()

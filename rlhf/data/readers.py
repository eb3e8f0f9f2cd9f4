"""Data of any shape -> rows with their positions. JSONL and JSON arrays are read here, everything else in tables.py.

The kind of a file is found from its content, then from its suffix.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.data import tables
from rlhf.data.folders import files_of_split, saved_splits
from rlhf.data.formats import PROMPT_COLUMNS
from rlhf.data.source import DataSource
from rlhf.utils.errors import Problem, UserError, raise_if
from rlhf.utils.paths import local_path, missing_path

Row = tuple[str, Any]  # position for error messages, and the row


def read_rows(source: DataSource) -> list[Row]:
    """Return all rows of a source in order, as (position, row). Raises UserError that lists every row that cannot be
    read."""
    if not source.is_local:
        return tables.read_hub(source)
    if source.dataset_config is not None:
        raise UserError(
            "--dataset-config is for hub datasets",
            f"{source.flag} {source.name}, {source.dataset_config}",
            "Remove it, or give the folder of that configuration",
        )
    path = Path(local_path(source.name))
    if path.is_dir():
        if saved_splits(path) is not None:
            return tables.read_saved(path, source)
        return _read_files(files_of_split(path, source), source)
    source.require_no_split("a file")
    if not path.is_file():
        raise missing_path(
            source.name, "data file", "Give one data file, a folder with several, or a hub dataset's name"
        )
    return read_file(path, source)


def _read_files(files: Sequence[Path], source: DataSource) -> list[Row]:
    """Return the rows of all files. Raises UserError with the problems of every file that cannot be read."""
    rows = []
    problems = []
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
    if start.startswith(b"PAR1"):
        return tables.read_parquet(file)
    if start.startswith(b"\xff\xff\xff\xff"):  # an Arrow stream
        raise UserError(
            "an Arrow file",
            file,
            "Give the folder that save_to_disk wrote, or write Parquet: "
            f"datasets.Dataset.from_file({str(file)!r}).to_parquet('NEW.parquet')",
        )
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        raise UserError("not Parquet, or cut off", file, "Write the file again")
    text = read_text(file)
    if suffix in (".csv", ".tsv") and first not in (b"{", b"["):
        return tables.read_csv(file, text, source.before_renaming(["rejected_ended"]))
    return _array_rows(file, text) if first == b"[" else _line_rows(file, text)


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            "not UTF-8",
            f"{file}, byte {error.start}",
            "Save the file as UTF-8 text (in Excel: CSV UTF-8), and not compressed",
        ) from None


# --- JSON ------------------------------------------------------------------------------------------------------------


CUT = ". Is the file incomplete?"


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _line_rows(file: Path, text: str) -> list[Row]:
    """Return the rows of a JSONL file. Raises UserError that lists every line that is not JSON."""
    if _is_table(text):
        raise UserError(
            "one JSON object with all rows",
            file,
            "Write one object per row: the inner list alone, or DataFrame.to_json(FILE, orient='records')",
        )
    rows = []
    problems = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}, {line.strip()[:40]!r}"
        try:
            rows.append((where, json.loads(line)))
        except (ValueError, RecursionError) as error:  # also a number with thousands of digits, or deep nesting
            fix = "Write one JSON object per line, or an array of objects" + (CUT if number == len(lines) else "")
            problems.append(Problem(f"not JSON ({_reason(error)})", where, fix))
    raise_if(problems)
    return rows


def _is_table(text: str) -> bool:
    """True for one JSON object with all rows: a table by columns, or a list of rows under a name."""
    try:
        values = list(json.loads(text).values())
        firsts = [value[0] for value in values if isinstance(value, list) and value]
        columns = bool(values) and all(isinstance(value, dict) for value in values)
        return columns or any(map(set(PROMPT_COLUMNS).intersection, firsts))
    except (ValueError, RecursionError, AttributeError, TypeError):
        return False


def _array_rows(file: Path, text: str) -> list[Row]:
    """Return the elements of a JSON array. Raises UserError if it is not JSON."""
    try:
        return [(f"{file} row {i}", row) for i, row in enumerate(json.loads(text))]
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        cut = "" if text.rstrip().endswith("]") else CUT
        raise UserError(
            f"not JSON ({_reason(error)})", f"{file}{line}", f"Write a JSON array of objects{cut}"
        ) from None

"""CSV and Parquet files, saved datasets and hub datasets, and the values of tables in memory.

All but CSV are read with `datasets`, which is imported only here.

Files are read into memory without a cache on the disk, so a changed file is never read from an old copy.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.checkpoints.model_folder import find_on_hub
from rlhf.data.folders import choose_split, saved_splits
from rlhf.data.source import DataSource
from rlhf.utils.errors import UserError, advice_for

if TYPE_CHECKING:
    from datasets import Dataset

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # the last bytes of an Arrow stream
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
BATCH = 1000  # rows that are converted to Python objects together: row by row is 15 times slower


def read_csv(file: Path, text: str, true_or_false: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the rows of a CSV file with the content `text`. The separator is a tab in a .tsv file,
    otherwise the first of comma, semicolon and tab that the first line has.

    All cells are text, so that 007 stays 007, except true and false in the columns `true_or_false`. An empty or
    missing cell is null; "NA" and "None" are text.
    """
    if not text.strip():
        return []
    first = text.partition("\n")[0]
    between = "\t" if file.suffix.lower() == ".tsv" else next((s for s in ",;\t" if s in first), ",")
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=between, strict=True)
    try:
        (_, header), *rows = [(lines.line_num, cells) for cells in lines if cells]
    except csv.Error as error:
        if "expected after" in str(error):  # such as "a \"b\" c"
            raise UserError(
                "text after the closing quote of a cell",
                f"{file}:{lines.line_num}",
                'Write a quote inside a cell as two quotes (""), not with a backslash',
            ) from None
        raise _not_csv(str(error), file) from None
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise UserError(f"the column {twice[0]!r} occurs twice", f"{file}:1", "Rename one of them")
    for line, cells in rows:
        if len(cells) > len(header):
            raise _not_csv(f"line {line} has {len(cells)} cells, and the first line has {len(header)}", file)
    if rows and len(rows[-1][1]) < len(header) and not text.endswith(("\n", "\r")):
        raise _not_csv("the last line has fewer cells than the first. Is the file incomplete?", file)
    plain = [name.strip() for name in header]
    names = plain if len(set(plain)) == len(plain) else header
    texts = [dict(zip_longest(names, (cell or None for cell in cells))) for _, cells in rows]
    for row in texts:
        for name in set(true_or_false).intersection(names):
            row[name] = BOOLEANS.get(str(row[name]).strip().lower(), row[name])
    return [(f"{file} row {i}", row) for i, row in enumerate(texts)]


def _not_csv(reason: str, file: Path) -> UserError:
    return UserError(f"not CSV ({reason})", file, "Correct the file, or write it again")


def read_parquet(file: Path) -> list[tuple[str, Any]]:
    """Return the rows of a Parquet file."""

    def read() -> Iterator[Dataset]:
        import pyarrow.parquet
        from datasets import Dataset

        # in parts: the texts of a column with few different ones can be longer together than an Arrow array allows
        for part in pyarrow.parquet.ParquetFile(file).iter_batches(BATCH):
            yield Dataset(pyarrow.Table.from_batches([part]))

    return _read(read, file, "Parquet")


def read_saved(folder: Path, source: DataSource) -> list[tuple[str, Any]]:
    """Return the rows of a folder that `save_to_disk` wrote."""
    splits = saved_splits(folder)
    if splits:
        folder = folder / choose_split(splits, source)
    else:
        source.require_no_split("a saved Dataset")

    def read() -> list[Dataset]:
        from datasets import load_from_disk

        for file in folder.glob("*.arrow"):
            with file.open("rb") as stream:
                stream.seek(max(0, file.stat().st_size - len(END_OF_STREAM)))
                if stream.read() != END_OF_STREAM:  # the rows before would otherwise be read without an error
                    raise ValueError(f"{file.name} has no end-of-stream marker. Is the file incomplete?")
        return [load_from_disk(str(folder), keep_in_memory=True)]

    return _read(read, folder, "a saved dataset")


def read_hub(source: DataSource) -> list[tuple[str, Any]]:
    """Return the rows of a split of a hub dataset: the usual one if --dataset-split is not given."""
    from datasets import load_dataset

    place = find_on_hub(source.name, "dataset", "a data file")
    split = source.dataset_split or source.usual_split
    try:
        return _rows(source.name, [load_dataset(place, name=source.dataset_config, split=split)])
    except Exception as error:  # the exceptions of `datasets` and of the readers below it have no common class
        flags = [("--dataset-config", source.dataset_config), ("--dataset-split", source.dataset_split)]
        given = "".join(f", {flag} {value}" for flag, value in flags if value is not None)
        fix = "Give a --dataset-config and a --dataset-split that it has"
        if source.usual_split != "train":  # those of --dataset-split are the training prompts
            fix = f"It needs a split {split!r}: save other rows as a file, and give the file"
        raise UserError(
            f"cannot read the hub dataset ({_innermost(error)})",
            f"{source.flag} {source.name}{given}",
            advice_for(error, fix),
        ) from None


def _read(read: Callable[[], Iterable[Dataset]], place: Path, kind: str) -> list[tuple[str, Any]]:
    """Return the rows of datasets. Raises UserError with one line if the data is broken."""
    try:
        return _rows(place, read())
    except MemoryError:
        raise
    except Exception as error:  # as in `read_hub`
        fix = advice_for(error, "Correct the file, or write it again")
        raise UserError(f"not {kind} ({_innermost(error)})", place, fix) from None


def _innermost(error: BaseException) -> str:
    """Return the text of the innermost error on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__


def _rows(place: Any, datasets: Iterable[Dataset]) -> list[tuple[str, Any]]:
    """Return the rows of all datasets with their positions, counted from 0 as in `datasets`."""
    batches = (batch for dataset in datasets for batch in dataset.iter(BATCH))
    rows = (dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True))
    return [(f"{place} row {i}", row) for i, row in enumerate(rows)]


def plain(value: Any) -> Any:
    """Return a value of a table in memory as the file of that table gives it: lists in place of arrays and tuples,
    Python's numbers and texts in place of numpy's, and None in place of NaN, NaT and pandas.NA, at every depth."""
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind in "mM":  # tolist() would return nanoseconds as integers
            value = value.astype(f"{value.dtype.kind}8[us]")
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    is_nan = isinstance(value, (float, datetime)) and value != value  # NaT is a datetime
    return None if is_nan or type(value).__name__ == "NAType" else value  # pandas.NA, without importing pandas

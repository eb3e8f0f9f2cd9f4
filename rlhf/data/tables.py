"""CSV, Parquet and Arrow files, saved datasets and hub datasets, read with `datasets`, which is imported only here.

Files are read into memory without a cache on the disk, so a changed file is never read from an old copy.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.checkpoints.model_folder import find_on_hub
from rlhf.data.folders import choose_split, saved_splits
from rlhf.data.source import DataSource
from rlhf.utils.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # the last bytes of an Arrow stream
BATCH = 1000  # rows that are converted to Python objects together: row by row is 15 times slower


def read_csv(file: Path, text: str, true_or_false: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the rows of a CSV file with the content `text`. The separator is a tab in a .tsv file,
    otherwise the first of comma, semicolon and tab that the first line has.

    All cells are text, so that 007 stays 007, except those of the columns `true_or_false`. An empty cell is null; "NA"
    and "None" are text.
    """
    first = text.partition("\n")[0]
    between = "\t" if file.suffix.lower() == ".tsv" else next((s for s in ",;\t" if s in first), ",")
    header = next(csv.reader(text.splitlines(), delimiter=between), [])
    _check_quotes(file, text, between)
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise UserError(f"the column {twice[0]!r} occurs twice: {file}:1. Rename one of them")
    if not text.strip():
        return []
    plain = [name.strip() for name in header]
    names = plain if len(set(plain)) == len(plain) else header
    kinds = ["boolean" if name in true_or_false else "string" for name in names]

    def read() -> Dataset:
        import pandas
        from datasets import Dataset

        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # a row with more cells than the header
            try:
                frame = pandas.read_csv(
                    io.StringIO(text),
                    sep=between,
                    index_col=False,
                    keep_default_na=False,
                    na_values=[""],
                    dtype=dict(zip(header, kinds, strict=True)),
                    low_memory=False,
                )
            except pandas.errors.ParserWarning:
                raise ValueError(_long_row(text, between, len(header))) from None
        if not text.endswith(("\n", "\r", '"', between)) and frame.iloc[-1:, -1].isna().any():
            raise ValueError("the last line has fewer cells than the first. Is the file incomplete?")
        return Dataset.from_pandas(frame.set_axis(names, axis=1), preserve_index=False)

    return _read(read, file, "CSV")


def _check_quotes(file: Path, text: str, between: str) -> None:
    """Raise UserError for a CSV cell with text after its closing quote, such as "a \\"b\\" c". Without this check,
    pandas would read another text."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=between, strict=True)
    try:
        for _ in rows:
            pass
    except csv.Error as error:
        if "expected after" not in str(error):
            return  # pandas reports the other errors
        raise UserError(
            f"text after the closing quote of a cell: {file}:{rows.line_num}. Write a quote inside a cell as two "
            'quotes (""), not with a backslash'
        ) from None


def _long_row(text: str, between: str, columns: int) -> str:
    """Return the error for the first row of a CSV file with more cells than columns."""
    rows = csv.reader(io.StringIO(text), delimiter=between)
    line, cells = next(((rows.line_num, len(row)) for row in rows if len(row) > columns), ("?", "more"))
    return f"line {line} has {cells} cells, and the first line has {columns}"


def read_parquet(file: Path) -> list[tuple[str, Any]]:
    """Return the rows of a Parquet file."""

    def read() -> Dataset:
        import pyarrow.parquet
        from datasets import Dataset

        table = pyarrow.parquet.ParquetFile(file).read()
        for column in table.schema:
            if pyarrow.types.is_map(column.type):  # `datasets` has no such type
                raise UserError(f"the column {column.name!r} is a map: {file}. Remove it, or write it as a struct")
        return Dataset(table)

    return _read(read, file, "Parquet")


def read_arrow(file: Path) -> list[tuple[str, Any]]:
    """Return the rows of an Arrow file: the stream format, which `datasets` writes, or the file format."""

    def read() -> Dataset:
        import pyarrow
        from datasets import Dataset

        with pyarrow.memory_map(str(file)) as stream:
            is_file = stream.read(6) == b"ARROW1"
            stream.seek(0)
            if not is_file:
                _check_end(file)
            reader = pyarrow.ipc.open_file(stream) if is_file else pyarrow.ipc.open_stream(stream)
            return Dataset(reader.read_all())

    return _read(read, file, "Arrow")


def _check_end(file: Path) -> None:
    """Raise ValueError if an Arrow stream lacks its end: the rows before would otherwise be read without an error."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - len(END_OF_STREAM)))
        if stream.read() != END_OF_STREAM:
            raise ValueError(f"{file.name} has no end-of-stream marker. Is the file incomplete?")


def read_saved(folder: Path, source: DataSource) -> list[tuple[str, Any]]:
    """Return the rows of a folder that `save_to_disk` wrote."""
    splits = saved_splits(folder)
    if splits:
        folder = folder / choose_split(splits, source)
    elif source.dataset_split is not None:
        raise UserError(
            f"a saved Dataset has no splits: --dataset-split {source.dataset_split}, {source.flag} {source.name}. "
            "Remove --dataset-split"
        )

    def read() -> Dataset:
        from datasets import load_from_disk

        for file in folder.glob("*.arrow"):
            _check_end(file)
        return load_from_disk(str(folder), keep_in_memory=True)

    return _read(read, folder, "a saved dataset")


def read_hub(source: DataSource) -> list[tuple[str, Any]]:
    """Return the rows of a split of a hub dataset: the usual one if --dataset-split is not given."""
    from datasets import load_dataset

    place = find_on_hub(source.name, "dataset", "a data file")
    try:
        split = source.dataset_split or source.usual_split
        return _rows(source.name, load_dataset(place, name=source.dataset_config, split=split))
    except Exception as error:  # the exceptions of `datasets` and of the readers below it have no common class
        flags = [("--dataset-config", source.dataset_config), ("--dataset-split", source.dataset_split)]
        given = "".join(f", {flag} {value}" for flag, value in flags if value is not None)
        raise UserError(
            f"cannot read the hub dataset ({_reason(error)}): {source.flag} {source.name}{given}. "
            f"{_choices(place, source)}"
        ) from None


def _choices(place: str, source: DataSource) -> str:
    """Return what --dataset-config and --dataset-split can be for a hub dataset, as far as that can be found."""
    from datasets import get_dataset_config_names, get_dataset_split_names

    def names(of: Callable[..., list[str]], *arguments: str | None) -> list[str]:
        try:
            return of(place, *arguments)
        except Exception:  # as in `read_hub`; a hint must not hide the error
            return []

    configs = names(get_dataset_config_names)
    if (source.dataset_config is None and len(configs) > 1) or (
        configs and source.dataset_config not in (None, *configs)
    ):
        return f"Choose --dataset-config from {', '.join(configs)}"
    splits = names(get_dataset_split_names, source.dataset_config)
    if splits and (source.dataset_split or source.usual_split) not in splits:
        if source.usual_split != "train":
            return (
                f"It has no split {source.usual_split!r}. Save one of {', '.join(splits)} to a file and give that file"
            )
        return f"Choose --dataset-split from {', '.join(splits)}"
    return "Check the dataset on the hub"


def _read(read: Callable[[], Dataset], place: Path, kind: str) -> list[tuple[str, Any]]:
    """Return the rows of a dataset. Raises UserError with one line if the data is broken."""
    try:
        return _rows(place, read())
    except (MemoryError, UserError):
        raise
    except Exception as error:  # as in `read_hub`
        raise UserError(f"not {kind} ({_reason(error)}): {place}. Correct the file, or write it again") from None


def _reason(error: BaseException) -> str:
    """Return the text of the innermost error on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__


def _rows(place: Any, dataset: Dataset) -> list[tuple[str, Any]]:
    """Return rows with their positions, counted from 0 as in `datasets`."""
    batches = (zip(*batch.values(), strict=True) for batch in dataset.iter(BATCH))
    rows = (dict(zip(dataset.column_names, values, strict=True)) for batch in batches for values in batch)
    return [(f"{place} row {i}", row) for i, row in enumerate(rows)]

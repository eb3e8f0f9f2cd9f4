"""CSV, Parquet and Arrow files, saved datasets and hub datasets, read with `datasets`, which is imported only here.

Files are read into memory without a cache on the disk, so a changed file is never read from an old copy. In the rows,
a column without a value is missing.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.data.folders import choose_split, saved_splits
from rlhf.data.source import DataSource
from rlhf.utils.errors import UserError
from rlhf.utils.hub import require_hub

if TYPE_CHECKING:
    from datasets import Dataset

BATCH = 1000  # rows that are converted to Python objects together: row by row is 15 times slower


def read_csv(file: Path, text: str, text_columns: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the rows of a CSV file with the content `text`. The separator is a tab in a .tsv file,
    otherwise the first of comma, semicolon and tab that the first line has.

    An empty cell is a missing value; "NA" and "None" are text. Cells of `text_columns` are text, also those that look
    like numbers.
    """
    first = text.partition("\n")[0]
    between = "\t" if file.suffix.lower() == ".tsv" else next((s for s in ",;\t" if s in first), ",")
    header = next(csv.reader(text.splitlines(), delimiter=between), [])
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise UserError(f"the column {twice[0]!r} occurs twice: {file}:1. Rename one of them")
    if not text.strip():
        return []

    def read() -> Dataset:
        import pandas
        from datasets import Dataset

        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # a row with more cells than the header
            frame = pandas.read_csv(
                io.StringIO(text),
                sep=between,
                index_col=False,
                keep_default_na=False,
                na_values=[""],
                dtype_backend="numpy_nullable",  # whole numbers stay whole numbers in a column with missing values
                dtype=dict.fromkeys(text_columns, "string"),
                low_memory=False,  # otherwise a column could have different types in different parts of the file
            )
        if not text.endswith(("\n", "\r", '"', between)) and frame.iloc[-1:, -1].isna().any():
            raise ValueError("the last line has fewer cells than the first. Is the file incomplete?")
        return Dataset.from_pandas(frame, preserve_index=False)

    return _read(read, file, "CSV")


def read_parquet(file: Path) -> list[tuple[str, Any]]:
    """Return the rows of a Parquet file."""

    def read() -> Dataset:
        import pyarrow.parquet
        from datasets import Dataset

        return Dataset(pyarrow.parquet.ParquetFile(file).read())

    return _read(read, file, "Parquet")


def read_arrow(file: Path) -> list[tuple[str, Any]]:
    """Return the rows of an Arrow file: the stream format, which `datasets` writes, or the file format."""

    def read() -> Dataset:
        import pyarrow
        from datasets import Dataset

        with pyarrow.memory_map(str(file)) as stream:
            is_file = stream.read(6) == b"ARROW1"
            stream.seek(0)
            reader = pyarrow.ipc.open_file(stream) if is_file else pyarrow.ipc.open_stream(stream)
            return Dataset(reader.read_all())

    return _read(read, file, "Arrow")


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

        return load_from_disk(str(folder), keep_in_memory=True)

    return _read(read, folder, "a saved dataset")


def read_hub(source: DataSource) -> list[tuple[str, Any]]:
    """Return the rows of a split of a hub dataset: "train" if --dataset-split is not given."""
    from datasets import load_dataset

    place = require_hub(source.name, "dataset", "a data file")
    try:
        split = source.dataset_split or "train"
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
    if splits and (source.dataset_split or "train") not in splits:
        return f"Choose --dataset-split from {', '.join(splits)}"
    return "Check the dataset on the hub"


def _read(read: Callable[[], Dataset], place: Path, kind: str) -> list[tuple[str, Any]]:
    """Return the rows of a dataset. Raises UserError with one line if the data is broken."""
    try:
        return _rows(place, read())
    except MemoryError:
        raise
    except Exception as error:  # as in `read_hub`
        raise UserError(f"not {kind} ({_reason(error)}): {place}. Correct the file, or write it again") from None


def _reason(error: BaseException) -> str:
    """Return the text of the innermost error on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__


def _rows(place: Any, dataset: Dataset) -> list[tuple[str, Any]]:
    """Return rows with their positions, counted from 0 as in `datasets`, without the columns that have no value."""
    batches = (zip(*batch.values(), strict=True) for batch in dataset.iter(BATCH))
    rows = (zip(dataset.column_names, values, strict=True) for batch in batches for values in batch)
    return [(f"{place} row {i}", {name: v for name, v in row if v is not None}) for i, row in enumerate(rows)]

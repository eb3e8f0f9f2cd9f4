"""Folders of data: which files belong to a split. Imports no `datasets`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rlhf.data.source import DataSource
from rlhf.utils.errors import Problem, UserError, did_you_mean

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
OF_MODELS = ("config.json", "adapter_config.json", "run.json")  # files of a model or a run
SPLITS = {  # split -> words in the names of its files and folders, as in `datasets`
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def saved_splits(folder: Path) -> list[str] | None:
    """Return the splits in a folder that `save_to_disk` wrote: empty for a single Dataset. None for other folders."""
    file = folder / "dataset_dict.json"
    if file.is_file():
        try:
            return list(json.loads(file.read_text(encoding="utf-8"))["splits"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UserError("incomplete or corrupted", file, "Save the dataset again with save_to_disk") from None
    return [] if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file() else None


def choose_split(splits: list[str], source: DataSource) -> str:
    """Return the split to read: that of --dataset-split, otherwise the usual one ("train") or the only one."""
    wanted = source.dataset_split
    known = f"the splits are {', '.join(splits)}"
    usual = source.usual_split
    if wanted is None and (usual in splits or len(splits) == 1):
        return usual if usual in splits else splits[0]
    if wanted is None:
        fix = "Choose one with --dataset-split" if usual == "train" else "Give the files of one split"
        raise UserError(f"no split {usual!r}", f"{source.flag} {source.name}, {known}", fix)
    if wanted not in splits:
        near = did_you_mean(wanted, splits, "Choose one of them")
        raise UserError(f"no split {wanted!r}", f"{source.flag} {source.name}, {known}", near.strip())
    return wanted


def files_of_split(folder: Path, source: DataSource) -> list[Path]:
    """Return the data files of the chosen split in a folder and the folders in it, by name. If no file name contains
    the name of a split, all files belong to "train"."""
    found = [name for name in OF_MODELS if (folder / name).is_file()]
    if found:
        raise UserError(
            f"this is the folder of a model or a run, not of data ({found[0]})",
            f"{source.flag} {source.name}",
            "Give one data file, a folder with several, or a hub dataset's name",
        )
    files = _data_files(folder, source)
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        splits.setdefault(split_of(file.relative_to(folder)), []).append(file)
    if list(splits) == [None]:
        splits = {"train": files}
    ignored = splits.pop(None, [])
    if ignored and source.dataset_split is None:
        split = "train" if "train" in splits else next(iter(splits))
        raise UserError(
            "only some of the files have the name of a split",
            f"{source.flag} {source.name}, {splits[split][0].name} belongs to {split!r}, {ignored[0].name} to none",
            f"Add --dataset-split {split} to read only files with that name, or rename or move files",
        )
    return splits[choose_split([str(name) for name in splits], source)]


def _data_files(folder: Path, source: DataSource) -> list[Path]:
    """Return the data files in a folder and in the folders inside it, without hidden ones. Raises UserError if there
    are none, or if some are compressed."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    everything = sorted(path for path in paths if not any(part.startswith((".", "__")) for part in path.parts))
    packed = [file for file in everything if file.suffix in COMPRESSED and Path(file.stem).suffix in SUFFIXES]
    if packed:
        raise UserError(
            [Problem("a compressed data file", f"{folder / file}", "Unpack it, or move it away") for file in packed]
        )
    files = [folder / file for file in everything if file.suffix.lower() in SUFFIXES and file.name not in NOT_DATA]
    if not files:
        raise UserError(
            "no data files in this folder",
            f"{source.flag} {source.name}",
            f"Data files end with {', '.join(SUFFIXES)}",
        )
    return files


def split_of(file: Path) -> str | None:
    """Return the split in a file's name, otherwise that in the name of its folder, or None. A word counts if no
    letter is next to it: `train-00000-of-00002.parquet`, but not `trainer.json`."""
    for part in (file.stem, *reversed(file.parts[:-1])):
        for split, words in SPLITS.items():
            if re.search(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", part.lower()):
                return split
    return None

"""Where data comes from: the settings that describe one source."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rlhf.settings.reward_model import RewardDataSettings
from rlhf.settings.training import DataSettings
from rlhf.settings.types import Renaming
from rlhf.utils.errors import UserError
from rlhf.utils.files import file_state
from rlhf.utils.paths import exists, is_path, local_path

T = TypeVar("T")

MAX_BAD_PERCENT = {True: 0.0, False: 1.0}  # is local -> rows that may be skipped if --skip-bad-rows is not given


@dataclass(frozen=True)
class DataSource:
    """A data file, a folder or a hub dataset, and how to read it."""

    name: str
    dataset_config: str | None = None
    dataset_split: str | None = None
    columns: tuple[Renaming, ...] = ()
    skip_bad_rows: float | None = None  # percent; None: 0 for files, 1 for hub datasets
    flag: str = "--prompts"  # the flag that gave the name, for messages
    usual_split: str = "train"  # without `dataset_split`

    @classmethod
    def of(cls, data: DataSettings | RewardDataSettings) -> DataSource:
        """Return the source that a group of settings describes."""
        name, flag = (data.prompts, "--prompts") if isinstance(data, DataSettings) else (data.pairs, "--pairs")
        return cls(name, data.dataset_config, data.dataset_split, data.columns, data.skip_bad_rows, flag)

    @classmethod
    def of_evaluation(cls, data: DataSettings) -> DataSource:
        """Return the source of --eval-dataset, which must be set."""
        source = cls(data.eval_dataset, None, None, data.columns, data.skip_bad_rows, "--eval-dataset", "test")
        return source if source.is_local else replace(source, dataset_config=data.dataset_config)

    @property
    def is_local(self) -> bool:
        return is_path(self.name) or exists(self.name)

    @property
    def files(self) -> list[Path]:
        """The files of a local source: all in a folder."""
        path = Path(local_path(self.name))
        return [file for file in (path, *sorted(path.rglob("*"))) if file.is_file()]

    @property
    def bad_percent(self) -> float:
        """The largest percentage of rows that may be skipped because they cannot be used."""
        return MAX_BAD_PERCENT[self.is_local] if self.skip_bad_rows is None else self.skip_bad_rows

    def require_no_split(self, what: str) -> None:
        """Raise UserError if --dataset-split is given: `what` has no splits."""
        if self.dataset_split is not None:
            place = f"--dataset-split {self.dataset_split}, {self.flag} {self.name}"
            raise UserError(f"{what} has no splits", place, "Remove --dataset-split")

    def before_renaming(self, names: Iterable[str]) -> list[str]:
        """Return the names that columns have in the data, given their new names."""
        olds = {c.new: c.old for c in self.columns}
        return [olds.get(name, name) for name in names]

    def rename(self, row: dict) -> dict:
        """Return a row with the columns renamed."""
        names = {c.old: c.new for c in self.columns}
        return {names.get(name, name): value for name, value in row.items()} if names else row


_last_read: dict[Hashable, Any] = {}  # one entry: data may be large


def read_once(settings: Hashable, sources: Sequence[DataSource], read: Callable[[], T]) -> T:
    """Return `read()`, or its result of the last call if that had the same settings, and no file has changed since:
    a command reads and checks its data before it imports torch, prints the notes, and uses the rows for every seed.
    What prints the notes belongs to the settings, so that each screen of a program has them. Data on the hub is
    always read."""
    if not all(source.is_local for source in sources):
        return read()
    key = (settings, *(file_state(file) for source in sources for file in source.files))
    if key not in _last_read:
        _last_read.clear()
        _last_read[key] = read()
    return _last_read[key]

"""Reads a run's scalars from its TensorBoard event files, and writes them as a CSV table."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from rlhf.algorithms.kl_control import KLController, kl_controller
from rlhf.algorithms.table import label_of
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run
from rlhf.settings.training import Config
from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.files import atomic_write

FRAME = 16  # bytes per record of an event file besides its data: length, checksum of the length, checksum of the data
LARGEST_RECORD = 1 << 16  # bytes; a scalar needs less than 1,000, so a longer length field is damaged
COLUMNS = ("run", "algorithm", "seed", "update", "episodes", "seconds", "group")


@dataclass(frozen=True)
class Curve:
    """One scalar over a run. Each array has shape (P,)."""

    updates: np.ndarray  # ascending; update 0 is the evaluation of the start model
    values: np.ndarray  # in the scalar's unit; nan and inf are kept
    seconds: np.ndarray  # of training since the run's first point, without pauses between sessions

    @property
    def finite(self) -> np.ndarray:
        """The values, with nan for each value that is not finite."""
        return np.where(np.isfinite(self.values), self.values, np.nan)


@dataclass(frozen=True)
class RunCurves:
    """A run and all scalars that it logged."""

    folder: Path
    run: RunRecord
    config: Config
    scalars: dict[str, Curve]
    remarks: list[str]  # problems found in the data, one line each

    @property
    def algorithm(self) -> str:
        return self.config.algorithm

    @property
    def planned(self) -> int:
        """The number of updates that the run is planned for."""
        return self.run.plan.updates

    @property
    def episodes_per_update(self) -> int:
        return self.run.plan.episodes // self.planned

    def episodes_at(self, updates: np.ndarray) -> np.ndarray:
        """Returns the episodes sampled up to these updates (P,), with those that dynamic sampling drew in addition.

        A run with dynamic sampling logs them after each update that is not skipped.
        """
        logged = self.scalars.get("episodes")
        if logged is None:
            return np.asarray(updates) * self.episodes_per_update
        known, counts = np.append(0, logged.updates), np.append(0, logged.values)
        last = np.searchsorted(known, updates, side="right") - 1
        return np.rint(counts[last] + (updates - known[last]) * self.episodes_per_update).astype(int)

    @property
    def length_in_episodes(self) -> int | str:
        """The planned number of episodes; with dynamic sampling it is not known, and this is the run's folder."""
        return str(self.folder) if "episodes" in self.scalars else self.run.plan.episodes

    @property
    def last_update(self) -> int:
        """The highest update among the curves."""
        return max(int(curve.updates[-1]) for curve in self.scalars.values())

    @property
    def targets(self) -> KLController | None:
        """The KL targets over the run; None if beta is fixed and no target is set."""
        kl = self.config.kl
        if not kl.steered and kl.kl_target is None:
            return None
        return kl_controller(self.config, self.planned)

    @property
    def aim(self) -> str:
        """The KL targets as text. Runs with the same targets have the same text."""
        held = self.targets
        if held is None:
            return "none"
        starts = f" (from {', '.join(f'{b:.0%}' for b in held.boundaries)} of the run)" if held.boundaries else ""
        return " then ".join(map(str, held.targets)) + starts + (" (beta fixed)" if held.horizon is None else "")

    @property
    def seconds(self) -> float:
        """Training time up to the last point."""
        return max(float(curve.seconds[-1]) for curve in self.scalars.values())


def read_runs(folders: Sequence[Path]) -> list[RunCurves]:
    """Returns the curves of every run. Raises UserError with all problems, such as a folder without a run."""
    runs, problems, seen = [], [], set()
    for folder in folders:
        try:
            if folder.resolve() in seen:
                raise UserError(f"the same run is given twice: {folder}. Give each run once")
            seen.add(folder.resolve())
            runs.append(read_curves(folder))
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return runs


def read_curves(folder: Path) -> RunCurves:
    """Returns a run's curves. Raises UserError if `folder` is not a run or has no scalars."""
    run = RunRecord.require(folder, "run")
    running = run.status == "running"
    scalars, remarks = read_scalars(folder / "logs", running)
    if not scalars:
        hint = "Try again after its first update" if running else "This run logged nothing: choose another run"
        raise UserError(f"no scalars yet: {folder / 'logs'}. {' '.join([*(f'{r}.' for r in remarks), hint])}")
    return RunCurves(folder, run, config_of_run(run), scalars, [*remarks, *_not_finite(folder, scalars)])


def _not_finite(folder: Path, scalars: dict[str, Curve]) -> list[str]:
    """Returns one line that counts nan and infinite values; empty if there are none."""
    counts = {tag: int((~np.isfinite(curve.values)).sum()) for tag, curve in sorted(scalars.items())}
    bad = [f"{tag} {count} of {len(scalars[tag].values)}" for tag, count in counts.items() if count]
    return [f"{folder}: values that are not finite ({', '.join(bad)}) are gaps in the plot"] if bad else []


def read_scalars(logs: Path, running: bool = False) -> tuple[dict[str, Curve], list[str]]:
    """Returns all scalars of a folder of event files by tag, and one remark per file with unreadable data.

    No point is left out. A resumed run has one file per session. The times of the events are those of
    `RunLog.training_time`, which continues in the next session.
    """
    sessions, remarks = [], []
    for file in sorted(logs.glob("*tfevents*"), key=_session_of):
        events, unread = _read_file(file)
        sessions.append(events)
        if unread:
            remarks.append(_remark(file, events, unread, running))
    points = _Points()
    for events in sessions:
        points.add_session(events)
    return points.curves(), remarks


def _session_of(file: Path) -> tuple[int, str]:
    """Returns the sort key of an event file: the number of its session, with which TensorBoardLog ends its name."""
    number = file.suffix[1:]
    return (int(number) if number.isdecimal() else 0), file.name


def _read_file(file: Path) -> tuple[list[Event], int]:
    """Returns a file's events and the number of unreadable bytes at its end."""
    try:
        size = file.stat().st_size  # read first: data appended by a running run is not counted as unreadable
        records = list(RawEventFileLoader(str(file)).Load())
    except OSError as error:
        raise UserError(f"cannot read {file} ({error.strerror}). Check its permissions") from None
    # the reader stops without an error at an incomplete or damaged record
    unread = size - sum(len(record) + FRAME for record in records)
    return [Event.FromString(record) for record in records], max(unread, 0)


def _remark(file: Path, events: Iterable[Event], unread: int, running: bool) -> str:
    """Returns a line on a file with `unread` unreadable bytes at its end."""
    with file.open("rb") as opened:
        opened.seek(-unread, 2)
        length = int.from_bytes(opened.read(8), "little")
    read = max((event.step for event in events if event.summary.value), default=None)
    shown = "no data before it" if read is None else f"the data before it is used, up to update {read}"
    if unread < 8 or unread < length + FRAME <= LARGEST_RECORD:
        why = "still being written, or the file is cut off" if running else "the file is cut off"
        return f"{file}: the last record is incomplete ({why}); {shown}"
    return f"{file}: a record is damaged and the data after it is lost ({unread:,} bytes); {shown}"


class _Points:
    """The points by tag after the events so far. Later events replace earlier ones."""

    def __init__(self):
        self.by_tag: dict[str, list[tuple[int, float, float]]] = defaultdict(list)  # update, value, time

    def add_session(self, events: Sequence[Event]) -> None:
        """Adds one file's events."""
        for event in events:
            if event.session_log.status == SessionLog.START:
                for points in self.by_tag.values():
                    _cut(points, event.step)
            for value in event.summary.value:
                if not value.HasField("simple_value"):
                    continue
                points = self.by_tag[value.tag]
                _cut(points, event.step)
                points.append((event.step, value.simple_value, event.wall_time))

    def curves(self) -> dict[str, Curve]:
        known = {tag: list(zip(*points, strict=True)) for tag, points in self.by_tag.items() if points}
        start = min((times[0] for _, _, times in known.values()), default=0.0)
        return {
            tag: Curve(np.array(updates), np.array(values, dtype=float), np.array(times) - start)
            for tag, (updates, values, times) in known.items()
        }


def _cut(points: list[tuple[int, float, float]], update: int) -> None:
    """Removes the points from `update` on, because a resumed run logs them again."""
    while points and points[-1][0] >= update:
        points.pop()


def running_mean(updates: np.ndarray, values: np.ndarray, span: int) -> np.ndarray:
    """Returns (P,) means of the finite values of the last `span` updates; nan if the value itself is not finite.

    Each window is summed separately: in one running sum a spike of 1e20 would ruin all later means.
    """
    finite = np.isfinite(values)
    first = np.searchsorted(updates, updates - span, side="right")
    # reduceat sums from each index to the next one, so every second sum is a window
    edges = np.column_stack([first, np.arange(len(updates)) + 1]).ravel()
    total, count = (
        np.add.reduceat(np.append(part, 0.0), edges)[::2] for part in (np.where(finite, values, 0), finite * 1.0)
    )
    return np.divide(total, count, out=np.full(len(values), np.nan), where=finite)


def seeds_band(xs: Sequence[np.ndarray], lines: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Returns x and the lowest, mean and highest value (G,) of the runs' lines over the range that all runs cover.

    If a run has no point at an x of another run, its value is interpolated linearly.
    """
    if len(lines) == 1:
        return xs[0], lines[0], lines[0], lines[0]
    start, end = max(x[0] for x in xs), min(x[-1] for x in xs)
    x = np.unique(np.concatenate(xs))
    x = x[(start <= x) & (x <= end)]
    rows = np.stack([np.interp(x, own_x, line) for own_x, line in zip(xs, lines, strict=True)])
    return x, rows.min(0), rows.mean(0), rows.max(0)


def write_table(runs: Sequence[RunCurves], file: Path, groups: Mapping[Path, str] | None = None) -> int:
    """Writes all scalars as CSV, one row per run and update, and returns the number of rows.

    Numbers keep their full precision. A cell is empty if the scalar was not logged at that update. `groups` has the
    name of the group of each run's folder; None: each algorithm is a group.
    """
    tags = sorted({tag for run in runs for tag in run.scalars})
    rows = [row for run in runs for row in _rows(run, tags, (groups or {}).get(run.folder, label_of(run.algorithm)))]

    def write(staging: Path) -> None:
        with staging.open("w", newline="", encoding="utf-8") as opened:
            csv.writer(opened).writerows([[*COLUMNS, *tags], *rows])

    atomic_write(file, write)
    return len(rows)


def _rows(run: RunCurves, tags: Sequence[str], group: str) -> Iterable[list[Any]]:
    """Yields a run's rows. `seconds` is the time of the update's first scalar, before its evaluation."""
    values: dict[int, dict[str, float]] = defaultdict(dict)
    seconds: dict[int, float] = {}
    for tag, curve in run.scalars.items():
        for update, value, s in zip(
            curve.updates.tolist(), curve.values.tolist(), curve.seconds.tolist(), strict=True
        ):
            values[update][tag] = value
            seconds[update] = min(s, seconds.get(update, s))
    episodes = run.episodes_at(np.array(sorted(values))).tolist()
    for update, sampled in zip(sorted(values), episodes, strict=True):
        facts = [run.folder, run.algorithm, run.run.seed, update, sampled]
        cells = (values[update].get(tag) for tag in tags)
        yield [*facts, f"{seconds[update]:.3f}", group, *("" if cell is None else repr(cell) for cell in cells)]

"""A run's scalars, read back from its event files with TensorBoard's own reader, and the table of them."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from rlhf.algorithms.kl_control import KLController, kl_controller
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run
from rlhf.settings.training import Config
from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.files import atomic_write

FRAME = 16  # bytes around each record of an event file: length, its checksum, the record's checksum
LARGEST_RECORD = 1 << 16  # bytes; a scalar takes less than 1,000: a longer one was never written
# tags of runs that an earlier version logged -> today's
RENAMED_TAGS = {"reply/length": "completions/mean_length", "reply/eos_rate": "completions/eos_rate"}
COLUMNS = ("run", "algorithm", "seed", "update", "episodes", "seconds")


@dataclass(frozen=True)
class Curve:
    """One scalar over a run, (P,) each."""

    updates: np.ndarray  # rising; 0 is the start model's evaluation
    values: np.ndarray  # in the scalar's unit; nan and inf as they were logged
    seconds: np.ndarray  # since the run's first point, without the pauses between sessions

    @property
    def finite(self) -> np.ndarray:
        """The values, nan where they are not finite."""
        return np.where(np.isfinite(self.values), self.values, np.nan)


@dataclass(frozen=True)
class RunCurves:
    """A run and everything it logged."""

    folder: Path
    run: RunRecord
    config: Config
    scalars: dict[str, Curve]
    remarks: list[str]  # what a reader of the curves must know, a line each

    @property
    def algorithm(self) -> str:
        return self.config.algorithm

    @property
    def planned(self) -> int:
        """Updates of the whole run."""
        return self.run.plan.updates

    @property
    def episodes_per_update(self) -> int:
        return self.run.plan.episodes // self.planned

    @property
    def last_update(self) -> int:
        """The last one that was read."""
        return max(int(curve.updates[-1]) for curve in self.scalars.values())

    @property
    def targets(self) -> KLController | None:
        """The KL targets over the run; None where beta is fixed and no target was named either."""
        kl = self.config.kl
        if not kl.steered and kl.kl_target is None:
            return None
        return kl_controller(self.config, self.planned)

    @property
    def aim(self) -> str:
        """The KL targets in words; the same for two runs where one target serves both."""
        held = self.targets
        if held is None:
            return "none"
        starts = f" (from {', '.join(f'{b:.0%}' for b in held.boundaries)} of the run)" if held.boundaries else ""
        return " then ".join(map(str, held.targets)) + starts + (" (beta fixed)" if held.horizon is None else "")

    @property
    def seconds(self) -> float:
        """Of training, up to the last point."""
        return max(float(curve.seconds[-1]) for curve in self.scalars.values())


def read_runs(folders: Sequence[Path]) -> list[RunCurves]:
    """Every run's curves. Raises UserError with all problems: no run, named twice, nothing logged."""
    runs, problems, seen = [], [], set()
    for folder in folders:
        try:
            if folder.resolve() in seen:
                raise UserError(f"a run is named twice: {folder}. Name each once")
            seen.add(folder.resolve())
            runs.append(read_curves(folder))
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return runs


def read_curves(folder: Path) -> RunCurves:
    """A run's curves. Raises UserError where `folder` is no run, or nothing was logged."""
    run = RunRecord.require(folder, "run")
    running = run.status == "running"
    scalars, remarks = read_scalars(folder / "logs", running)
    if not scalars:
        hint = "Try again after its first update" if running else "Name another run: this one logged none"
        raise UserError(f"no scalars yet: {folder / 'logs'}. {' '.join([*(f'{r}.' for r in remarks), hint])}")
    return RunCurves(folder, run, config_of_run(run), scalars, [*remarks, *_not_finite(folder, scalars)])


def _not_finite(folder: Path, scalars: dict[str, Curve]) -> list[str]:
    """A line that counts the values that are nan or infinite, where there are any."""
    counts = {tag: int((~np.isfinite(curve.values)).sum()) for tag, curve in sorted(scalars.items())}
    bad = [f"{tag} {count} of {len(scalars[tag].values)}" for tag, count in counts.items() if count]
    return [f"{folder}: values that are not finite: {', '.join(bad)}; gaps in the picture"] if bad else []


def read_scalars(logs: Path, running: bool = False) -> tuple[dict[str, Curve], list[str]]:
    """Every scalar in a folder of event files, by its present tag; and a line for each file that cannot be read to its
    end.

    No point is left out, however many there are. A resumed run has a file for each session.
    """
    sessions, remarks = [], []
    for file in sorted(logs.glob("*tfevents*")):
        events, left = _read_file(file)
        sessions.append(events)
        if left:
            remarks.append(_remark(file, events, left, running))
    points = _Points()
    for events in sorted(filter(None, sessions), key=lambda events: events[0].wall_time):
        points.add_session(events)
    return points.curves(), remarks


def _read_file(file: Path) -> tuple[list[Event], int]:
    """A file's events, and the number of bytes at its end that are no event."""
    try:
        size = file.stat().st_size  # before reading: what a running run adds meanwhile is not missed
        records = list(RawEventFileLoader(str(file)).Load())
    except OSError as error:
        raise UserError(f"cannot be read: {file} ({error.strerror}). See who may read it") from None
    # the reader ends without a word at a record that is cut off or damaged
    left = size - sum(len(record) + FRAME for record in records)
    return [Event.FromString(record) for record in records], max(left, 0)


def _remark(file: Path, events: Iterable[Event], left: int, running: bool) -> str:
    """What is the matter with a file of which the last `left` bytes are no event."""
    with file.open("rb") as opened:
        opened.seek(-left, 2)
        length = int.from_bytes(opened.read(8), "little")
    read = max((event.step for event in events if event.summary.value), default=None)
    shown = "nothing before it" if read is None else f"everything before it is shown, up to update {read}"
    if left < 8 or left < length + FRAME <= LARGEST_RECORD:
        why = "still being written, or torn" if running else "torn"
        return f"{file}: its last record is incomplete ({why}); {shown}"
    return f"{file}: a record is damaged, what follows it is lost ({left:,} bytes); {shown}"


class _Points:
    """Points as they stand after the events so far, by tag: what is written later wins."""

    def __init__(self):
        self.by_tag: dict[str, list[tuple[int, float, float]]] = defaultdict(list)  # update, value, seconds

    def add_session(self, events: Sequence[Event]) -> None:
        """One file's events. Its time goes on from the last point that is kept from before its first update."""
        offset = None  # seconds to take from the wall clock
        for event in events:
            if event.session_log.status == SessionLog.START:
                for points in self.by_tag.values():
                    _cut(points, event.step)
            for value in event.summary.value:
                if not value.HasField("simple_value"):
                    continue
                if offset is None:
                    offset = self._offset(events[0].wall_time, event)
                points = self.by_tag[RENAMED_TAGS.get(value.tag, value.tag)]
                _cut(points, event.step)
                points.append((event.step, value.simple_value, event.wall_time - offset))

    def _offset(self, opened: float, first: Event) -> float:
        """Of the session whose file was `opened` then (wall clock) and whose `first` scalar this is."""
        if not any(self.by_tag.values()):
            return first.wall_time
        return opened - max(
            (s for points in self.by_tag.values() for u, _, s in points if u < first.step), default=0.0
        )

    def curves(self) -> dict[str, Curve]:
        curves = {}
        for tag, points in self.by_tag.items():
            if points:
                updates, values, seconds = zip(*points, strict=True)
                rising = np.maximum.accumulate(np.array(seconds))  # a clock that was set back
                curves[tag] = Curve(np.array(updates), np.array(values, dtype=float), rising)
        return curves


def _cut(points: list[tuple[int, float, float]], update: int) -> None:
    """Drop the points from `update` on: a resumed run makes these anew."""
    while points and points[-1][0] >= update:
        points.pop()


def running_mean(updates: np.ndarray, values: np.ndarray, span: int) -> np.ndarray:
    """(P,) means of the finite values of the last `span` updates; nan where the value itself is not finite.

    Added up window by window: one running sum would carry a spike of 1e20 along for ever.
    """
    finite = np.isfinite(values)
    first = np.searchsorted(updates, updates - span, side="right")
    # reduceat adds up from each index to the next one: every second sum is a window
    edges = np.column_stack([first, np.arange(len(updates)) + 1]).ravel()
    total, count = (
        np.add.reduceat(np.append(part, 0.0), edges)[::2] for part in (np.where(finite, values, 0), finite * 1.0)
    )
    return np.divide(total, count, out=np.full(len(values), np.nan), where=finite)


def seeds_band(places: Sequence[np.ndarray], lines: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """x, lowest, mean and highest (G,) of the runs' lines, where all runs have one.

    A run without a point at some x of another is taken to go straight between its own.
    """
    if len(lines) == 1:
        return places[0], lines[0], lines[0], lines[0]
    start, end = max(x[0] for x in places), min(x[-1] for x in places)
    x = np.unique(np.concatenate(places))
    x = x[(start <= x) & (x <= end)]
    rows = np.stack([np.interp(x, place, line) for place, line in zip(places, lines, strict=True)])
    return x, rows.min(0), rows.mean(0), rows.max(0)


def write_table(runs: Sequence[RunCurves], file: Path) -> int:
    """All scalars as CSV, a row per run and update, as they were logged; returns the number of rows.

    A number reads back exactly equal; where nothing was logged the cell is empty.
    """
    tags = sorted({tag for run in runs for tag in run.scalars})
    rows = [row for run in runs for row in _rows(run, tags)]

    def write(staging: Path) -> None:
        with staging.open("w", newline="", encoding="utf-8") as opened:
            csv.writer(opened).writerows([[*COLUMNS, *tags], *rows])

    atomic_write(file, write)
    return len(rows)


def _rows(run: RunCurves, tags: Sequence[str]) -> Iterable[list[Any]]:
    """A run's rows. `seconds` is when the update was logged, before an evaluation that followed it."""
    values: dict[int, dict[str, float]] = defaultdict(dict)
    seconds: dict[int, float] = {}
    for tag, curve in run.scalars.items():
        for update, value, s in zip(
            curve.updates.tolist(), curve.values.tolist(), curve.seconds.tolist(), strict=True
        ):
            values[update][tag] = value
            seconds[update] = min(s, seconds.get(update, s))
    for update in sorted(values):
        facts = [run.folder, run.algorithm, run.run.seed, update, update * run.episodes_per_update]
        cells = (values[update].get(tag) for tag in tags)
        yield [*facts, f"{seconds[update]:.3f}", *("" if cell is None else repr(cell) for cell in cells)]

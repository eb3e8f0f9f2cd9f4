"""Reads a run's scalars from its TensorBoard event files, and writes them as a CSV table."""

from __future__ import annotations

import csv
import io
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from rlhf.algorithms.kl_control import KLController, kl_controller
from rlhf.checkpoints.run_folder import METRICS_LOG, present_status
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run
from rlhf.settings.training import Config
from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.files import write_text

FRAME = 16  # bytes per record of an event file besides its data: length, checksum of the length, checksum of the data
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

    def episodes_at(self, updates: np.ndarray) -> np.ndarray:
        """Return the episodes sampled up to these updates (P,), with those that dynamic sampling drew in addition.

        A run with dynamic sampling logs them after each update that is not skipped.
        """
        logged = self.scalars.get("episodes")
        each = self.run.plan.episodes // self.planned
        if logged is None:
            return np.asarray(updates) * each
        known = np.append(0, logged.updates)
        counts = np.append(0, logged.values)
        last = np.searchsorted(known, updates, side="right") - 1
        return np.rint(counts[last] + (updates - known[last]) * each).astype(int)

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
    def aim(self) -> tuple | None:
        """What the KL targets are, equal for runs with the same targets; None as in `targets`."""
        held = self.targets
        return held and (held.targets, held.horizon is None)


def read_runs(folders: Sequence[Path], without_scalars: bool = False) -> list[RunCurves]:
    """Return the curves of every run. Raises UserError with all problems, such as a folder without a run, or without
    scalars unless these are accepted."""
    runs = []
    problems = []
    seen = set()
    for folder in folders:
        try:
            run = read_curves(folder, without_scalars)
            if run.run.id in seen:
                raise UserError("the same run is given twice", folder, "Give each run once, and no copy of it")
            seen.add(run.run.id)
            runs.append(run)
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return runs


def read_curves(folder: Path, without_scalars: bool = False) -> RunCurves:
    """Return a run's curves. Raises UserError if `folder` is not a run, or has no scalars; these are a remark if the
    run is accepted `without_scalars`."""
    run = RunRecord.require(folder, "run")
    run = replace(run, status=present_status(folder, run.status))
    scalars, remarks = read_scalars(folder / "logs")
    if not scalars and without_scalars:
        remarks.append(f"{folder / 'logs'}: no scalars, so there are no curves and no equal budgets of this run")
    elif not scalars:
        hint = "This run logged nothing: choose another run"
        if (folder / METRICS_LOG).is_file():
            hint = "The run logged metrics, but its event files are missing or damaged: restore them"
        if run.status == "running":
            hint = "Try again after its first update"
        raise UserError("no scalars yet", f"{folder / 'logs'}", f"{' '.join([*(f'{r}.' for r in remarks), hint])}")
    return RunCurves(folder, run, config_of_run(run), scalars, [*remarks, *_not_finite(folder, scalars)])


def _not_finite(folder: Path, scalars: dict[str, Curve]) -> list[str]:
    """Return one line that counts nan and infinite values; empty if there are none."""
    counts = {tag: int((~np.isfinite(curve.values)).sum()) for tag, curve in sorted(scalars.items())}
    bad = [f"{tag} {count} of {len(scalars[tag].values)}" for tag, count in counts.items() if count]
    return [f"{folder}: values that are not finite ({', '.join(bad)}) are gaps in the plot"] if bad else []


def read_scalars(logs: Path) -> tuple[dict[str, Curve], list[str]]:
    """Return all scalars of a folder of event files by tag, and one remark per file with unreadable data.

    No point is left out. A resumed run has one file per session, in the order of their names. The times of the events
    are those of `RunLog.training_time`, which continues in the next session.
    """
    points = defaultdict(list)
    remarks = []
    for file in sorted(logs.glob("*tfevents*")):
        unread = _add_session(file, points)
        if unread > 0:
            why = "the file is still being written, cut off or damaged"
            remarks.append(f"{file}: the last {unread:,} bytes are ignored, because {why}")
    columns = {tag: np.array(rows).T for tag, rows in points.items() if rows}
    start = min((seconds[0] for _, _, seconds in columns.values()), default=0.0)
    return {tag: Curve(u.astype(int), values, s - start) for tag, (u, values, s) in columns.items()}, remarks


def _add_session(file: Path, points: dict[str, list[tuple[int, float, float]]]) -> int:
    """Adds a file's scalars to `points`: tag -> (update, value, Unix time) of each point.

    They replace later points of earlier sessions, because a resumed run logs these updates again. Returns the number
    of bytes that TensorBoard's reader did not read: it stops without an error at an incomplete or damaged record.
    """
    with file.open("rb") as stream:
        unread = stream.seek(0, os.SEEK_END)  # before the data: what a running run appends is not unreadable
    for record in RawEventFileLoader(str(file)).Load():
        unread -= len(record) + FRAME
        event = Event.FromString(record)
        scalars = {v.tag: v.simple_value for v in event.summary.value if v.HasField("simple_value")}
        for tag in list(points) if event.session_log.status == SessionLog.START else scalars:
            while points[tag] and points[tag][-1][0] >= event.step:
                points[tag].pop()
        for tag, value in scalars.items():
            points[tag].append((event.step, value, event.wall_time))
    return unread


def running_mean(updates: np.ndarray, values: np.ndarray, span: int) -> np.ndarray:
    """Return (P,) means of the finite values of the last `span` updates; nan if the value itself is not finite.

    Each window is summed separately: in one running sum a spike of 1e20 would ruin all later means.
    """
    first = np.searchsorted(updates, updates - span, side="right")
    windows = [values[start : end + 1] for end, start in enumerate(first)]
    means = [window[np.isfinite(window)].mean() if np.isfinite(window[-1]) else np.nan for window in windows]
    return np.array(means)


def seeds_band(xs: Sequence[np.ndarray], lines: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return x and the lowest, mean and highest value (G,) of the runs' lines over the range that all runs cover.

    If a run has no point at an x of another run, its value is interpolated linearly.
    """
    start = max(x[0] for x in xs)
    end = min(x[-1] for x in xs)
    x = np.unique(np.concatenate(xs))
    x = x[(start <= x) & (x <= end)]
    rows = np.stack([np.interp(x, own_x, line) for own_x, line in zip(xs, lines, strict=True)])
    return x, rows.min(0), rows.mean(0), rows.max(0)


def write_table(runs: Sequence[RunCurves], file: Path, groups: Mapping[Path, str]) -> int:
    """Writes all scalars as CSV, one row per run and update, and returns the number of rows.

    Numbers keep their full precision. A cell is empty if the scalar was not logged at that update. `groups` has the
    name of the group of each run's folder.
    """
    tags = sorted({tag for run in runs for tag in run.scalars})
    rows = [row for run in runs for row in _rows(run, groups[run.folder])]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *tags], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(file, text.getvalue())
    return len(rows)


def _rows(run: RunCurves, group: str) -> list[dict[str, Any]]:
    """Return a run's rows. `seconds` is the time of the update's first scalar, before its evaluation."""
    values: dict[int, dict[str, float]] = defaultdict(dict)
    for tag, curve in run.scalars.items():
        for update, value, s in zip(*(part.tolist() for part in astuple(curve)), strict=True):
            values[update] |= {tag: value, "seconds": min(s, values[update].get("seconds", s))}
    episodes = run.episodes_at(np.array(sorted(values))).tolist()
    facts = {"run": run.folder, "algorithm": run.algorithm, "seed": run.run.seed, "group": group}
    return [
        {**facts, **row, "update": update, "episodes": sampled, "seconds": f"{row['seconds']:.3f}"}
        for (update, row), sampled in zip(sorted(values.items()), episodes, strict=True)
    ]

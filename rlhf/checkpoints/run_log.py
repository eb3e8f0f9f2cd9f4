"""Writes run.json during a run, and locks the run's folder."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf.checkpoints.run_folder import INPUTS_FILE, FolderMoved, RunLock, lock_run
from rlhf.checkpoints.run_record import RunRecord, environment, now
from rlhf.utils.errors import RunError, UserError, first_line
from rlhf.utils.files import write_json
from rlhf.utils.signals import TrainingInterrupted
from rlhf.utils.streams import lost_streams
from rlhf.utils.system import cpu_seconds
from rlhf.utils.timing import timed


class RunLog:
    """A run's record, written to run.json at every change. The run's folder is locked while the log is open."""

    def __init__(self, folder: Path, lock: RunLock | None = None, *, resume: bool = False, **facts: Any):
        """Start a new record, or with `resume` continue the record in `folder`.

        Args:
            folder: the run's folder.
            lock: the folder's lock, if `claim_output` locked it.
            resume: continue the existing record, and add an entry to its `sessions`.
            facts: the fields of a new RunRecord that depend on the run, or more keys of the new session.
        """
        self._lock = lock or lock_run(folder)
        self.folder = folder
        self._start_clocks()
        self._found: RunRecord | None = None  # a resumed run's record before this session
        with self._lock.closed_after_error():
            if resume:
                self.record = self._found = RunRecord.require(folder, "--resume, --output")
                session = {"started": now(), "pid": os.getpid(), **environment(), **facts}
                sessions = [*(self.record.sessions or ()), session]
                self.add(status="running", pid=session["pid"], ended=None, reason=None, sessions=sessions)
            else:
                self.record = RunRecord.begin(**facts)
                self.record.write(folder)

    def _start_clocks(self) -> None:
        self.started_at = time.monotonic()
        self.seconds_before = 0.0
        self.cpu_at_start = cpu_seconds()
        self.cpu_before = 0.0
        self.time_before: dict[str, float] = {}

    def add(self, **facts: Any) -> None:
        """Set fields of the record and write it. Raises FolderMoved as `check_place`."""
        self.check_place()
        console_lost = lost_streams or self.record.console_lost  # of this session, or of one before it
        self.record = replace(self.record, console_lost=console_lost, **facts)
        self.record.write(self.folder)

    def check_place(self) -> None:
        """Raise FolderMoved if the run's folder is no longer at its path. A folder that is missing is not created
        again, because it may be on a disk that was unmounted."""
        self._lock.check()

    def seconds(self) -> float:
        """Return the seconds of training, in this session and those before it."""
        return self.seconds_before + time.monotonic() - self.started_at

    def training_time(self) -> float:
        """Return the start of the run plus `seconds`, as a Unix time. It passes only while the run trains, and no
        change of the clock affects it."""
        return datetime.fromisoformat(self.record.started).timestamp() + self.seconds()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of this process and of its ended children, in this session and those before it."""
        return self.cpu_before + cpu_seconds() - self.cpu_at_start

    def time(self) -> dict[str, float]:
        """Return the seconds of each part of the command, in this session and those before it."""
        now = timed.seconds()
        return {part: self.time_before.get(part, 0.0) + now.get(part, 0.0) for part in {**self.time_before, **now}}

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Write how the run ended: "finished" only without an error. Inputs of a failed reward function are saved to a
        file, and the error message is extended with its path.

        Raises FolderMoved and writes nothing if the folder is no longer at its path. An error for the user is in it.
        """
        if (
            kind is GeneratorExit
        ):  # nobody has a loop by hand any more, and its files may be closed: it counts as killed
            return
        with self._lock:
            try:
                with contextlib.suppress(OSError):  # the disk does not answer: report the error that ended the run
                    self.check_place()
            except FolderMoved as moved:
                first = error.problems if isinstance(error, UserError) else []
                raise FolderMoved(dict.fromkeys([*first, *moved.problems])) from error
            if error is None:
                return self.add(status="finished", ended=now(), time=self.time())
            if isinstance(error, RunError) and error.inputs is not None:
                error.append(f"; {self._save_inputs(error.inputs)}")
            with contextlib.suppress(Exception):  # the disk may be full: report the error that ended the run instead
                if self._found is not None and isinstance(error, UserError) and not isinstance(error, RunError):
                    return self._found.write(self.folder)  # nothing was trained in this session: restore the record
                status = "stopped" if isinstance(error, TrainingInterrupted) else "failed"
                self.add(status=status, ended=now(), time=self.time(), reason=f"{type(error).__name__}: {error}")
            if isinstance(error, OSError):
                raise error  # the lock raises it as WriteError

    def _save_inputs(self, inputs: Any) -> str:
        """Save the inputs of a failed reward function, and return in words where they are, or why they are not
        saved."""
        file = self.folder / INPUTS_FILE
        try:
            write_json(file, json.loads(json.dumps(inputs, default=str)))  # a column may hold any object
        except Exception as error:  # the disk may be full: the function's error must be reported
            return f"its inputs could not be saved in {file} ({first_line(error)})"
        return f"its inputs are saved in {file}"


class FollowingLog(RunLog):
    """The record of a run in a process that does not write it: all but the first one."""

    def __init__(self, folder: Path, record: RunRecord):
        self.folder = folder
        self.record = record
        self._start_clocks()

    def add(self, **facts: Any) -> None:
        """Set fields of the record."""
        self.record = replace(self.record, **facts)

    def check_place(self) -> None:
        """Do nothing: the folder may be on another machine."""

    def __exit__(self, *_: Any) -> None:
        """Do nothing: the first process writes how the run ended."""

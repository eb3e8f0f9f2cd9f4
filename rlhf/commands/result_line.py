"""`--print-json`: prints the result of a training command as one line of JSON. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.checkpoints.run_record import RUN_FILE, RunRecord
from rlhf.settings.training import Config
from rlhf.utils.errors import print_line
from rlhf.utils.files import json_ready
from rlhf.utils.processes import is_first

STATUSES = ("failed", "stopped", "running", "not started", "finished")  # of several runs, the first one is reported


@contextmanager
def result_line(config: Config, folders: Mapping[Path, dict[str, str]]) -> Iterator[None]:
    """Context manager that prints the result in `folders`, the run folders of a command, when it ends. If the command
    fails before it changes one of them, nothing is printed: an older result is not that of this command.

    Args:
        config: the configuration of the command.
        folders: run folder -> the settings of --sweep that its run has, as text.
    """
    first = is_first()  # at the end the processes of a launcher are separate again
    before = [_changed_at(folder) for folder in folders]
    ended = False
    try:
        yield
        ended = True
    finally:
        if first and (ended or before != [_changed_at(folder) for folder in folders]):
            print_line(json.dumps(json_ready(result_of(config, folders)), allow_nan=False), flush=True)


def _changed_at(folder: Path) -> int | None:
    file = folder / RUN_FILE
    return file.stat().st_mtime_ns if file.exists() else None


def result_of(config: Config, folders: Mapping[Path, dict[str, str]]) -> dict[str, Any]:
    """Return the result of a run: status, folder, seed, algorithm and the figures of run.json. With --seeds or --sweep
    `runs` has the results of the runs, and `status` is the first one of STATUSES that a run has."""
    runs = [_result(folder) | ({"settings": settings} if settings else {}) for folder, settings in folders.items()]
    if config.run.seeds is None and not config.run.sweep:
        return runs[0]
    status = min((run["status"] for run in runs), key=STATUSES.index)
    return {"status": status, "output": config.run.output, "algorithm": config.algorithm, "runs": runs}


def _result(folder: Path) -> dict[str, Any]:
    run = RunRecord.read(folder)
    if run is None:
        return {"status": "not started", "output": str(folder)}
    facts = {"status": run.status, "output": str(folder), "seed": run.seed, "algorithm": run.algorithm}
    return {**facts, **({"reason": run.reason} if run.reason else {}), "figures": run.figures or {}}

"""metrics.jsonl: the metrics of a run for other programs, one JSON object per update and per evaluation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from rlhf.callbacks.base import Callback
from rlhf.trainer.progress import Progress
from rlhf.utils.files import write_text
from rlhf.utils.results import json_ready
from rlhf.utils.streams import lost_streams


@dataclass
class MetricsFile(Callback):
    """Writes the metrics of every update and evaluation, by TensorBoard tag, with the number of the `update`.

    A number that is not finite is null. A skipped update has `updates/skipped` and the reason, `skipped`. Lines after
    stdout or stderr was lost have the reason, `console_lost`.
    """

    file: Path
    progress: Progress | None = None

    def on_train_begin(self, trainer):
        self.progress = trainer.progress
        self.cut(trainer.host.state.global_step)

    def cut(self, update: int) -> None:
        """Remove what an interrupted session wrote after the checkpoint of `update`: these updates are trained again.
        Also removes lines that are incomplete, such as the last one of a killed process."""
        if self.file.exists():
            lines = self.file.read_text(encoding="utf-8", errors="replace").split("\n")
            kept = [line for line in lines if update and -1 < _update_of(line) <= update]
            write_text(self.file, "".join(f"{line}\n" for line in kept))

    @cached_property
    def opened(self) -> TextIO:
        """The file, opened at the first line, in a folder that exists."""
        return self.file.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, update: int, metrics: dict[str, Any]) -> None:
        row = json_ready({"update": update, **metrics})
        if lost_streams:
            row["console_lost"] = lost_streams
        self.opened.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self.opened.flush()  # before the checkpoint, and so that other programs can read it

    def on_update_end(self, update, metrics):
        self.write(update, metrics)

    def on_update_skipped(self, update, rollout, batch, reason):
        self.write(update, {"updates/skipped": float(self.progress.skipped), "skipped": str(reason)})

    def on_evaluation(self, evaluation):
        self.write(evaluation.update, evaluation.metrics())

    def on_train_end(self):
        self.close()

    def close(self) -> None:
        """Close the file, if it is open."""
        if "opened" in vars(self):
            self.opened.close()


def _update_of(line: str) -> int:
    """Return the update of a line; -1 if the line is incomplete."""
    try:
        return json.loads(line)["update"]
    except ValueError:
        return -1

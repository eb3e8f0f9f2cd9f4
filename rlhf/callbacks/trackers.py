"""The trackers of --report-to: Weights & Biases and trackio, through transformers' integrations.

transformers' callbacks start the run in the tracker. What is sent differs from theirs: this project's settings instead
of TrainingArguments, the TensorBoard tags without a prefix, samples, and the results. docs/metrics.md lists it.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers.integrations import TrackioCallback, WandbCallback

from rlhf.callbacks.base import Callback
from rlhf.callbacks.samples import sample_table
from rlhf.checkpoints.run_record import flat_settings
from rlhf.settings.fields import replaced, to_dict
from rlhf.settings.training import Config
from rlhf.utils.console import Screen
from rlhf.utils.errors import first_line
from rlhf.utils.processes import is_first

PROJECT = "rlhf-workstation"  # the default project in wandb and trackio
STEP = "train/global_step"  # the metric that transformers' WandbCallback defines as the x axis
SAMPLES = "samples"  # the name of the tables
ID_DIGITS = 8  # of the id in a name


def arguments_of(config: Config) -> SimpleNamespace:
    """Return what transformers' callbacks read of TrainingArguments, with this project's settings as the
    configuration. trackio's Spaces are private, and are not published at the end."""
    settings = flat_settings(to_dict(replaced(config, resume=False, resume_anyway=False)))  # as in run.json
    return SimpleNamespace(
        to_dict=lambda: dict(settings),
        run_name=Path(config.run.output).resolve().name,
        output_dir=config.run.output,
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        hub_private_repo=True,
        trackio_space_id=None,  # trackio reads TRACKIO_SPACE_ID
        trackio_bucket_id=None,
        trackio_static_space_id=False,
    )


def numbers_of(figures: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers among the figures; of an interval its ends, as NAME/low and NAME/high."""
    found = {}
    for name, value in figures.items():
        ends = value if isinstance(value, list) and len(value) == 2 else []
        found |= {f"{name}/{end}": bound for end, bound in zip(("low", "high"), ends, strict=False)} or {name: value}
    return {n: v for n, v in found.items() if isinstance(v, (int, float)) and math.isfinite(v)}


class WandbTracker(WandbCallback):
    """A run of Weights & Biases. Its id is that of the run.json, so that a resumed run continues it."""

    def start(self, args: Any, state: Any, run_id: str | None) -> None:
        if self._wandb.run is None:  # otherwise the program has started a run, which is used
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            self._wandb.init(project=project, name=args.run_name, id=run_id, resume="allow")
        self.setup(args, state, model=None)

    def log(self, metrics: dict[str, float], state: Any) -> None:
        self._wandb.log({**metrics, STEP: state.global_step})

    def table(self, columns: list[str], rows: list[list], state: Any) -> None:
        table = self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self._wandb.log({SAMPLES: table, STEP: state.global_step})

    def finish(self, figures: dict[str, Any] | None, failed: bool, state: Any) -> None:
        self._wandb.run.summary.update(figures or {})
        self._wandb.finish(exit_code=int(failed))


class TrackioTracker(TrackioCallback):
    """A run of trackio. trackio continues the run with the same name in the project, so the name ends with the run's
    id, which a resumed run keeps."""

    def start(self, args: Any, state: Any, run_id: str | None) -> None:
        number = (run_id or uuid.uuid4().hex)[:ID_DIGITS]
        self.setup(SimpleNamespace(**{**vars(args), "run_name": f"{args.run_name}-{number}"}), state, model=None)

    def log(self, metrics: dict[str, float], state: Any) -> None:
        self._trackio.log(metrics, step=state.global_step)

    def table(self, columns: list[str], rows: list[list], state: Any) -> None:
        table = self._trackio.Table(columns=columns, data=rows)
        self._trackio.log({SAMPLES: table}, step=state.global_step)

    def finish(self, figures: dict[str, Any] | None, failed: bool, state: Any) -> None:
        if figures:  # trackio has no summary
            self.log({f"figures/{name}": value for name, value in numbers_of(figures).items()}, state)
        self._trackio.finish()


TRACKERS = {"wandb": WandbTracker, "trackio": TrackioTracker}


@dataclass
class Trackers(Callback):
    """Sends a run to its trackers. If a tracker fails, it prints one warning and sends nothing more to that tracker:
    training never depends on a tracker. Of several processes, only the first one sends.

    As a context manager, it marks the run as failed if an error ends the run.
    """

    config: Config  # has the names of the trackers
    screen: Screen  # prints the warnings
    run_id: str | None = None  # in run.json; None: the run cannot be resumed
    trackers: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for name in TRACKERS if name in (self.config.record.report_to or ()) and is_first()]

    def on_train_begin(self, trainer):
        self.trainer = trainer
        args = arguments_of(self.config)
        for name in self.names:
            self._attempt(name, lambda name=name: self._start(name, args))

    def _start(self, name: str, args: SimpleNamespace) -> None:
        tracker = TRACKERS[name]()
        tracker.start(args, self.trainer.host.state, self.run_id)
        self.trackers[name] = tracker

    def on_update_end(self, update, metrics):
        self._each(lambda tracker: tracker.log(metrics, self.trainer.host.state))

    def on_update_skipped(self, update, rollout, batch, reason):
        skipped = {"updates/skipped": float(self.trainer.progress.skipped)}
        self._each(lambda tracker: tracker.log(skipped, self.trainer.host.state))

    def on_evaluation(self, evaluation):
        metrics = evaluation.metrics()
        state = self.trainer.host.state
        columns, rows = sample_table(evaluation, self.trainer.evaluation_prompts) if self.trackers else ([], [])
        self._each(lambda tracker: tracker.log(metrics, state))
        self._each(lambda tracker: tracker.table(columns, rows, state))

    def finish(self, figures: dict[str, Any] | None = None, failed: bool = False) -> None:
        """Send the results, and end the runs in the trackers. Ctrl-C ends the wait for a tracker without a network."""
        try:
            self._each(lambda tracker: tracker.finish(figures, failed, self.trainer.host.state))
        except KeyboardInterrupt:
            self.screen.say("warning: stopped before the trackers had received everything: --report-to")
        self.trackers.clear()

    def _each(self, action: Callable[[Any], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            self._attempt(name, lambda tracker=tracker: action(tracker))

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a tracker's library raises whatever its own libraries raise
            self.trackers.pop(name, None)
            self.screen.say(
                f"warning: {name} failed ({type(error).__name__}: {first_line(error):.200}): --report-to. Nothing "
                "more is sent to it, and training continues"
            )

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.finish(failed=kind is not None)

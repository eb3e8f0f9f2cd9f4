"""TensorBoard, the progress line on the console, and the warnings about completions that teach little."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar, text

from rlhf.callbacks.base import Callback
from rlhf.callbacks.samples import sample_table, table_text
from rlhf.data.sampler import shorten
from rlhf.settings.types import kl_text
from rlhf.trainer.evaluation import Evaluation, shown, shown_prompts
from rlhf.trainer.findings import short_fields, show_run_findings
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.progress import parts_text
from rlhf.utils.console import Screen, clock, number, one_line

FIRST_UPDATES = 3
SOME_UPDATES = 10  # findings over this many updates are not a coincidence


@dataclass
class TensorBoardLog(Callback):
    """Writes every metric to TensorBoard, and some samples of every evaluation. The x axis counts updates."""

    folder: Path
    time_of_event: Callable[[], float]  # returns the Unix time that an event gets (RunLog.training_time)
    trainer: OnPolicyLoop | None = None
    records: RecordWriter | None = None

    def on_train_begin(self, trainer):
        self.trainer = trainer
        self.folder.mkdir(exist_ok=True)
        self.records = RecordWriter(new_event_file(self.folder).open("wb"))
        self.write(file_version="brain.Event:2")
        # Hides what the interrupted session logged after its last checkpoint: these updates are trained again.
        # TensorBoard ignores the first START of a run, so the first session writes one, too.
        self.write(step=trainer.host.state.global_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, **content: Any) -> None:
        """Write an event to the file at once: a resumed run does not log the updates before its checkpoint again."""
        event = Event(wall_time=self.time_of_event(), **content)
        self.records.write(event.SerializeToString())
        self.records.flush()

    def on_update_end(self, update, metrics):
        for name, value in metrics.items():
            self.write(step=update, summary=scalar(name, value))

    def on_update_skipped(self, update, rollout, batch, reason):
        self.on_update_end(update, {"updates/skipped": self.trainer.progress.skipped})

    def on_evaluation(self, evaluation):
        self.on_update_end(evaluation.update, evaluation.metrics())
        prompts = self.trainer.evaluation_prompts
        columns, rows = sample_table(evaluation, prompts)
        width = columns.index("kl")  # in a wider table TensorBoard breaks the numbers
        drawn = shown_prompts(len(prompts), self.trainer.config.run.seed)
        some = [rows[i * evaluation.samples][:width] for i in drawn]
        self.write(step=evaluation.update, summary=text("samples", table_text(columns[:width], some)))

    def close(self) -> None:
        """Close the file, if it is open."""
        if self.records is not None:
            self.records.close()


def new_event_file(folder: Path) -> Path:
    """Return the path of a new session's event file. TensorBoard reads the files of a run in the order of their names,
    so the time in this name is later than those of earlier sessions, even if the clock was set back."""
    earlier = re.findall(r"tfevents\.(\d+)", " ".join(os.listdir(folder)))
    created = max([int(time.time()), *(int(seconds) + 1 for seconds in earlier)])
    return folder / f"events.out.tfevents.{created:010}.{socket.gethostname()}.{os.getpid()}"


@dataclass
class ProgressLine(Callback):
    """Prints the progress line of every update, and one line per evaluation."""

    trainer: OnPolicyLoop
    screen: Screen

    def on_update_end(self, update, metrics):
        updates = self.trainer.updates
        progress = self.trainer.progress
        target = self.trainer.kl.target_of(update)
        left = progress.left(self.trainer.config.run, updates, update)
        kl = metrics.get(target.metric, math.nan)  # unknown if no episode is of the present weights
        aim = "no target" if not self.trainer.kl.steered else f"target {target.nats:g}"
        if "kl_divergence/completions" in metrics:
            aim += f", of {metrics['kl_divergence/completions']:.0f} completions"
        topic = self.trainer.sampler.topic_of(update)
        score = f"score {number(metrics['rewards/mean'], sign='+')}" if "rewards/mean" in metrics else "no score"
        shown_topic = "" if topic is None else f"topic {shorten(topic)} | "
        signs = "".join(f"{field} | " for field in short_fields(metrics, self.trainer.config.sampling))
        self.screen.progress(
            f"update {update}/{updates} | {shown_topic}{score} | KL "
            f"{kl_text(kl, target.per)} ({aim}) | beta {metrics['kl_coef']:.3g} | "
            f"length {metrics['completions/mean_length']:.0f} tokens | {signs}"
            f"{speed_text(metrics['throughput/tokens_per_s'])} tokens/s | {clock(sum(left.values()))} left",
            last=update == updates,
        )
        if update == FIRST_UPDATES < updates:
            whole = {part: sum(each) + left[part] for part, each in progress.seconds.items()}
            progress.predicted[f"predicted after update {update} of {updates}"] = whole
            self.screen.say(f"time, predicted from the first {update} updates: {parts_text(whole)}")

    def on_update_skipped(self, update, rollout, batch, reason):
        self.screen.say(f"warning: skipping the rest of update {update}: {reason}")

    def on_evaluation(self, evaluation):
        metrics = evaluation.metrics()
        self.screen.say(
            f"evaluation after update {evaluation.update}: score {number(metrics['eval/score'], sign='+')}, "
            f"KL {kl_text(metrics['eval/kl_divergence'], 'sequence')}, "
            f"perplexity {number(metrics['eval/perplexity'])} on {self.trainer.evaluator.text.source}, "
            f"length {metrics['eval/length']:.0f} tokens, {metrics['eval/eos_rate']:.0%} with EOS"
            + "".join(f", {name} {shown(figures)}" for name, figures in evaluation.figures.items())
        )
        self.screen.facts(self.example_of(evaluation))

    def example_of(self, evaluation: Evaluation) -> list[tuple[str, str]]:
        """Return rows of one evaluation prompt, the same throughout the run: the question, the completions of the
        start model and of the current one, and their scores."""
        start = self.trainer.evaluations[0]
        prompts = self.trainer.evaluation_prompts
        drawn = shown_prompts(len(prompts), self.trainer.config.run.seed)[0]
        points = [start, evaluation] if evaluation is not start else [start]  # a resumed run has the start's as well
        scores = [float(one.scores[drawn, 0]) for one in points]
        return [
            ("question", one_line(prompts[drawn].example.messages[-1]["content"])),
            *zip(("start model", "now"), [one_line(one.texts[drawn][0]) for one in points], strict=False),
            ("score", " -> ".join("none" if math.isnan(score) else f"{score:.2f}" for score in scores)),
        ]


def speed_text(speed: float) -> str:
    """Return a speed without decimals, or below 1 with one significant digit."""
    return f"{speed:,.0f}" if speed >= 1 else f"{speed:.1g}"


@dataclass
class FindingsWarning(Callback):
    """Prints the findings of the first updates once. The end of a run prints them again, about its last updates. Also
    prints a warning when the run becomes slow, once until it is fast again."""

    trainer: OnPolicyLoop
    screen: Screen
    first: list[tuple[float, float]] = field(default_factory=list)  # tokens and episodes per second, first updates
    slow: bool = False

    def on_update_end(self, update, metrics):
        if update == SOME_UPDATES < self.trainer.updates:
            show_run_findings(self.trainer, self.screen, ended=False)
        self.warn_if_slow(update, metrics["throughput/tokens_per_s"], metrics["throughput/episodes_per_s"])

    def warn_if_slow(self, update: int, tokens: float, episodes: float) -> None:
        """Print a warning if the tokens per second are below a tenth of those of the first updates.

        The best of these counts: the first update compiles and fills caches. The episodes per second must be fewer,
        too: shorter completions are fewer tokens in nearly the same time.
        """
        if len(self.first) < FIRST_UPDATES:
            self.first.append((tokens, episodes))
            return
        usual, usual_episodes = map(max, zip(*self.first, strict=True))
        slow = tokens < usual / 10 and episodes < usual_episodes / 2
        if slow and not self.slow:
            self.screen.say(
                f"warning: update {update} had {speed_text(tokens)} tokens/s, the first updates {speed_text(usual)}. "
                "Other programs may use the GPU, the CPU cores or the memory, or the machine is too hot. Close them; "
                "on a CPU, Ctrl-C and resuming with --threads 1 may help, too"
            )
        self.slow = (slow or self.slow) and tokens < usual / 2

"""Saves checkpoints during a run, and the model of the best evaluation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from rlhf.callbacks.base import Callback
from rlhf.checkpoints.best import Candidate, choose, why_no_perplexity_limit
from rlhf.checkpoints.manifest import find_checkpoints, set_aside, write_checkpoint
from rlhf.checkpoints.run_folder import BEST_FOLDER
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.run_record import Best
from rlhf.config import usual_config
from rlhf.distributed.group import from_first, gather, on_first
from rlhf.distributed.weights import require_equal_weights
from rlhf.settings.next_commands import resume_command
from rlhf.settings.training import SAVE_SECONDS, Config
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.state import load_weights, save_trainer_state
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError, UserError, os_advice
from rlhf.utils.files import file_state, hardlink_dir, update_dir_atomically
from rlhf.utils.signals import GracefulStop, TrainingInterrupted
from rlhf.utils.timing import timed


@dataclass
class BestCheckpoint(Callback):
    """Saves the model of the best evaluation in `best/`, and writes the choice and its reason to run.json."""

    trainer: OnPolicyLoop
    config: Config
    log: RunLog
    candidates: list[Candidate] = field(default_factory=list)
    costs: list[dict[str, float]] = field(default_factory=list)  # of evaluations: episodes so far, peak memory in GiB
    saved: tuple = ()  # the `state` after the latest save

    def state(self) -> tuple:
        """Return what differs after the trainer's weights or those in `best/` have changed."""
        versions = [weight._version for weight in self.trainer.host.model.parameters()]  # a rollback changes them, too
        files = (self.log.folder / BEST_FOLDER).glob("*.safetensors")
        return self.trainer.progress.optimizer_steps, versions, {*map(file_state, files)}

    def on_evaluation(self, evaluation):
        metrics = evaluation.metrics()
        run = self.config.run
        target = self.trainer.kl.target_of(evaluation.update)
        # completions that are not sampled as in training do not measure the policy's KL
        kl_limited = self.config.kl.steered and self.config.eval_sampling == self.config.sampling
        self.candidates.append(
            Candidate(
                update=evaluation.update,
                score=metrics["eval/score"],
                kl=metrics[f"eval/{target.metric}"],
                target=target.nats if kl_limited else None,
                perplexity=metrics["eval/perplexity"],
                metrics=evaluation.figures,
            )
        )
        memory = self.trainer.progress.peak_memory / 2**30
        self.costs.append({"episodes": self.trainer.episodes, "peak_memory_gib": memory})
        learned = self.trainer.rewards.has_model
        by_start = self.trainer.evaluator.text.by_start
        unlimited = why_no_perplexity_limit(learned, by_start, kl_limited)
        best, why = choose(self.candidates, run.best_rule, unlimited)
        if best == len(self.candidates) - 1:
            with timed("best"):
                require_equal_weights(self.trainer.host.model, f"update {evaluation.update}")
                folder = self.log.folder / BEST_FOLDER
                on_first(lambda: update_dir_atomically(folder, self.trainer.save_model, self.log.check_place))
                self.saved = self.state()
        self.log.add(
            best=Best(
                update=self.candidates[best].update,
                why=why,
                rule=run.best_rule,
                kl_unit=f"nats/{target.per}",
                perplexity_text=self.trainer.evaluator.text.source,
                evaluations=[asdict(c) | cost for c, cost in zip(self.candidates, self.costs, strict=True)],
            )
        )

    def state_dict(self) -> dict[str, Any]:
        return {"candidates": [asdict(c) for c in self.candidates], "costs": self.costs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.candidates = [Candidate(**c) for c in state["candidates"]]
        self.costs = state["costs"]


@dataclass
class Checkpoints(Callback):
    """Saves the trainer's state when the loop calls `save_if_due`, and loads it for --rollback-on-kl.

    After a skipped update, saves only when an update succeeds or at the end of the run.
    """

    trainer: OnPolicyLoop
    config: Config
    log: RunLog
    screen: Screen
    stop: GracefulStop
    best: BestCheckpoint
    overdue: bool = False  # a save was due after a skipped update
    latest: float = field(default_factory=perf_counter)  # time of the start, then of the latest save

    @property
    def folder(self) -> Path:
        return Path(self.config.run.output)

    def save_if_due(self, update: int, last: bool) -> None:
        """Save a checkpoint: every `save_every` updates, or SAVE_SECONDS by the first process's clock; after the last
        update; and after a stop signal, which then ends the run. Raises TrainingInterrupted."""
        every = self.config.run.save_every
        due = update % every == 0 if every else perf_counter() - self.latest >= SAVE_SECONDS
        signals, dues = zip(*gather((self.stop.by, due)), strict=True)
        signal = next(filter(None, signals), None)
        skipped = self.trainer.progress.skipped_in_a_row > 0
        if last and skipped:
            self.screen.say(
                f"warning: the last update ({update}) was skipped. The weights are finite, so they are saved"
            )
        due = self.overdue or signal is not None or dues[0]
        self.overdue = due and skipped
        if last or (due and not skipped):
            self.save(update)
        if signal is not None and not last:
            saved = "A checkpoint was saved"
            if self.overdue:
                saved = f"This update was skipped, so no checkpoint was saved; {self.newest_checkpoint()}"
            raise TrainingInterrupted(
                signal, f"stopped after update {update} of {self.trainer.updates}. {saved}. {self.resume_hint()}"
            )

    def roll_back(self, runaway: int) -> None:
        """Load the weights of the newest valid checkpoint from before the KL ran away. An update's KL is that of the
        weights at its start, so the weights after update `runaway` had run away."""
        found = from_first(lambda: find_checkpoints(self.folder, self.log.record.id))
        before = [number for number in found.valid if number < runaway]
        if not before:
            self.screen.say(
                "warning: cannot roll back, because no valid checkpoint is from before the KL became too high: "
                "--rollback-on-kl"
            )
            return
        load_weights(self.trainer, found.valid[max(before)])
        self.screen.say(
            f"rolled back to the weights after update {max(before)}, because the KL was too high with the weights "
            f"after update {runaway}"
        )

    def newest_checkpoint(self) -> str:
        """Return in words which checkpoint --resume would use."""
        try:
            newest = find_checkpoints(self.folder, self.log.record.id).newest
        except OSError:  # called while an error of the same disk is reported
            return "the checkpoints cannot be read"
        return "there is no checkpoint yet" if newest is None else f"the newest checkpoint is {newest.name}"

    @timed("checkpoints")
    def save(self, update: int) -> None:
        """Save a checkpoint. Raises RunError if writing fails, or if the processes have different weights."""
        began = perf_counter()
        require_equal_weights(self.trainer.host.model, f"update {update}")
        on_first(lambda: self.write(update))
        self.trainer.events.call("on_save", update)
        self.trainer.progress.spend("checkpoints", began)
        self.latest = perf_counter()

    def write(self, update: int) -> None:
        """Write the files of a checkpoint. Raises RunError if this fails."""
        self.log.check_place()
        try:
            write_checkpoint(self.folder, self.log.record.id, update, self.config.run.keep, self.fill)
        except OSError as error:
            self.log.check_place()
            raise RunError(
                f"the checkpoint of update {update} could not be saved ({error})",
                f"{self.folder}; {self.newest_checkpoint()}",
                f"{os_advice(error)}. {self.resume_hint()}",
            ) from None

    def fill(self, folder: Path) -> None:
        best = self.folder / BEST_FOLDER
        if self.best.saved == self.best.state():
            hardlink_dir(best, folder)
        save_trainer_state(self.trainer, folder)
        if best.is_dir():
            hardlink_dir(best, folder / BEST_FOLDER)
        self.log.check_place()  # saving a model creates folders that are missing

    def resume_hint(self) -> str:
        return f"Resume with: {resume_command(self.config)}"

    def advice(self, by_score: bool) -> str:
        """Return the advice for a run that gives up, with the command to type.

        If the weights are the reason, renames the checkpoints after the last update from whose weights an optimizer
        step succeeded, so that the command resumes from an older one, or starts again.
        """
        if by_score:
            return f"Fix the reward function, then resume with: {resume_command(self.config)}"
        aside = from_first(self.set_aside)
        smaller = resume_command(self.config, resume_anyway=True, learning_rate=smaller_rate(self.config))
        return f"{aside}Resume with a smaller learning rate: {smaller}"

    def set_aside(self) -> str:
        """Rename the checkpoints with unusable weights. Returns this as a sentence."""
        try:
            self.log.check_place()
            names = set_aside(self.folder, self.log.record.id, self.trainer.progress.last_good_update)
        except OSError as error:  # called while another error is reported
            return f"The checkpoints with unusable weights could not be renamed to *.suspect ({error}). "
        if not names:
            return ""
        return f"Renamed to *.suspect, because no optimizer step from these weights succeeded: {', '.join(names)}. "

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.log.seconds(), "cpu_seconds": self.log.cpu_seconds(), "time": self.log.time()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.log.seconds_before = state["seconds"]
        self.log.cpu_before = state["cpu_seconds"]
        self.log.time_before = state.get("time", {})  # older checkpoints have none


def smaller_rate(config: Config) -> float:
    """Return the learning rate to try after a run diverged: a tenth of the current one, at most the recipe's."""
    smaller = float(f"{config.optimizer.learning_rate / 10:g}")  # without the digits of rounding
    try:
        return min(smaller, usual_config(config.recipe, config.user_file, config.algorithm).optimizer.learning_rate)
    except UserError:  # the recipe's file was removed
        return smaller

"""The session of a run of a script, of one of several seeds, or of a Python program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from rlhf.callbacks.base import Callback
from rlhf.callbacks.checkpointing import BestCheckpoint, Checkpoints
from rlhf.callbacks.incidents import Incidents
from rlhf.callbacks.logging import FindingsWarning, ProgressLine, TensorBoardLog
from rlhf.callbacks.metrics_file import MetricsFile
from rlhf.callbacks.reward_warning import RewardWarning
from rlhf.callbacks.samples import Samples
from rlhf.callbacks.token_recorder import TokenRecord
from rlhf.callbacks.trackers import Trackers
from rlhf.checkpoints.run_folder import METRICS_LOG, PROMPTS_FOLDER, SAMPLES_FOLDER
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.token_record import TOKENS_FOLDER
from rlhf.distributed.group import agree, on_first, require_equal
from rlhf.distributed.weights import require_equal_weights
from rlhf.run.export import export_run
from rlhf.run.figures import results_of
from rlhf.run.record import start_run
from rlhf.run.resume import resume_run
from rlhf.run.summary import finish_run
from rlhf.settings.training import Config
from rlhf.setup.build import Components, build_trainer
from rlhf.setup.fit import estimator_of, what_helps
from rlhf.setup.plan import budget_line
from rlhf.setup.preflight import disk_has_room
from rlhf.trainer.findings import show_run_findings
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.session import Session
from rlhf.utils.console import Screen
from rlhf.utils.errors import raise_if
from rlhf.utils.files import write_jsonl
from rlhf.utils.processes import is_first, size
from rlhf.utils.results import json_ready
from rlhf.utils.signals import GracefulStop
from rlhf.utils.streams import guarded_streams
from rlhf.utils.timing import timed


@dataclass
class RunSession(Session):
    """With a folder, starts or resumes the run in it, saves checkpoints, and at the end the model, the results and the
    model card; Ctrl-C ends the run after a checkpoint. Without one, it prints, and sends to trackers."""

    config: Config
    components: Components  # from which its trainer is built
    screen: Screen  # prints warnings, and with `progress` the lines of updates, evaluations and results
    folder: Path | None = None  # of the run; None: nothing is written
    progress: bool = True  # False: only warnings are printed
    trainer: OnPolicyLoop | None = None
    log: RunLog | None = None
    checkpoints: Checkpoints | None = None

    @cached_property
    def shown(self) -> Screen:
        return self.screen if self.progress else Screen(quiet=True)

    def build_trainer(self) -> OnPolicyLoop:
        """Return the trainer of this session. Raises UserError if its files need more space than the disk has."""
        if self.folder is not None:
            disk = disk_has_room(self.config, self.components.policy, self.components.reward_model)
            raise_if([] if disk.ok else [disk.problem])
        return build_trainer(self.config, self.components, session=self)

    @contextmanager
    def opened(self, trainer: OnPolicyLoop) -> Iterator[None]:
        """Open the session around the training: files, callbacks, signals. Ends them also after an error."""
        self.trainer = trainer
        config = self.config
        if config.in_python:
            timed.restart()
        stop = None
        with ExitStack() as stack:
            stack.enter_context(guarded_streams())
            stack.enter_context(self.screen)
            if self.folder is not None:
                stop = stack.enter_context(GracefulStop(self.screen.say))  # until run.json is written
                with timed("checks"):
                    started = start_run(config, self.components, trainer.updates, self.screen)
                self.log = stack.enter_context(started)
            run_id = self.log and self.log.record.id
            trackers = stack.enter_context(Trackers(config, self.screen, run_id))
            check = self.log and self.log.check_place
            with trainer.events.extended([*self.callbacks(trainer, stop), trackers], check):
                agree(lambda: self._begin(trainer))
                yield
            self._finish(trainer, trackers)
        if self.folder is not None and is_first():  # the others need not wait: an upload may exceed --ddp-timeout
            export_run(config, self.shown)

    def callbacks(self, trainer: OnPolicyLoop, stop: GracefulStop | None) -> list[Callback]:
        """Return the callbacks that every run has. They only observe, so their order changes nothing. Those that print
        and write files are in the first process only."""
        found: list[Callback] = []
        if is_first():
            found += self._writers(trainer) if self.folder is not None else []
            found += [ProgressLine(trainer, self.screen)] if self.progress else []
            found += [FindingsWarning(trainer, self.screen), RewardWarning(trainer, self.screen)]
        if self.folder is not None:
            best = BestCheckpoint(trainer, self.config, self.log)
            self.checkpoints = Checkpoints(trainer, self.config, self.log, self.screen, stop, best)
            found += [best, self.checkpoints]
        return found

    def _writers(self, trainer: OnPolicyLoop) -> list[Callback]:
        config = self.config
        folder = self.folder
        tokenizer = trainer.processing_class
        tokens = TokenRecord(folder / TOKENS_FOLDER, config, tokenizer, trainer.train_prompts)
        return [
            TensorBoardLog(folder / "logs", self.log.training_time),
            MetricsFile(folder / METRICS_LOG),
            Samples(folder / SAMPLES_FOLDER, trainer.evaluation_prompts, tokenizer),
            *([tokens] if config.record.record_tokens else []),
            Incidents(trainer, config, self.screen),
        ]

    def _begin(self, trainer: OnPolicyLoop) -> None:
        """Load the checkpoint of a resumed run. In Python, store the prompts and print the length of the run: a script
        has printed its plan."""
        config = self.config
        if self.folder is not None:
            self.log.check_place()
            self.log.add(processes=size(), threads=torch.get_num_threads())
            if config.in_python and not config.run.resume:
                on_first(lambda: write_prompts(self.folder, trainer))
            resume_run(trainer, config, self.log, self.screen)
            require_equal({"the update": trainer.host.state.global_step}, "Give all machines the same run folder")
        if config.in_python or self.folder is None:
            self.shown.say(f"{config.title}: {budget_line(config, trainer.sampler.updates)}")

    def _finish(self, trainer: OnPolicyLoop, trackers: Trackers) -> None:
        """Save the model, print the summary and the warnings of the run, and send its results."""
        if self.folder is None:
            show_run_findings(trainer, self.screen)
            if trackers.trackers:
                trackers.finish(results_of(trainer.evaluations, trainer.config.run.seed))
            return
        require_equal_weights(trainer.host.model, "the last update")
        on_first(self._write_results)
        trackers.finish(self.log.record.figures)

    def _write_results(self) -> None:
        finish_run(self.config, self.trainer, self.log, self.shown)
        show_run_findings(self.trainer, self.screen)

    # --- what the loop calls -----------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        self.screen.say(line)

    def save(self, update: int, last: bool) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save_if_due(update, last)

    def roll_back(self, update: int) -> None:
        self.checkpoints.roll_back(update)

    def advice(self, by_score: bool) -> str:
        known = self.checkpoints is not None
        return self.checkpoints.advice(by_score) if known else super().advice(by_score)

    def memory_advice(self) -> str:
        known = self.folder is not None and self.trainer is not None
        return what_helps(self.config, estimator_of(self.trainer)) if known else super().memory_advice()


def write_prompts(folder: Path, trainer: OnPolicyLoop) -> None:
    """Write the rows of the prompts into the run's folder, from which they are evaluated later."""
    (folder / PROMPTS_FOLDER).mkdir()
    for name, prompts in (("train", trainer.train_prompts), ("evaluation", trainer.evaluation_prompts)):
        file = folder / PROMPTS_FOLDER / f"{name}.jsonl"
        write_jsonl(file, (json_ready(prompt.example.columns) for prompt in prompts))

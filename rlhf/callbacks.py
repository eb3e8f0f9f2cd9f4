"""Callbacks hear of updates and evaluations. They may change one thing, by one setter: the next update's beta."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedTokenizerBase

from config import IN_A_ROW, Config, make_config
from rlhf.algorithms.kl_control import RUNAWAY, KLController, kl_controller
from rlhf.checkpoints.best import Candidate, choose
from rlhf.checkpoints.manifest import find_checkpoints, set_aside, write_checkpoint
from rlhf.checkpoints.run_folder import BEST_FOLDER
from rlhf.checkpoints.run_record import RunLog
from rlhf.checkpoints.token_record import TOKENS_FOLDER, write_tokens
from rlhf.data.prompts import Prompt
from rlhf.data.sampler import one_line
from rlhf.incidents import save_incident
from rlhf.memory import forecaster, what_helps
from rlhf.rollout.completions import Rollout
from rlhf.settings.commands import replay_command, resume_command
from rlhf.tokens import token_rows
from rlhf.trainer.batch import Batch, Scored
from rlhf.trainer.evaluation import Evaluation
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.safety import Dropped
from rlhf.trainer.state import load_weights, save_trainer
from rlhf.utils.console import Screen, clock, number
from rlhf.utils.errors import RunError
from rlhf.utils.files import link_folder, replace_folder
from rlhf.utils.printing import PRINTED_FILE
from rlhf.utils.signals import Stopped, StopRequest

SOME_UPDATES = 10  # after which equal scores are no chance


class Callback:
    """What a trainer tells, and when. Everything is optional: any object with one of these methods will do."""

    def on_train_begin(self, trainer: Any) -> None:
        """Before the first evaluation."""

    def on_batch(self, update: int, batch: Batch, scored: Scored) -> None:
        """Before an update's optimizer steps, with what they will be made from."""

    def on_update_end(self, update: int, metrics: dict[str, float]) -> None:
        """After an update's optimizer steps, with what was logged of it."""

    def on_drop(self, update: int, rollout: Rollout, batch: Batch | None, found: Dropped) -> None:
        """In place of on_update_end, where the rest of an update was dropped: what was `found`, and on what."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """After an evaluation; the start model's comes first, with update 0."""

    def on_epoch_end(self, epoch: int, metrics: dict[str, float]) -> None:
        """After a pass over the training prompts, with the means of its updates' metrics."""

    def on_update_done(self, update: int) -> None:
        """After all of an update, its evaluation among it: between two updates, where checkpoints are made.

        A callback that remembers something gives it out as JSON-ready data by `state_dict()`, and takes it back by
        `load_state_dict(state)`: then checkpoints hold it.
        """

    def on_train_end(self) -> None:
        """After the last evaluation."""


class KLControl(Callback):
    """After every update: the controller hears the KL and sets the next update's beta."""

    def __init__(self, controller: KLController, steer: Callable[[float], None], episodes: int):
        """`steer` takes beta (the trainer's `set_kl_coef`); `episodes` is the number of replies per update."""
        self.controller, self.steer, self.episodes = controller, steer, episodes

    def on_update_end(self, update, metrics):
        self.steer(self.controller.update(metrics["kl_divergence"], metrics["kl_divergence/token"], self.episodes))

    def on_drop(self, update, rollout, batch, found):
        self.controller.skip()  # beta stays, and targets come into force in their updates

    def state_dict(self) -> dict[str, float]:
        return self.controller.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.controller.load_state_dict(state)


class TensorBoardLog(Callback):
    """Every logged number under its own name, over updates."""

    def __init__(self, folder: Path):
        self.folder, self.done, self.drops = folder, 0, None

    def on_train_begin(self, trainer):
        self.done, self.drops = trainer.state.global_step, trainer.drops

    @cached_property
    def writer(self) -> SummaryWriter:
        """What an interrupted session logged behind its last checkpoint comes again: readers drop the first."""
        behind = self.done + 1 if self.done else None
        # flushed often: a running run's curves are looked at
        return SummaryWriter(str(self.folder), flush_secs=10, purge_step=behind)

    def on_update_done(self, update):
        self.writer.flush()  # before the checkpoint of this update: what it stands on is not logged again

    def on_update_end(self, update, metrics):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, update)

    def on_drop(self, update, rollout, batch, found):
        self.writer.add_text("dropped", str(found), update)
        self.writer.add_scalar("updates/dropped", self.drops.count, update)

    def on_evaluation(self, evaluation):
        self.on_update_end(evaluation.update, evaluation.metrics())

    def on_train_end(self):
        self.writer.close()


class ProgressLine(Callback):
    """One live line per update, and a line for every evaluation."""

    def __init__(self, trainer: OnPolicyLoop, screen: Screen, controller: KLController):
        self.trainer, self.screen, self.controller = trainer, screen, controller
        self.started, self.first = time.monotonic(), 0

    def on_train_begin(self, trainer):
        self.started, self.first = time.monotonic(), trainer.state.global_step

    def on_update_end(self, update, metrics):
        updates, target = self.trainer.updates, self.controller.target_of(update)
        left = (time.monotonic() - self.started) / (update - self.first) * (updates - update)
        kl = metrics["kl_divergence" if target.per == "sequence" else "kl_divergence/token"]
        aim = "no target" if self.controller.horizon is None else f"target {target}"
        topic = self.trainer.dealing.topic_of(update)
        of = "" if topic is None else f"topic {one_line(topic)} | "
        self.screen.progress(
            f"update {update}/{updates} | {of}score {metrics['rewards/mean']:+.2f} | KL {kl:.3g} ({aim}) | "
            f"beta {metrics['kl_coef']:.3g} | reply {metrics['reply/length']:.0f} tokens | "
            f"{metrics['throughput/tokens_per_s']:,.0f} tokens/s | {clock(left)} left",
            last=update == updates,
        )

    def on_drop(self, update, rollout, batch, found):
        self.screen.say(f"warning: the rest of update {update} is dropped: {found}")

    def on_evaluation(self, evaluation):
        said = evaluation.metrics()
        self.screen.say(
            f"evaluation after {evaluation.update} updates: score {said['eval/score']:+.2f}, "
            f"KL {said['eval/kl_divergence']:.2f}/sequence, "
            f"perplexity {number(said['eval/perplexity'])} on {self.trainer.text.source}, "
            f"reply {said['eval/reply_length']:.0f} tokens, {said['eval/eos_rate']:.0%} end"
        )


class SameScores(Callback):
    """Warns, after some updates and at the end, where every reply scored the same, so that none is to be preferred."""

    def __init__(self, trainer: OnPolicyLoop, screen: Screen):
        self.trainer, self.screen = trainer, screen
        self.seen: set[float] = set()

    def on_batch(self, update, batch, scored):
        self.seen |= {float(scored.raw.min()), float(scored.raw.max())}

    def on_update_end(self, update, metrics):
        if len(self.seen) == 1 and update in (SOME_UPDATES, self.trainer.updates):
            self.screen.say(
                f"warning: every reply of {update} updates scored {min(self.seen):g}: {self.trainer.rewards}. "
                "There is nothing to learn from it; look at the reward functions"
            )

    def state_dict(self) -> dict[str, list[float]]:
        return {"seen": sorted(self.seen)[:2]}  # two are as good as many

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.seen = set(state["seen"])


class Samples(Callback):
    """Every evaluation's replies, as files."""

    def __init__(self, folder: Path, prompts: Sequence[Prompt]):
        self.folder, self.prompts = folder, prompts

    def on_evaluation(self, evaluation):
        evaluation.write(self.folder, self.prompts)


class TokenRecord(Callback):
    """What the trainer saw of every token of some episodes, as files."""

    def __init__(self, folder: Path, config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]):
        """`prompts` are the training prompts, in the order in which records number them."""
        self.folder, self.config, self.tokenizer = folder, config, tokenizer
        self.number_of = {id(prompt): i for i, prompt in enumerate(prompts)}

    def on_batch(self, update, batch, scored):
        record = self.config.record
        if update == 1 or update % record.record_every == 0:
            count = record.record_prompts * self.config.group_size  # a group's replies stand together
            numbers = [self.number_of[id(prompt)] for prompt in batch.rollout.prompts[:count]]
            gamma = self.config.ppo.gamma
            rows = token_rows(update, numbers, batch, scored.raw, self.tokenizer, gamma)
            write_tokens(self.folder, update, rows, record.record_format)


class Incidents(Callback):
    """Before a run gives up, all that is needed to do the update again goes into a folder."""

    def __init__(self, trainer: OnPolicyLoop, config: Config, screen: Screen):
        self.trainer, self.config, self.screen = trainer, config, screen

    def on_drop(self, update, rollout, batch, found):
        if self.trainer.drops.in_a_row == IN_A_ROW:
            folder = Path(self.config.run.output) / "incidents" / f"update-{update:06d}"
            save_incident(self.trainer, folder, update, rollout, batch, found)
            self.screen.say(f"the update, to look at: {folder}")
            replay = replay_command(self.config.algorithm, str(folder), self.config.reward.reward_func)
            self.screen.say(f"to repeat it, step by step: {replay}")


class BestCheckpoint(Callback):
    """Keeps the best evaluation's model in `best/`; what was chosen, from what and why goes to run.json."""

    def __init__(self, trainer: OnPolicyLoop, config: Config, controller: KLController, log: RunLog):
        self.trainer, self.config, self.controller, self.log = trainer, config, controller, log
        self.candidates: list[Candidate] = []
        self.memory: list[float] = []

    def on_evaluation(self, evaluation):
        said, run = evaluation.metrics(), self.config.run
        target = self.controller.target_of(evaluation.update)
        self.candidates.append(
            Candidate(
                update=evaluation.update,
                score=said["eval/score"],
                kl=said["eval/kl_divergence" if target.per == "sequence" else "eval/kl_divergence/token"],
                target=target.nats if self.config.kl.steered else None,
                perplexity=said["eval/perplexity"],
            )
        )
        self.memory.append(self.trainer.peak_memory / 2**30)
        best, why = choose(self.candidates, run.best_rule, run.perplexity_gate)
        if best == len(self.candidates) - 1:
            replace_folder(Path(run.output) / BEST_FOLDER, self.trainer.save_model)
        self.log.add(
            best={
                "update": self.candidates[best].update,
                "why": why,
                "rule": run.best_rule,
                "kl_unit": f"nats/{target.per}",
                "perplexity_text": self.trainer.text.source,
                "evaluations": [
                    {**asdict(c), "peak_memory_gib": gib} for c, gib in zip(self.candidates, self.memory, strict=True)
                ],
            }
        )

    def state_dict(self) -> dict[str, Any]:
        return {"candidates": [asdict(c) for c in self.candidates], "memory": self.memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.candidates, self.memory = [Candidate(**c) for c in state["candidates"]], state["memory"]


class KLGuard(Callback):
    """A KL beyond 4 times its target doubles beta at once; with --rollback-on-kl, after some such updates in a row the
    weights go back to the last checkpoint from before. The run goes on from there, its updates counted on."""

    def __init__(self, trainer: OnPolicyLoop, config: Config, controller: KLController, log: RunLog, screen: Screen):
        self.trainer, self.config, self.controller, self.log, self.screen = trainer, config, controller, log, screen
        self.in_a_row = 0

    def on_update_end(self, update, metrics):
        target = self.controller.target_of(update)
        kl = metrics["kl_divergence" if target.per == "sequence" else "kl_divergence/token"]
        if kl <= RUNAWAY * target.nats:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.trainer.set_kl_coef(self.controller.raise_beta(2.0))
        self.screen.say(
            f"warning: KL {kl:.3g}/{target.per} is {kl / target.nats:.1f} times its target: beta doubled, to "
            f"{self.controller.beta:.3g}"
        )
        if self.config.run.rollback_on_kl and self.in_a_row >= IN_A_ROW:
            self.roll_back(update)

    def roll_back(self, update: int) -> None:
        """To the newest sound checkpoint from before the KL ran away."""
        begun, self.in_a_row = update - self.in_a_row, 0
        found = find_checkpoints(Path(self.config.run.output), self.log.data["id"])
        # an update's KL is measured on the weights that it begins with: those after update `begun` had run away
        before = [number for number in found.sound if number < begun]
        if not before:
            self.screen.say("warning: no sound checkpoint from before it ran away: --rollback-on-kl can do nothing")
            return
        load_weights(self.trainer, found.sound[max(before)])
        self.screen.say(f"back to the weights after update {max(before)}: those after update {begun} had run away")

    def state_dict(self) -> dict[str, int]:
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.in_a_row = state["in_a_row"]


class Checkpoints(Callback):
    """Saves the whole trainer every `save_every` updates, at the end, and if the run was asked to stop, which it then
    does. After a skipped update nothing is saved before an update succeeds, except at the end of the run."""

    def __init__(self, trainer: OnPolicyLoop, config: Config, log: RunLog, screen: Screen, stop: StopRequest):
        self.trainer, self.config, self.log, self.screen, self.stop = trainer, config, log, screen, stop
        self.folder = Path(config.run.output)
        self.overdue = False  # a save was due after a skipped update

    def on_batch(self, update, batch, scored):
        self.log.check_place()  # before an update's work is done for nothing

    def on_update_done(self, update):
        self.log.check_place()
        last, by, skipped = update == self.trainer.updates, self.stop.by, self.trainer.drops.in_a_row > 0
        if last and skipped:
            self.screen.say(f"warning: the last update, {update}, was skipped; the weights are finite and are saved")
        due = self.overdue or by is not None or update % self.config.run.save_every == 0
        self.overdue = due and skipped
        if last or (due and not skipped):
            self.save(update)
        if by is not None and not last:
            saved = f"which was skipped, so nothing new is saved; {self.in_force()}" if skipped else "saved"
            raise Stopped(by, f"stopped after update {update} of {self.trainer.updates}, {saved}. {self.way_on()}")

    def in_force(self) -> str:
        """Names the checkpoint that a resume uses."""
        newest = find_checkpoints(self.folder, self.log.data["id"]).newest
        return "there is no checkpoint yet" if newest is None else f"the newest checkpoint is {newest.name}"

    def save(self, update: int) -> None:
        """Raises RunError where the disk does not take it."""
        run, keep = self.log.data["id"], self.config.run.keep
        try:
            write_checkpoint(self.folder, run, update, keep, self.fill)
        except OSError as error:
            raise RunError(
                f"the checkpoint of update {update} could not be saved ({error}): {self.folder}; {self.in_force()}. "
                f"Make room there. {self.way_on()}"
            ) from None

    def fill(self, folder: Path) -> None:
        save_trainer(self.trainer, folder)
        if (self.folder / BEST_FOLDER).is_dir():
            link_folder(self.folder / BEST_FOLDER, folder / BEST_FOLDER)

    def way_on(self) -> str:
        return f"Resume with: {resume_command(self.config)}"

    def recovery(self, by_score: bool) -> str:
        """The advice for a run that gives up: a command that works as printed.

        If the weights are the reason, checkpoints from after the last update whose weights proved usable are set
        aside, so that the command resumes from an older one, or starts over.
        """
        if by_score:
            return f"Fix the reward function, then {self.way_on()[0].lower()}{self.way_on()[1:]}"
        names = set_aside(self.folder, self.log.data["id"], self.trainer.proved)
        aside = ""
        if names:
            aside = f"Set aside, because no optimizer step could be taken from its weights: {', '.join(names)}. "
        rate = ("--resume-anyway", "--learning-rate", f"{smaller_rate(self.config):g}")
        return f"{aside}Use a smaller learning rate: {resume_command(self.config, *rate)}"

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.log.seconds()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.log.before = state["seconds"]


def smaller_rate(config: Config) -> float:
    """A learning rate to try after a run diverged: a tenth, and not above the recipe's."""
    usual = make_config(config.recipe, config.algorithm).optimizer.learning_rate
    return min(config.optimizer.learning_rate / 10, usual)


def attach_callbacks(trainer: OnPolicyLoop, config: Config, log: RunLog, screen: Screen, stop: StopRequest) -> None:
    """What every run has: TensorBoard, replies as files, the live line, the best checkpoint, KL control, checkpoints.
    The line shows the beta that the update was made with, so control comes after it."""
    controller = kl_controller(config, trainer.updates)
    output = Path(config.run.output)
    trainer.rewards.printed = output / PRINTED_FILE
    trainer.limits.advise = lambda: what_helps(config, trainer.actor.policy, forecaster(trainer))
    trainer.add_callback(TensorBoardLog(output / "logs"))
    trainer.add_callback(Samples(output / "samples", trainer.evaluation_prompts))
    if config.record.record_tokens:
        tokenizer, prompts = trainer.processing_class, trainer.train_prompts
        trainer.add_callback(TokenRecord(output / TOKENS_FOLDER, config, tokenizer, prompts))
    trainer.add_callback(ProgressLine(trainer, screen, controller))
    trainer.add_callback(Incidents(trainer, config, screen))
    trainer.add_callback(SameScores(trainer, screen))
    trainer.add_callback(BestCheckpoint(trainer, config, controller, log))
    trainer.add_callback(KLControl(controller, trainer.set_kl_coef, config.episodes_per_update))
    if config.kl.steered:
        trainer.add_callback(KLGuard(trainer, config, controller, log, screen))
    checkpoints = Checkpoints(trainer, config, log, screen, stop)
    trainer.recovery = checkpoints.recovery
    trainer.add_callback(checkpoints)

"""Callbacks hear of updates and evaluations. They may change one thing, by one setter: the next update's beta."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedTokenizerBase

from config import Config
from rlhf.best import Candidate, choose
from rlhf.checkpoints import BEST_FOLDER, replace_folder
from rlhf.console import Screen, clock
from rlhf.controllers import KLController
from rlhf.evaluation import Evaluation
from rlhf.loop import OnPolicyLoop
from rlhf.metrics import Batch, Scored
from rlhf.prompts import Prompt
from rlhf.runlogs import RunLog
from rlhf.tokens import TOKENS_FOLDER, token_rows, write_tokens

SOME_UPDATES = 10  # after which equal scores are no chance


class Callback:
    """What a trainer tells, and when. Everything is optional: any object with one of these methods will do."""

    def on_train_begin(self, trainer: Any) -> None:
        """Before the first evaluation."""

    def on_batch(self, update: int, batch: Batch, scored: Scored) -> None:
        """Before an update's optimizer steps, with what they will be made from."""

    def on_update_end(self, update: int, metrics: dict[str, float]) -> None:
        """After an update's optimizer steps, with what was logged of it."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """After an evaluation; the start model's comes first, with update 0."""

    def on_epoch_end(self, epoch: int, metrics: dict[str, float]) -> None:
        """After a pass over the training prompts, with the means of its updates' metrics."""

    def on_train_end(self) -> None:
        """After the last evaluation."""


class KLControl(Callback):
    """After every update: the controller hears the KL and sets the next update's beta."""

    def __init__(self, controller: KLController, steer: Callable[[float], None], episodes: int):
        """`steer` takes beta (the trainer's `set_kl_coef`); `episodes` is the number of replies per update."""
        self.controller, self.steer, self.episodes = controller, steer, episodes

    def on_update_end(self, update, metrics):
        self.steer(self.controller.update(metrics["kl_divergence"], metrics["kl_divergence/token"], self.episodes))


class TensorBoardLog(Callback):
    """Every logged number under its own name, over updates."""

    def __init__(self, folder: Path):
        self.writer = SummaryWriter(str(folder), flush_secs=10)  # curves of a running run are looked at

    def on_update_end(self, update, metrics):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, update)

    def on_evaluation(self, evaluation):
        self.on_update_end(evaluation.update, evaluation.metrics())

    def on_train_end(self):
        self.writer.close()


class ProgressLine(Callback):
    """One live line per update, and a line for every evaluation."""

    def __init__(self, trainer: OnPolicyLoop, screen: Screen, controller: KLController):
        self.trainer, self.screen, self.controller = trainer, screen, controller
        self.started = time.monotonic()

    def on_train_begin(self, trainer):
        self.started = time.monotonic()

    def on_update_end(self, update, metrics):
        updates, target = self.trainer.updates, self.controller.target_of(update)
        left = (time.monotonic() - self.started) / update * (updates - update)
        kl = metrics["kl_divergence" if target.per == "sequence" else "kl_divergence/token"]
        aim = "no target" if self.controller.horizon is None else f"target {target}"
        self.screen.progress(
            f"update {update}/{updates} | score {metrics['rewards/mean']:+.2f} | KL {kl:.3g} ({aim}) | "
            f"beta {metrics['kl_coef']:.3g} | reply {metrics['reply/length']:.0f} tokens | "
            f"{metrics['throughput/tokens_per_s']:,.0f} tokens/s | {clock(left)} left",
            last=update == updates,
        )

    def on_evaluation(self, evaluation):
        said = evaluation.metrics()
        self.screen.say(
            f"evaluation after {evaluation.update} updates: score {said['eval/score']:+.2f}, "
            f"KL {said['eval/kl_divergence']:.2f}/sequence, "
            f"perplexity {said['eval/perplexity']:.2f} on {self.trainer.text.source}, "
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


def kl_controller(config: Config, updates: int) -> KLController:
    """The controller that the settings ask for, for a run of `updates` updates."""
    kl = config.kl
    horizon = kl.kl_horizon if kl.steered else None
    return KLController(kl.kl_coef, kl.targets, horizon, updates, kl.kl_boundaries)


def attach_callbacks(trainer: OnPolicyLoop, config: Config, log: RunLog, screen: Screen) -> None:
    """What every run has: TensorBoard, replies as files, the live line, the best checkpoint, KL control. The line
    shows the beta that the update was made with, so control comes last."""
    controller = kl_controller(config, trainer.updates)
    output = Path(config.run.output)
    trainer.add_callback(TensorBoardLog(output / "logs"))
    trainer.add_callback(Samples(output / "samples", trainer.evaluation_prompts))
    if config.record.record_tokens:
        tokenizer, prompts = trainer.processing_class, trainer.train_prompts
        trainer.add_callback(TokenRecord(output / TOKENS_FOLDER, config, tokenizer, prompts))
    trainer.add_callback(ProgressLine(trainer, screen, controller))
    trainer.add_callback(SameScores(trainer, screen))
    trainer.add_callback(BestCheckpoint(trainer, config, controller, log))
    trainer.add_callback(KLControl(controller, trainer.set_kl_coef, config.episodes_per_update))

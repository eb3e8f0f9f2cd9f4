"""One training run, from its settings to the saved model."""

from __future__ import annotations

from pathlib import Path

from config import Config
from rlhf.algorithms.kl_control import kl_controller
from rlhf.callbacks.checkpointing import BestCheckpoint, Checkpoints
from rlhf.callbacks.incidents import Incidents
from rlhf.callbacks.kl import KLControl, KLGuard
from rlhf.callbacks.logging import ProgressLine, SameScores, TensorBoardLog
from rlhf.callbacks.samples import Samples
from rlhf.callbacks.token_recorder import TokenRecord
from rlhf.checkpoints.run_record import RunLog
from rlhf.checkpoints.token_record import TOKENS_FOLDER
from rlhf.memory import forecaster, what_helps
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen
from rlhf.utils.printing import PRINTED_FILE
from rlhf.utils.signals import StopRequest


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

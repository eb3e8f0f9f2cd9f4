"""Callbacks listen to the log. What they may change is the next update's KL coefficient, through one setter."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback

from config import Config
from rlhf.console import Screen, clock
from rlhf.controllers import KLController

NOT_SCALARS = {"epoch", "step"}  # transformers adds these to every log


class KLControl(TrainerCallback):
    """After every update: the controller hears the KL and sets the next update's beta."""

    def __init__(self, controller: KLController, steer: Callable[[float], None], episodes: int):
        """`steer` takes beta (the trainer's `set_kl_coef`); `episodes` is the number of replies per update."""
        self.controller, self.steer, self.episodes = controller, steer, episodes

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "kl_divergence" in logs:
            self.steer(self.controller.update(logs["kl_divergence"], logs["kl_divergence/token"], self.episodes))


class TensorBoardLog(TrainerCallback):
    """Every logged number under its own name. (transformers' callback would put `train/` before each.)"""

    def __init__(self, folder: Path):
        self.writer = SummaryWriter(str(folder))

    def on_log(self, args, state, control, logs=None, **_):
        for name, value in (logs or {}).items():
            if name not in NOT_SCALARS:
                self.writer.add_scalar(name, value, state.global_step)

    def on_train_end(self, args, state, control, **_):
        self.writer.close()


class ProgressLine(TrainerCallback):
    """One live line per update, and a line for every evaluation."""

    def __init__(self, screen: Screen, controller: KLController, updates: int):
        self.screen, self.controller, self.updates = screen, controller, updates
        self.started = time.monotonic()

    def on_train_begin(self, args, state, control, **_):
        self.started = time.monotonic()

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "rewards/mean" in logs:
            done = state.global_step
            left = (time.monotonic() - self.started) / done * (self.updates - done)
            target = self.controller.target
            kl = logs["kl_divergence" if target.per == "sequence" else "kl_divergence/token"]
            aim = "no target" if self.controller.horizon is None else f"target {target}"
            self.screen.progress(
                f"update {done}/{self.updates} | score {logs['rewards/mean']:+.2f} | KL {kl:.3g} ({aim}) | "
                f"beta {logs['kl_coef']:.3g} | reply {logs['reply/length']:.0f} tokens | "
                f"{logs['throughput/tokens_per_s']:,.0f} tokens/s | {clock(left)} left",
                last=done == self.updates,
            )
        elif logs and "eval/score" in logs:
            self.screen.say(
                f"evaluation after {state.global_step} updates: score {logs['eval/score']:+.2f}, "
                f"KL {logs['eval/kl_divergence']:.2f}/sequence, perplexity {logs['eval/perplexity']:.2f}, "
                f"reply {logs['eval/reply_length']:.0f} tokens, {logs['eval/eos_rate']:.0%} end"
            )


def kl_controller(config: Config, updates: int) -> KLController:
    """The controller that the settings ask for, for a run of `updates` updates."""
    kl = config.kl
    horizon = None if kl.kl_schedule == "fixed" else kl.kl_horizon
    return KLController(kl.kl_coef, kl.kl_target, horizon, updates)


def attach_callbacks(trainer, config: Config, screen: Screen) -> None:
    """What every run has: TensorBoard, the live line, KL control. The line shows the beta that the update was made
    with, so control comes last."""
    controller = kl_controller(config, trainer.updates)
    trainer.add_callback(TensorBoardLog(Path(config.run.output) / "logs"))
    trainer.add_callback(ProgressLine(screen, controller, trainer.updates))
    trainer.add_callback(KLControl(controller, trainer.set_kl_coef, config.ppo.batch_size))

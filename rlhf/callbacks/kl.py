"""KL control during a run: beta after every update, and a guard against a KL that runs away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhf.algorithms.kl_control import RUNAWAY, KLController
from rlhf.callbacks.base import Callback
from rlhf.checkpoints.manifest import find_checkpoints
from rlhf.checkpoints.run_log import RunLog
from rlhf.settings.training import MAX_CONSECUTIVE_SKIPS, Config
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.state import load_weights
from rlhf.utils.console import Screen


class KLControl(Callback):
    """After every update: the controller receives the KL and sets the next update's beta."""

    def __init__(self, controller: KLController, steer: Callable[[float], None], episodes: int):
        """`steer` takes beta (the trainer's `set_kl_coef`); `episodes` is the number of replies per update."""
        self.controller, self.steer, self.episodes = controller, steer, episodes

    def on_update_end(self, update, metrics):
        self.steer(self.controller.update(metrics["kl_divergence"], metrics["kl_divergence/token"], self.episodes))

    def on_update_skipped(self, update, rollout, batch, reason):
        self.controller.skip()  # beta stays, and targets come into force in their updates

    def state_dict(self) -> dict[str, float]:
        return self.controller.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.controller.load_state_dict(state)


class KLGuard(Callback):
    """A KL beyond 4 times its target doubles beta at once; with --rollback-on-kl, after some such updates in a row the
    weights go back to the last checkpoint from before. The run goes on from there, its updates counted on."""

    def __init__(self, trainer: OnPolicyLoop, config: Config, controller: KLController, log: RunLog, screen: Screen):
        self.trainer, self.config, self.controller, self.log, self.screen = trainer, config, controller, log, screen
        self.in_a_row = 0

    def on_update_end(self, update, metrics):
        target = self.controller.target_of(update)
        kl = metrics[target.metric]
        if kl <= RUNAWAY * target.nats:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.trainer.set_kl_coef(self.controller.raise_beta(2.0))
        self.screen.say(
            f"warning: KL {kl:.3g}/{target.per} is {kl / target.nats:.1f} times its target: beta doubled, to "
            f"{self.controller.beta:.3g}"
        )
        if self.config.run.rollback_on_kl and self.in_a_row >= MAX_CONSECUTIVE_SKIPS:
            self.roll_back(update)

    def roll_back(self, update: int) -> None:
        """Load the newest valid checkpoint from before the KL ran away."""
        runaway_update, self.in_a_row = update - self.in_a_row, 0
        found = find_checkpoints(Path(self.config.run.output), self.log.record.id)
        # an update's KL is that of the weights that it begins with: those after `runaway_update` had run away
        before = [number for number in found.valid if number < runaway_update]
        if not before:
            self.screen.say("warning: no valid checkpoint from before it ran away: --rollback-on-kl can do nothing")
            return
        load_weights(self.trainer, found.valid[max(before)])
        self.screen.say(
            f"back to the weights after update {max(before)}: those after update {runaway_update} had run away"
        )

    def state_dict(self) -> dict[str, int]:
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.in_a_row = state["in_a_row"]

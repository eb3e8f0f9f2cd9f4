"""KL control during a run: sets beta after every update, and reacts to a KL far above its target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhf.algorithms.kl_control import RUNAWAY, KLController
from rlhf.callbacks.base import Callback
from rlhf.checkpoints.manifest import find_checkpoints
from rlhf.checkpoints.run_log import RunLog
from rlhf.distributed.group import agree, from_first
from rlhf.settings.training import MAX_CONSECUTIVE_SKIPS, Config
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.state import load_weights
from rlhf.utils.console import Screen


def attach_kl_control(trainer: OnPolicyLoop, controller: KLController, log: RunLog | None, screen: Screen) -> None:
    """Attach the KL controller and its guard if beta is adaptive. Otherwise beta changes only by `set_kl_coef`.

    `log` is that of the run's folder; None: there is no folder.
    """
    config = trainer.config
    if config.kl.steered:
        held = config.critic.critic_warmup
        trainer.add_callback(KLControl(controller, trainer.set_kl_coef, config.episodes_per_update, held))
        trainer.add_callback(KLGuard(trainer, config, controller, log, screen))


class KLControl(Callback):
    """Passes each update's KL to the controller, and sets the next update's beta."""

    def __init__(self, controller: KLController, steer: Callable[[float], None], episodes: int, held: int = 0):
        """`steer` receives beta (the trainer's `set_kl_coef`). `episodes` is the number of episodes per update.

        In the first `held` updates beta does not change: the policy is frozen, so its KL of 0 says nothing about beta.
        """
        self.controller, self.steer, self.episodes, self.held = controller, steer, episodes, held

    def on_update_end(self, update, metrics):
        if update <= self.held:
            self.controller.skip()
            return
        self.steer(self.controller.update(metrics["kl_divergence"], metrics["kl_divergence/token"], self.episodes))

    def on_update_skipped(self, update, rollout, batch, reason):
        self.controller.skip()  # beta is unchanged, but the update counts for the phases of the targets

    def state_dict(self) -> dict[str, float]:
        return self.controller.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.controller.load_state_dict(state)


class KLGuard(Callback):
    """Doubles beta if the KL is above 4 times its target.

    With --rollback-on-kl, after several such updates in a row it loads the weights of the last checkpoint from before
    them. Training continues with the next update's number.
    """

    def __init__(
        self, trainer: OnPolicyLoop, config: Config, controller: KLController, log: RunLog | None, screen: Screen
    ):
        """`log` is that of the run's folder; None: there is no folder, and --rollback-on-kl is off."""
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
            f"warning: KL {kl:.3g}/{target.per} is {kl / target.nats:.1f} times its target. Beta was doubled to "
            f"{self.controller.beta:.3g}"
        )
        if self.config.run.rollback_on_kl and self.in_a_row >= MAX_CONSECUTIVE_SKIPS:
            self.roll_back(update)

    def roll_back(self, update: int) -> None:
        """Load the weights of the newest valid checkpoint from before the KL ran away."""
        runaway_update, self.in_a_row = update - self.in_a_row, 0
        found = from_first(lambda: find_checkpoints(Path(self.config.run.output), self.log.record.id))
        # An update's KL is that of the weights at its start, so the weights after `runaway_update` had run away.
        before = [number for number in found.valid if number < runaway_update]
        if not before:
            self.screen.say(
                "warning: cannot roll back, because no valid checkpoint is from before the KL became too high: "
                "--rollback-on-kl"
            )
            return
        agree(lambda: load_weights(self.trainer, found.valid[max(before)]))
        self.screen.say(
            f"rolled back to the weights after update {max(before)}, because the KL was too high with the weights "
            f"after update {runaway_update}"
        )

    def state_dict(self) -> dict[str, int]:
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.in_a_row = state["in_a_row"]

"""Beta during a run: the loop asks this class for the beta of each update, and gives it each update's KL."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.algorithms.kl_control import RUNAWAY, kl_controller
from rlhf.settings.training import Config
from rlhf.settings.types import KLTarget
from rlhf.trainer.safety import checked_beta


class KLControl:
    """Owns beta: the controller changes it after an update, and a program by `request`.

    A KL above 4 times its target doubles beta at once: the controller, whose error is clipped to 20%, would need many
    updates.
    """

    def __init__(self, config: Config, updates: int):
        """`updates` is the number of updates in the run."""
        self.controller = kl_controller(config, updates)
        self.steered = config.kl.steered
        self.episodes = config.episodes_per_update
        self.requested: float | None = None
        self.runaways = 0  # updates in a row with a KL far above the target

    @property
    def beta(self) -> float:
        """The beta of the next update, score units per nat."""
        return self.controller.beta if self.requested is None else self.requested

    def request(self, beta: float) -> None:
        """Set the beta of the next update. The controller continues from it. Raises RunError for what --kl-coef
        refuses."""
        self.requested = checked_beta(beta)

    def apply_request(self) -> None:
        """Make the requested beta, if there is one, that of the controller."""
        self.controller.beta = self.beta
        self.requested = None

    def target_of(self, update: int) -> KLTarget:
        """The target of an update, counted from 1."""
        return self.controller.target_of(update)

    def after_update(self, update: int, metrics: dict[str, float], frozen: bool) -> Iterator[str]:
        """Set the next beta from an update's KL, if beta is adaptive. Yields a warning if the KL is far too high.
        `frozen`: the update has not trained the policy."""
        if not self.steered:
            return
        if "kl_divergence" not in metrics:  # no episode is of the present weights
            self.controller.skip()
            return
        if frozen:  # the KL of 0 has no information about beta
            self.controller.skip()
        else:
            self.controller.update(metrics["kl_divergence"], metrics["kl_divergence/token"], self.episodes)
        target = self.target_of(update)
        kl = metrics[target.metric]
        if kl <= RUNAWAY * target.nats:
            self.runaways = 0
            return
        self.runaways += 1
        beta = self.controller.raise_beta(2.0)
        yield (
            f"warning: KL {kl:.3g}/{target.per} is {kl / target.nats:.1f} times its target. Beta was doubled to "
            f"{beta:.3g}"
        )

    def after_skipped_update(self) -> None:
        """Count an update without a KL: beta is unchanged, but the phases of the targets continue."""
        if self.steered:
            self.controller.skip()

    def state_dict(self) -> dict[str, float]:
        return {**self.controller.state_dict(), "beta": self.beta, "runaways": self.runaways}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.controller.load_state_dict(state)
        self.runaways = int(state["runaways"])

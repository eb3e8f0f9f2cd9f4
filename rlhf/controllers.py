"""KL control: floats only, saveable, the same for every algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.knobs import KLTarget

LARGEST_ERROR = 0.2  # Ziegler et al. 2019, sec. 2.2: one update reacts to an error of at most 20%


class KLController:
    """Steers beta, the price of a nat, so that the measured KL meets the target in force.

    Fixed: `horizon` is None and beta never moves. Adaptive: one target. Phased: several targets, in force one after
    another for equal parts of the run.
    """

    def __init__(self, beta: float, targets: Sequence[KLTarget], horizon: int | None, updates: int):
        """`beta` in score units per nat; `horizon` in episodes; `updates` is the length of the run."""
        self.beta = beta
        self.targets = tuple(targets)
        self.horizon = horizon
        self.updates = updates
        self.done = 0

    @property
    def target(self) -> KLTarget:
        """The target in force for the update that comes next."""
        phase = self.done * len(self.targets) // max(self.updates, 1)
        return self.targets[min(phase, len(self.targets) - 1)]

    def update(self, kl_per_sequence: float, kl_per_token: float, episodes: int) -> float:
        """Take note of one update's KL (nats) over `episodes` replies; returns the next update's beta.

        beta <- beta * (1 + clip(KL / target - 1, -0.2, 0.2) * episodes / horizon)   (Ziegler et al. 2019, sec. 2.2)

        One step never takes away more than half of beta, however short the horizon: beta stays above 0.
        """
        if self.horizon is not None:
            kl = kl_per_sequence if self.target.per == "sequence" else kl_per_token
            error = min(max(kl / self.target.nats - 1, -LARGEST_ERROR), LARGEST_ERROR)
            self.beta *= max(1 + error * episodes / self.horizon, 0.5)
        self.done += 1
        return self.beta

    def largest_move(self, episodes: int) -> float:
        """The factor by which beta can grow in a whole run of `updates` updates of `episodes` replies each."""
        return 1.0 if self.horizon is None else (1 + LARGEST_ERROR * episodes / self.horizon) ** self.updates

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta, "done": self.done}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.beta, self.done = float(state["beta"]), int(state["done"])


def in_band(kl: float, target: float, band: tuple[float, float] = (0.5, 1.5)) -> bool:
    """Whether a measured KL stands within `band` times its target (same unit)."""
    return band[0] * target <= kl <= band[1] * target

"""KL control: the coefficient beta of the KL penalty, fixed, adaptive or phased. Floats only, saveable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

from rlhf.settings.training import Config
from rlhf.settings.types import KLTarget

LARGEST_ERROR = 0.2  # Ziegler et al. 2019, sec. 2.2: one update reacts to an error of at most 20%
KL_BAND = (0.5, 1.5)  # times the target: where a steered KL should end
RUNAWAY = 4.0  # times the target: a KL that steering by 20% at a time will not catch
SMALLEST_MOVE = 3.0  # a beta that cannot move this far in a phase does not enforce its KL target
MOST_LOG = 700.0  # exp of more is no float
LONGEST_HORIZON = 10_000  # episodes; Ziegler et al. 2019
LOWEST_BETA = 1e-4  # a beta that fell to nothing, in updates of low KL, would take as many to come back


class KLController:
    """Steers beta, the price of a nat, so that the measured KL meets the target in force.

    Fixed: `horizon` is None and beta never moves. Adaptive: one target. Phased: several targets, in force one after
    another.
    """

    def __init__(
        self,
        beta: float,
        targets: Sequence[KLTarget],
        horizon: int | None,
        updates: int,
        boundaries: Sequence[float] | None = None,
    ):
        """`beta` in score units per nat; `horizon` in episodes; `updates` is the length of the run; `boundaries` are
        the shares of the run at which the next target comes into force (None: equal phases)."""
        self.beta = beta
        self.floor = min(LOWEST_BETA, beta)
        self.targets = tuple(targets)
        self.horizon = horizon
        self.updates = updates
        self.boundaries = tuple(boundaries or (i / len(self.targets) for i in range(1, len(self.targets))))
        self.done = 0

    @property
    def phases(self) -> list[tuple[int, int, KLTarget]]:
        """First update, last update and target of each phase."""
        ends = [round(share * self.updates) for share in (0.0, *self.boundaries, 1.0)]
        return [(a + 1, b, target) for (a, b), target in zip(pairwise(ends), self.targets, strict=True)]

    @property
    def target(self) -> KLTarget:
        """The target in force for the update that comes next."""
        return self.target_of(self.done + 1)

    def target_of(self, update: int) -> KLTarget:
        """The target in force in an update, counted from 1; the start has the first one, after the run the last."""
        return next((target for _, last, target in self.phases if update <= last), self.targets[-1])

    def update(self, kl_per_sequence: float, kl_per_token: float, episodes: int) -> float:
        """Steer by one update's KL (nats) over `episodes` completions; returns the next update's beta.

        beta <- beta * (1 + clip(KL / target - 1, -0.2, 0.2) * episodes / horizon)   (Ziegler et al. 2019, sec. 2.2)

        One step never takes away more than half of beta, however short the horizon, and beta never falls below
        1e-4 (or its start, where that is lower).
        """
        if self.horizon is not None:
            kl = kl_per_sequence if self.target.per == "sequence" else kl_per_token
            error = min(max(kl / self.target.nats - 1, -LARGEST_ERROR), LARGEST_ERROR)
            self.beta = max(self.beta * max(1 + error * episodes / self.horizon, 0.5), self.floor)
        self.done += 1
        return self.beta

    def skip(self) -> None:
        """Count a skipped update: its KL is unknown."""
        self.done += 1

    def raise_beta(self, factor: float) -> float:
        """At once, whatever the horizon; returns beta."""
        self.beta *= factor
        return self.beta

    @property
    def shortest_phase(self) -> int:
        """Updates of the shortest phase that has any."""
        return min((last - first + 1 for first, last, _ in self.phases if last >= first), default=self.updates)

    def largest_move(self, episodes: int) -> float:
        """The factor by which beta can grow in the shortest phase, at `episodes` completions per update."""
        if self.horizon is None:
            return 1.0
        return move_in(self.shortest_phase, episodes, self.horizon)

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta, "done": self.done}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.beta, self.done = float(state["beta"]), int(state["done"])


def kl_controller(config: Config, updates: int) -> KLController:
    """Return the controller for a run of `updates` updates under these settings."""
    kl = config.kl
    controller = KLController(kl.kl_coef, kl.targets, None, updates, kl.kl_boundaries)
    if kl.steered:
        own = default_horizon(controller.shortest_phase, config.episodes_per_update)
        controller.horizon = kl.kl_horizon or own
    return controller


def move_in(updates: int, episodes: int, horizon: int) -> float:
    """Return the factor by which beta can grow in some updates: (1 + 0.2 * episodes / horizon) ** updates."""
    return math.exp(min(updates * math.log1p(LARGEST_ERROR * episodes / horizon), MOST_LOG))


def default_horizon(shortest_phase: int, episodes: int) -> int:
    """Return the horizon in episodes that lets beta move about 11-fold in a phase of `shortest_phase` updates of
    `episodes` each: (1 + 0.2 * 12 / updates) ** updates is about e ** 2.4.

    At least two updates' episodes, so that one update moves beta by at most 10%; else at most Ziegler's 10,000.
    """
    return max(2 * episodes, min(LONGEST_HORIZON, round(shortest_phase * episodes / 12)))


def with_horizon(config: Config, updates: int) -> Config:
    """Return the settings with the default horizon of a run of `updates` updates as a number."""
    horizon = kl_controller(config, updates).horizon
    if horizon is None or config.kl.kl_horizon is not None:
        return config
    return dataclasses.replace(config, kl=dataclasses.replace(config.kl, kl_horizon=horizon))


def in_band(kl: float, target: float, band: tuple[float, float] = KL_BAND) -> bool:
    """Whether a measured KL stands within `band` times its target (same unit)."""
    return band[0] * target <= kl <= band[1] * target

"""KL control: the coefficient beta of the KL penalty, fixed, adaptive or phased. docs/how_it_works.md explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rlhf.settings.fields import replaced
from rlhf.settings.training import Config
from rlhf.settings.types import KLTarget

LARGEST_ERROR = 0.2  # relative error to which one update reacts at most (Ziegler et al. 2019, sec. 2.2)
KL_BAND = (0.5, 1.5)  # times the target: the range in which a controlled KL should end
RUNAWAY = 4.0  # times the target: a larger KL is too far off for the controller, whose error is clipped to 20%
SMALLEST_MOVE = 3.0  # the controller cannot enforce a KL target if beta cannot change by this factor in a phase
MOST_LOG = 700.0  # exp of a larger number overflows a float
LONGEST_HORIZON = 10_000  # episodes (Ziegler et al. 2019)
LOWEST_BETA = 1e-4  # lower limit: after many updates of low KL, beta would need as many updates to grow again


class KLController:
    """Adjusts beta after each update, so that the KL approaches the current target.

    Fixed: `horizon` is None, and beta does not change. Adaptive: one target. Phased: several targets, one after
    another.
    """

    def __init__(self, beta: float, targets: Sequence[KLTarget], horizon: int | None, updates: int):
        """
        Args:
            beta: initial KL coefficient, score units per nat.
            targets: KL targets, one per phase.
            horizon: number of episodes over which the controller reacts; None: beta is fixed.
            updates: number of updates in the run.
        """
        self.beta = beta
        self.floor = min(LOWEST_BETA, beta)
        self.targets = tuple(targets)
        self.horizon = horizon
        self.updates = updates
        self.done = 0

    @property
    def phases(self) -> list[tuple[int, int, KLTarget]]:
        """First update, last update and target of each phase. The phases have equal lengths."""
        count = len(self.targets)
        ends = [round(number / count * self.updates) for number in range(count + 1)]
        return [(a + 1, b, target) for (a, b), target in zip(pairwise(ends), self.targets, strict=True)]

    @property
    def target(self) -> KLTarget:
        """The target of the next update."""
        return self.target_of(self.done + 1)

    def target_of(self, update: int) -> KLTarget:
        """The target of an update, counted from 1. Update 0 has the first target; later than the run, the last."""
        return next((target for _, last, target in self.phases if update <= last), self.targets[-1])

    def update(self, kl_per_sequence: float, kl_per_token: float, episodes: int) -> float:
        """Adjust beta to one update's KL (nats) over `episodes` completions. Returns the beta of the next update.

        Two limits keep beta from collapsing: one update at most halves it, and it does not fall below 1e-4 (or its
        initial value, if that is lower). Source: Ziegler et al. 2019, arXiv 1909.08593, sec. 2.2.
        """
        if self.horizon is not None:
            kl = kl_per_sequence if self.target.per == "sequence" else kl_per_token
            # detail 18: beta <- beta * (1 + clip(KL / target - 1, -0.2, 0.2) * episodes / horizon). Without the
            # limits, one unusual KL changes beta by a large factor (Ziegler et al. 2019, arXiv 1909.08593, sec. 2.2).
            error = min(max(kl / self.target.nats - 1, -LARGEST_ERROR), LARGEST_ERROR)
            self.beta = max(self.beta * max(1 + error * episodes / self.horizon, 0.5), self.floor)
        self.done += 1
        return self.beta

    def skip(self) -> None:
        """Count a skipped update. Beta does not change, because the update has no KL."""
        self.done += 1

    def raise_beta(self, factor: float) -> float:
        """Multiply beta by `factor`, independently of the horizon. Returns beta."""
        self.beta *= factor
        return self.beta

    @property
    def shortest_phase(self) -> int:
        """Number of updates in the shortest phase. Phases without updates do not count."""
        return min((last - first + 1 for first, last, _ in self.phases if last >= first), default=self.updates)

    def largest_move(self, episodes: int) -> float:
        """Return the factor by which beta can grow in the shortest phase, with `episodes` completions per update."""
        if self.horizon is None:
            return 1.0
        return move_in(self.shortest_phase, episodes, self.horizon)

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta, "done": self.done}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.beta = float(state["beta"])
        self.done = int(state["done"])


def kl_controller(config: Config, updates: int) -> KLController:
    """Return the controller for a run of `updates` updates under these settings."""
    kl = config.kl
    controller = KLController(kl.kl_coef, kl.targets, None, updates)
    if kl.steered:
        own = default_horizon(controller.shortest_phase, config.episodes_per_update)
        controller.horizon = kl.kl_horizon or own
    return controller


def move_in(updates: int, episodes: int, horizon: int) -> float:
    """Return the factor by which beta can grow in this number of updates, with `episodes` completions each."""
    # (1 + 0.2 * episodes / horizon) ** updates
    return math.exp(min(updates * math.log1p(LARGEST_ERROR * episodes / horizon), MOST_LOG))


def default_horizon(shortest_phase: int, episodes: int) -> int:
    """Return the default horizon, in episodes, for a phase of `shortest_phase` updates with `episodes` each.

    It lets beta change about 11-fold in the phase: (1 + 0.2 * 12 / updates) ** updates is about e ** 2.4. It is at
    least the episodes of two updates, so that one update changes beta by at most 10%. Otherwise it is at most 10,000
    (Ziegler et al. 2019).
    """
    return max(2 * episodes, min(LONGEST_HORIZON, round(shortest_phase * episodes / 12)))


def with_horizon(config: Config, updates: int) -> Config:
    """Return the settings with the default kl_horizon for `updates` updates, if it is unset and beta changes."""
    horizon = kl_controller(config, updates).horizon
    if horizon is None or config.kl.kl_horizon is not None:
        return config
    return replaced(config, kl_horizon=horizon)


def in_band(kl: float, target: float) -> bool:
    """True if a KL is within KL_BAND times its target (same unit)."""
    return KL_BAND[0] * target <= kl <= KL_BAND[1] * target

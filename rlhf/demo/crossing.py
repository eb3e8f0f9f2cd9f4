"""Crossing, a game of several turns, with its exact values. Uses only the standard library.

A player crosses up to 8 roads. Each turn shows the pot and the risk of the next road, such as `Pot 3, safe.`:

    risk    shown in        the pot is lost in
    safe    75% of turns     5% of crossings
    risky   25% of turns    60% of crossings

`go` adds 1 to the pot, or loses it, which ends the game. `stop` keeps the pot and ends the game, as the 8th `go` does.
Every other completion loses the pot and ends the game: it is never better than `stop`.

The score is the final pot. Its expected value is 0.58 for random play, 1.52 if the player always goes, 1.77 for the
best player who does not see the risk, and 2.47 for the best player.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Risk(NamedTuple):
    """A kind of road."""

    share: float  # of the turns
    loss: float  # probability that a crossing loses the pot


RISKS = {"safe": Risk(0.75, 0.05), "risky": Risk(0.25, 0.6)}
TURNS = 8  # the most of a game
LEGAL = GO, STOP = "go", "stop"
# The risks that a player has seen, those of all turns so far: the state of a game. The pot is their number minus 1,
# because every earlier turn was a successful `go`.
Seen = tuple[str, ...]
Play = Callable[[Seen], tuple[float, float]]  # the probabilities of `go` and `stop` in a state


class Crossing:
    """The game with a reward per turn: 1 for a successful `go`, minus the pot if it is lost."""

    def reset(self, seed: int) -> str:
        """Begin a game and return its first turn. Equal seeds have equal risks, and lose at the same turn."""
        rng = random.Random(seed)
        names = list(RISKS)
        self.risks = rng.choices(names, [risk.share for risk in RISKS.values()], k=TURNS)
        self.is_lost = [rng.random() < RISKS[name].loss for name in self.risks]
        self.pot = 0
        return f" {self._shown()}"

    def observe(self, completion: str) -> tuple[str | None, float]:
        """Return the next turn, or None at the end of the game, and the change of the pot."""
        turn = self.pot
        choice = completion.strip()
        if choice == STOP:
            return None, 0.0
        if choice != GO or self.is_lost[turn]:
            self.pot = 0
            return None, float(-turn)
        self.pot += 1
        return (self._shown() if self.pot < TURNS else None), 1.0

    def _shown(self) -> str:
        return turn_text(self.pot, self.risks[self.pot])


class CrossingSparse(Crossing):
    """The same game with one reward at its end: the final pot."""

    def observe(self, completion: str) -> str | None:
        """Return the next turn, or None at the end of the game."""
        observation, _ = super().observe(completion)
        return observation

    def get_reward(self) -> float:
        """Return the final pot."""
        return float(self.pot)


def turn_text(pot: int, risk: str) -> str:
    """Return what a turn shows."""
    return f"Pot {pot}, {risk}."


def prompts(count: int) -> list[str]:
    """Return different texts before the first turn. They mean nothing: equal prompts would be merged."""
    return [f"Game {number}." for number in range(1, count + 1)]


# --- exact values ----------------------------------------------------------------------------------------------------


def states() -> list[Seen]:
    """Return all 510 states, the shorter ones first."""
    return [seen for turn in range(1, TURNS + 1) for seen in itertools.product(RISKS, repeat=turn)]


def random_play(seen: Seen) -> tuple[float, float]:
    """Choose one of the two legal completions with equal probability."""
    return 0.5, 0.5


def expected_pots(play: Play | None = None) -> dict[Seen, float]:
    """Return the expected final pot in each state, by dynamic programming. A critic's exact value V(state) is this
    number in the sparse game, and this number minus the present pot in the dense one. None: the best play."""
    found: dict[Seen, float] = {}
    for seen in reversed(states()):
        turn = len(seen)
        pot = turn - 1
        after = turn if turn == TURNS else next_turn(found, seen)
        if_go = (1 - RISKS[seen[-1]].loss) * after
        go, stop = (if_go > pot, if_go <= pot) if play is None else play(seen)
        found[seen] = go * if_go + stop * pot
    return found


def next_turn(values: Mapping[Seen, float], seen: Seen = ()) -> float:
    """Return the mean of the values of the states that can follow; without `seen`, of the first turn: the expected
    score of a game."""
    return sum(risk.share * values[*seen, name] for name, risk in RISKS.items())


def reach(play: Play) -> dict[Seen, float]:
    """Return the probability that a game reaches each state."""
    found: dict[Seen, float] = {}
    for seen in states():
        *earlier, last = seen
        before = tuple(earlier)
        passed = found[before] * play(before)[0] * (1 - RISKS[before[-1]].loss) if before else 1.0
        found[seen] = passed * RISKS[last].share
    return found

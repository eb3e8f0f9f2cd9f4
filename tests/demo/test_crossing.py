"""Tests the game Crossing, its exact values, and its start model."""

from __future__ import annotations

import itertools
import random
from statistics import fmean

import pytest

from rlhf.demo.crossing import (
    RISKS,
    TURNS,
    Crossing,
    CrossingSparse,
    expected_pots,
    next_turn,
    random_play,
    reach,
    states,
)

ALWAYS = [1.0] * TURNS


def blind(go: list[float]):
    """The play with a probability of `go` per turn, which ignores the risk."""
    return lambda seen: (go[len(seen) - 1], 1 - go[len(seen) - 1])


def score(play=None) -> float:
    return next_turn(expected_pots(play))


def played(game: Crossing, seed: int, completions) -> tuple[list[str], list[float]]:
    """Plays to the end. Returns the texts of the turns, and the rewards."""
    shown = [game.reset(seed=seed)]
    rewards = []
    for completion in completions:
        answer = game.observe(completion)
        text, reward = answer if isinstance(answer, tuple) else (answer, 0.0)
        rewards.append(reward)
        if text is None:
            return shown, rewards
        shown.append(text)
    raise AssertionError("the game did not end")


# --- rules -----------------------------------------------------------------------------------------------------------


def lost(seed: int) -> int | None:
    """The turn from 0 at which a player who always goes loses the pot; None: never."""
    game = Crossing()
    _, rewards = played(game, seed, ["go"] * TURNS)
    return None if rewards[-1] > 0 else len(rewards) - 1


def test_go_adds_one_until_the_last_turn():
    seed = next(seed for seed in itertools.count() if lost(seed) is None)
    shown, rewards = played(Crossing(), seed, ["go"] * TURNS)
    assert rewards == [1.0] * TURNS
    assert [text.strip().split(",")[0] for text in shown] == [f"Pot {pot}" for pot in range(TURNS)]
    assert {text.split(", ")[1] for text in shown} <= {"safe.", "risky."}


def test_a_loss_takes_the_pot_and_ends_the_game():
    seed = next(seed for seed in itertools.count() if lost(seed) == 3)
    assert played(Crossing(), seed, ["go"] * TURNS)[1] == [1.0, 1.0, 1.0, -3.0]
    game = CrossingSparse()
    assert played(game, seed, ["go"] * TURNS)[1] == [0.0] * 4
    assert game.get_reward() == 0


@pytest.mark.parametrize("end", ["stop", "stop\n"])
def test_stop_keeps_the_pot(end):
    seed = next(seed for seed in itertools.count() if lost(seed) is None)
    assert played(Crossing(), seed, ["go", "go", end])[1] == [1.0, 1.0, 0.0]
    game = CrossingSparse()
    assert played(game, seed, ["go", "go", end])[1] == [0.0] * 3
    assert game.get_reward() == 2


@pytest.mark.parametrize("completion", ["", "Go!", "go stop", "stop go", "stopp"])
def test_an_illegal_completion_loses_the_pot(completion):
    seed = next(seed for seed in itertools.count() if lost(seed) is None)
    assert played(Crossing(), seed, ["go", "go", completion])[1] == [1.0, 1.0, -2.0]
    game = CrossingSparse()
    played(game, seed, ["go", "go", completion])
    assert game.get_reward() == 0


def test_dense_rewards_sum_to_the_final_pot():
    rng = random.Random(0)
    dense = Crossing()
    sparse = CrossingSparse()
    for seed in range(300):
        choices = rng.choices(["go", "stop", "?"], [0.8, 0.15, 0.05], k=TURNS)
        shown, rewards = played(dense, seed, choices)
        assert played(sparse, seed, choices)[0] == shown
        assert sum(rewards) == sparse.get_reward() >= 0


def test_games_have_the_stated_risks_and_losses():
    found = {name: [] for name in RISKS}
    for seed in range(3000):
        game = Crossing()
        game.reset(seed)
        for name, is_lost in zip(game.risks, game.is_lost, strict=True):
            found[name].append(is_lost)
    turns = 3000 * TURNS
    for name, risk in RISKS.items():
        share = len(found[name]) / turns
        assert share == pytest.approx(risk.share, abs=4 * (0.75 * 0.25 / turns) ** 0.5)
        error = (risk.loss * (1 - risk.loss) / len(found[name])) ** 0.5
        assert fmean(found[name]) == pytest.approx(risk.loss, abs=4 * error)


def test_equal_seeds_give_equal_games():
    games = [Crossing() for _ in range(3)]
    for game, seed in zip(games, (5, 5, 6), strict=True):
        game.reset(seed=seed)
    assert vars(games[0]) == vars(games[1]) != vars(games[2])


# --- exact values ----------------------------------------------------------------------------------------------------


def test_expected_scores_are_those_of_the_description():
    best_blind = max(score(blind(go)) for go in itertools.product((0.0, 1.0), repeat=TURNS))
    found = [score(random_play), score(blind(ALWAYS)), best_blind, score()]
    assert [round(value, 2) for value in found] == [0.58, 1.52, 1.77, 2.47]


def test_expected_scores_by_hand():
    """Always going keeps the pot of 8 with the probability 0.8125^8; one turn of going has the value 0.8125."""
    assert score(blind(ALWAYS)) == pytest.approx(8 * 0.8125**8)
    assert score(blind([1.0] + [0.0] * 7)) == pytest.approx(0.8125)
    assert score(lambda seen: (0.0, 0.0)) == 0
    values = expected_pots(blind(ALWAYS))
    assert values[("safe",) * TURNS] == pytest.approx(0.95 * 8)
    assert values[(*("safe",) * 7, "risky")] == pytest.approx(0.4 * 8)


def test_the_best_play_looks_at_the_risk():
    values = expected_pots()
    kept = {seen: len(seen) - 1 for seen in states()}
    stops = {(len(seen), seen[-1]) for seen in states() if values[seen] == kept[seen]}
    assert stops == {(turn, "risky") for turn in range(3, TURNS + 1)}


def test_values_and_reach_agree_with_sampled_games():
    """A play with all three kinds of completions, which depends on the risk and on the turn before."""

    def play(seen):
        go = 0.85 if seen[-1] == "safe" else 0.4
        return (go - 0.1, 0.9 - go) if seen[-2:-1] == ("risky",) else (go, 1 - go)

    rng = random.Random(1)
    scores = []
    reached = []
    state = ("safe", "risky", "safe")
    for seed in range(20_000):
        game = CrossingSparse()
        text = game.reset(seed)
        seen = ()
        while text is not None:
            seen += (game.risks[game.pot],)
            go, stop = play(seen)
            text = game.observe(rng.choices(["go", "stop", "?"], [go, stop, 1 - go - stop])[0])
        scores.append(game.get_reward())
        reached.append(seen[: len(state)] == state)
    assert fmean(scores) == pytest.approx(score(play), abs=0.05)  # about 4 standard errors
    assert fmean(reached) == pytest.approx(reach(play)[state], abs=0.01)

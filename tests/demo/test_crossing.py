"""Tests the game Crossing, its exact values, its start model, and that PPO learns to play it."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from benchmarks.credit_over_turns import choices
from rlhf.api import make_trainer
from rlhf.config import make_config
from rlhf.data.tokenizer import load_tokenizer
from rlhf.demo import crossing_start, parts, ready
from rlhf.demo.crossing import (
    RISKS,
    TURNS,
    Crossing,
    CrossingSparse,
    expected_pots,
    next_turn,
    prompts,
    random_play,
    reach,
    states,
    turn_text,
)
from rlhf.utils.console import Screen
from tests.scripts.test_scripts import copy_project, run

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


# --- training on the game --------------------------------------------------------------------------------------------


class AnyDense(Crossing):
    """The game for a model that knows no word: completions of an even length are `go`."""

    def observe(self, completion):
        return super().observe(legal(completion))


class AnySparse(CrossingSparse):
    def observe(self, completion):
        return super().observe(legal(completion))


def legal(completion: str) -> str:
    return completion if completion in ("go", "stop") else ("stop" if len(completion) % 2 else "go")


def trained_weights(start_model, algorithm: str, environment: type) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the mean score of each update, and the weights."""
    groups = {"K": 4, "batch_size": 4} if algorithm in ("grpo", "rloo") else {"batch_size": 16}
    config = make_config(
        algorithm=algorithm, actor_model=str(start_model), rm_model=None, prompt_length=60, max_new_tokens=4,
        max_episode_tokens=176, num_iterations=2, learning_rate=1e-3, kl_placement="loss", **groups,
    )  # fmt: skip
    scores = []

    class Scores:
        def on_update_end(self, update, metrics):
            scores.append(metrics["rewards/mean"])

    trainer = make_trainer(
        config, prompts(8), callbacks=[Scores()], evaluation_prompts=[], environment=environment, progress=False
    )
    trainer.train()
    return scores, {name: weight.detach().clone() for name, weight in trainer.host.model.named_parameters()}


@pytest.mark.parametrize(("algorithm", "equal"), [("grpo", True), ("rloo", True), ("ppo", False)])
def test_groups_learn_the_same_from_rewards_per_turn_and_at_the_end(start_model, algorithm, equal):
    dense_scores, dense = trained_weights(start_model, algorithm, AnyDense)
    sparse_scores, sparse = trained_weights(start_model, algorithm, AnySparse)
    assert dense_scores[0] == sparse_scores[0] > 0
    assert all(torch.equal(weight, sparse[name]) for name, weight in dense.items()) == equal


# --- start model -----------------------------------------------------------------------------------------------------


def test_a_transcript_is_the_chat_and_fits_into_the_recipe():
    tokenizer = load_tokenizer(str(ready.WEIGHTS))
    config = make_config("demo-game")
    for seen in [("safe",), ("safe", "risky"), ("risky",) * TURNS]:
        prompt = prompts(ready.GAMES)[-1]
        ids, labels, other_labels = crossing_start.transcript(tokenizer, prompt, seen)
        shown = [turn_text(pot, risk) for pot, risk in enumerate(seen)]
        said = [*["go"] * (len(seen) - 1), "stop"]
        messages = []
        for text, completion in zip([f"{prompt} {shown[0]}", *shown[1:]], said, strict=True):
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": completion}]
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
        assert tokenizer.decode([i for i in labels if i >= 0]) == "<|im_end|>".join([*said, ""])
        assert sum(a != b for a, b in zip(labels, other_labels, strict=True)) == len(seen)
        opening = len(crossing_start.texts_before(tokenizer, prompt, seen)[0])
        assert opening <= config.data.prompt_length
        assert len(ids) - opening <= config.episode_tokens


def test_parts_are_written_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(crossing_start, "STEPS", 3)
    monkeypatch.setattr(ready, "GAMES", 5)
    for _ in range(2):
        parts.prepare_parts("demo-game", Screen(), torch.device("cpu"))
        rows = Path(ready.GAME_FOLDER, ready.GAMES_FILE).read_text(encoding="utf-8").splitlines()
        assert len({json.loads(row)["prompt"] for row in rows}) == len(rows) == 5
        weights = (ready.GAME_FOLDER / "start_model" / "model.safetensors").read_bytes()
        assert weights != (ready.WEIGHTS / "model.safetensors").read_bytes()
        monkeypatch.setattr(parts, "waiting_lock", None)  # complete parts are only read


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return copy_project(tmp_path_factory.mktemp("game"))


@pytest.mark.demo
def test_the_start_model_plays_at_random(project, monkeypatch):
    """Made within a minute; its score is that of random play, by its probabilities and by sampling."""
    monkeypatch.chdir(project)
    started = time.monotonic()
    parts.prepare_parts("demo-game", Screen(), torch.device("cpu"))
    assert time.monotonic() - started <= 60
    config = make_config("demo-game", eval_prompts=2048, num_iterations=1, warmup_steps=0)
    games = prompts(3000)
    trainer = make_trainer(config, games[:512], evaluation_prompts=games[-2048:], progress=False)
    chances, _ = choices(trainer)
    assert all(0.45 <= chance <= 0.55 for pair in chances.values() for chance in pair)
    assert next_turn(expected_pots(lambda seen: chances[seen])) == pytest.approx(score(random_play), abs=0.03)
    trainer.evaluate()
    scores = trainer.evaluations[-1].scores.ravel().tolist()
    assert fmean(scores) == pytest.approx(score(random_play), abs=3 * stdev(scores) / math.sqrt(len(scores)))


@pytest.mark.demo
def test_ppo_learns_within_five_minutes_from_nothing(project):
    started = time.monotonic()
    words = ["train_ppo.py", "--recipe", "demo-game", "--output", "game", "--overwrite"]
    done = run(words, project, OMP_NUM_THREADS="2", OMP_WAIT_POLICY=None)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    figures = json.loads((project / "game" / "run.json").read_text(encoding="utf-8"))["figures"]
    print(f"{seconds:.0f} s", json.dumps(figures))
    assert figures["score_after"] >= 1.6 and figures["score_rise_interval"][0] >= 0.7
    assert seconds <= 5 * 60

"""Tests of environments in the plain form: what is played, scored, counted and refused."""

from __future__ import annotations

import asyncio
import json
import math
import time

import pytest
import torch

from rlhf.api import make_trainer
from rlhf.callbacks.base import Callback
from rlhf.config import make_config, parse_cli
from rlhf.data.chat_template import encode_reply
from rlhf.environments.environment import CUT
from rlhf.rollout.episodes import END, FAILED, LIMIT, MAX_TURNS
from rlhf.utils.errors import RunError, UserError

ROWS = [
    {"prompt": f"What is {word}?", "goal": len(word)} for word in ("a cat", "a river", "Paris", "help", "it", "no")
]


class Talk:
    """Answers twice, and pays for each turn."""

    turns = 3
    seen: list

    def __init__(self):
        self.seen = []

    def reset(self, **row):
        self.seen = [row]
        return " Begin."

    def observe(self, completion):
        self.seen.append(completion)
        turn = len(self.seen) - 1
        return (None if turn == self.turns else f"answer {turn}"), self.reward(completion)

    def reward(self, completion):
        return len(set(completion)) / 10


@pytest.fixture
def made(start_model):
    """Return a function that makes a trainer with an environment: 4 episodes per update, 3 updates."""

    def make(environment, algorithm="ppo", rows=ROWS, rewards=None, output=None, evaluated=ROWS[:2], **settings):
        groups = {"batch_size": 2, "K": 2} if algorithm in ("grpo", "rloo") else {"batch_size": 4}
        config = make_config(
            algorithm=algorithm,
            **{"actor_model": str(start_model), "rm_model": None, "max_new_tokens": 6, "max_episode_tokens": 90}
            | {"num_iterations": 3, "temperature": 1.0, "learning_rate": 1e-3, "eval_every": 3, "prompt_length": 60}
            | groups
            | settings,
        )
        return make_trainer(
            config, rows, rewards, environment=environment, evaluation_prompts=evaluated, output=output, progress=False
        )

    return make


def weights(trainer):
    return {name: weight.detach().clone() for name, weight in trainer.host.model.named_parameters()}


def assert_equal_weights(one, other):
    different = [name for name, weight in weights(one).items() if not torch.equal(weight, weights(other)[name])]
    assert not different


# --- what is played --------------------------------------------------------------------------------------------------


def test_an_episode_has_the_environments_texts_and_the_policys_tokens(made):
    trainer = made(Talk)
    first, *others = trainer.play(ROWS[:4])
    assert len(others) == 3
    tokenizer = trainer.collector.rules.tokenizer
    assert tokenizer.decode(first.prompt_ids).count("What is a cat? Begin.") == 1
    assert [turn.observation for turn in first.turns] == ["answer 1", "answer 2", None]
    assert first.environment.seen == [ROWS[0], *(turn.completion for turn in first.turns)]
    assert first.stop_reason == END
    for span, turn, following in zip(first.spans, first.turns, [*first.spans[1:], None], strict=True):
        end = len(first.ids) if following is None else following.start
        between = first.ids[span.stop : end]
        reply = [] if following is None else encode_reply(tokenizer, [{"role": "user", "content": turn.observation}])
        assert between == (reply[1:] if reply and first.ids[span.stop - 1] == reply[0] else reply)
    assert first.shown.startswith("[Begin.] ") and "[answer 2]" in first.shown


def test_rewards_are_paid_at_the_end_of_each_turn(made):
    trainer = made(Talk)
    episodes = trainer.play(ROWS[:4])
    rollout = trainer.collector.rollout(episodes)
    scores = trainer.collector.score(rollout)
    for row, episode in enumerate(episodes):
        paid = [Talk.reward(None, turn.completion) for turn in episode.turns]
        assert rollout.token_scores[row][[span.stop - 1 for span in episode.spans]].tolist() == pytest.approx(paid)
        assert float(scores.raw[row]) == pytest.approx(sum(paid))
        assert float(rollout.token_scores[row].sum()) == pytest.approx(sum(paid))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo", "reinforce_pp"])
def test_train_gives_the_weights_of_a_loop_by_hand(made, algorithm):
    trained = made(Talk, algorithm)
    trained.train()
    by_hand = made(None, algorithm, rewards=[lambda completions, **_: [0.0] * len(completions)])
    size = by_hand.config.group_size
    for update in (1, 2, 3):
        prompts = by_hand.sampler.prompts_of(update)
        rows = [p.example.columns["prompt"] + " Begin." for p in prompts]
        episodes = by_hand.generate(rows)
        for turn in (1, 2):
            for episode in episodes:
                episode.add(f"answer {turn}")
            by_hand.generate(episodes)
        assert [e.group for e in episodes] == [row // size + episodes[0].group for row in range(len(episodes))]
        by_hand.step(episodes, turn_scores=[[Talk.reward(None, t.completion) for t in e.turns] for e in episodes])
    assert_equal_weights(by_hand, trained)


def test_play_by_hand_gives_the_weights_of_train(made):
    trained = made(Talk)
    trained.train()
    by_hand = made(Talk)
    for update in (1, 2, 3):
        by_hand.step(by_hand.play(by_hand.sampler.prompts_of(update)))
    assert_equal_weights(by_hand, trained)


class OneTurn(Talk):
    turns = 1


def test_an_environment_of_one_turn_gives_the_weights_of_a_reward_function(made):
    class Silent(OneTurn):
        def reset(self, **row):
            super().reset(**row)

    with_environment = made(Silent, "grpo")
    with_environment.train()
    function = made(None, "grpo", rewards=[lambda completions, **_: [len(set(text)) / 10 for text in completions]],
                    max_episode_tokens=None)  # fmt: skip
    function.train()
    assert_equal_weights(with_environment, function)


def test_the_limits_of_turns_tokens_and_observations(made, capsys):
    class Endless(Talk):
        turns = 10_000

        def observe(self, completion):
            return "word " * 40

    trainer = made(Endless, max_turns=2, max_observation_tokens=8, max_episode_tokens=80)
    episodes = trainer.play(ROWS[:4])
    assert {e.stop_reason for e in episodes} == {MAX_TURNS}
    assert {len(e.spans) for e in episodes} == {2}
    assert {e.cut for e in episodes} == {2}  # the last one is cut and not appended
    assert all(e.turns[0].observation.endswith(CUT) and e.turns[1].observation is None for e in episodes)
    metrics = trainer.step(episodes)
    assert metrics["environment/turns"] == 2 and metrics["environment/max_turns"] == 1
    assert metrics["environment/cut_observations"] == 8
    capsys.readouterr()
    by_tokens = made(Endless, max_episode_tokens=30, evaluated=[]).play(ROWS[:4])
    printed = capsys.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if "max_episode_tokens" in line]
    assert len(lines) == 1 and "30" in lines[0] and "Endless" in lines[0]
    assert {e.stop_reason for e in by_tokens} == {LIMIT}
    assert {len(e.spans) for e in by_tokens} == {1}  # the first observation does not fit, so it is not appended
    assert all(e.spans[-1].stop == len(e.ids) for e in by_tokens)


def test_turns_with_different_room_are_sampled_together_as_alone(made):
    class Long(Talk):
        turns = 10

    played = made(Long, max_episode_tokens=54, evaluated=[]).play(ROWS[:4])
    rooms = {54 - e.spans[-1].start for e in played}
    assert len(rooms) > 1 and min(rooms) < 6  # of the last turns
    assert max(len(e.ids) for e in played) <= 54
    for row, expected in enumerate(played):
        alone = made(Long, max_episode_tokens=54, evaluated=[])
        alone.begin()
        alone._begin_update(1)
        alone.generated = row  # the numbers of this episode
        (found,) = alone.play([ROWS[row]])
        assert (found.ids, found.spans) == (expected.ids, expected.spans)


def test_instances_are_constructed_once_and_reset_often(made):
    constructed = []

    class Counted(Talk):
        def __init__(self):
            super().__init__()
            constructed.append(self)

    made(Counted).train()
    assert len(constructed) == 4


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_the_seed_is_that_of_the_group_and_fixed_in_evaluations(made):
    seeds = []

    class Seeded(OneTurn):
        def reset(self, seed, goal, **row):
            assert "seed" not in row
            seeds.append((goal, seed))

    trainer = made(Seeded, "grpo")
    trainer.evaluate()
    trainer.evaluator.latest = ()  # otherwise equal weights are not sampled again
    trainer.evaluate()
    assert seeds[:2] == seeds[2:] and seeds[0][1] != seeds[1][1]
    seeds.clear()
    trainer.play(ROWS[:2])
    assert seeds[0] == seeds[1] and seeds[2] == seeds[3] and seeds[0][1] != seeds[2][1]

    class Row(OneTurn):
        def reset(self, seed, **row):
            seeds.append(seed)

    seeds.clear()
    made(Row, evaluated=[]).play([{"prompt": "What?", "seed": 7}])
    assert seeds == [7]

    class Any(OneTurn):
        def reset(self, **row):
            seeds.append(row.get("seed"))

    seeds.clear()
    made(Any, evaluated=[]).play(ROWS[:1])
    assert seeds == [None]


# --- errors of an environment ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["reset", "observe", "get_reward"])
def test_an_exception_ends_one_episode_without_a_score(made, capsys, method):
    class Fails(Talk):
        def reset(self, **row):
            opening = super().reset(**row)
            self.check("reset")
            return opening

        def observe(self, completion):
            self.check("observe")
            return super().observe(completion)

        def get_reward(self):
            self.check("get_reward")
            return 1.0

        def check(self, now):
            if now == method and self.seen[0]["goal"] == ROWS[1]["goal"]:
                raise ZeroDivisionError("by hand")

    trainer = made(Fails, evaluated=[])
    episodes = trainer.play(ROWS[:4])
    assert [bool(e.failure) for e in episodes] == [False, True, False, False]
    assert episodes[1].stop_reason == FAILED and "ZeroDivisionError: by hand" in episodes[1].failure
    printed = capsys.readouterr()
    (warning,) = [line for line in (printed.out + printed.err).splitlines() if "ZeroDivisionError" in line]
    assert Fails.__name__ in warning and "test_environment.py" in warning
    rollout = trainer.collector.rollout(episodes)
    raw = trainer.collector.score(rollout).raw
    assert raw.isnan().tolist() == [False, True, False, False]
    metrics = trainer.step(episodes)
    assert metrics["environment/failed"] == 0.25
    assert all(weight.isfinite().all() for weight in weights(trainer).values())


@pytest.mark.parametrize("returned", [3, [1], ("text", "high"), ("text", math.nan), ("text", 1.0, 2)])
def test_a_result_that_cannot_be_used_ends_the_run_with_its_value(made, returned):
    class Wrong(Talk):
        def observe(self, completion):
            return returned

    with pytest.raises(RunError) as raised:
        made(Wrong).train()
    (problem,) = raised.value.problems
    value = returned[1] if isinstance(returned, tuple) and len(returned) == 2 else returned
    assert "Wrong" in str(problem) and str(value) in str(problem)


def test_async_methods_of_all_episodes_run_together_within_their_limit(made):
    running = []
    most = []

    class Async(Talk):
        async def observe(self, completion):
            running.append(self)
            most.append(len(running))
            await asyncio.sleep(60 if self.seen[0]["goal"] == ROWS[1]["goal"] else 0.05)
            running.remove(self)
            return Talk.observe(self, completion)

        async def reset(self, **row):
            await asyncio.sleep(0.01)
            return Talk.reset(self, **row)

        async def get_reward(self):
            await asyncio.sleep(0.01)
            return 2.0

    began = time.monotonic()
    episodes = made(Async, reward_timeout=1, evaluated=[]).play(ROWS[:4])
    assert time.monotonic() - began < 20
    assert max(most) == 4
    assert [bool(e.failure) for e in episodes] == [False, True, False, False]
    assert "1 s" in episodes[1].failure
    assert [e.outcome for e in episodes] == [2.0, None, 2.0, 2.0]


def test_a_method_that_hangs_is_interrupted(made):
    class Hangs(Talk):
        def observe(self, completion):
            if self.seen[0]["goal"] == ROWS[1]["goal"]:
                time.sleep(60)
            return super().observe(completion)

    episodes = made(Hangs, reward_timeout=0.5).play(ROWS[:4])
    assert [bool(e.failure) for e in episodes] == [False, True, False, False]


def test_the_own_timeout_error_of_a_method_is_not_the_limit(made):
    class Away(Talk):
        async def observe(self, completion):
            raise TimeoutError("the server is away")

    with pytest.raises(RunError) as raised:
        made(Away).train()
    assert "the server is away" in str(raised.value)


def test_random_numbers_of_an_environment_are_repeated_and_leave_those_of_the_run(made):
    import random

    drawn = []

    class Random(Talk):
        def observe(self, completion):
            drawn.append((random.random(), float(torch.rand(()))))
            return super().observe(completion)

    made(Random, evaluated=[]).play(ROWS[:4])
    first = list(drawn)
    drawn.clear()
    made(Random, evaluated=[]).play(ROWS[:4])
    assert drawn == first and len(set(first)) == len(first) == 12
    drawn.clear()
    made(Random, evaluated=[], seed=7).play(ROWS[:4])
    assert not {*drawn} & {*first}


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_reward_functions_can_name_the_environments(made):
    given = []

    def goals(environments, environment_rewards, completions, **_):
        given.extend(environments)
        assert environment_rewards[0]["turn_scores"]
        return [e.seen[0]["goal"] for e in environments]

    trainer = made(Talk, rewards=[goals], evaluated=[])
    episodes = trainer.play(ROWS[:4])
    scores = trainer.collector.score(trainer.collector.rollout(episodes))
    assert given == [e.environment for e in episodes]
    own = [sum(e.rewards) for e in episodes]
    assert scores.raw.tolist() == pytest.approx([row["goal"] + paid for row, paid in zip(ROWS, own, strict=False)])
    assert list(scores.by_function) == ["goals", "Talk"]


def test_get_reward_is_added_at_the_last_turn(made):
    class Paid(Talk):
        def get_reward(self):
            return 5.0

        def reward(self, completion):
            return 0.0

    trainer = made(Paid, normalize_scores=True)  # a score of the whole episode can be normalized
    episodes = trainer.play(ROWS[:4])
    assert [e.environment_reward for e in episodes] == [5.0] * 4
    assert trainer.step(episodes)["rewards/mean"] == 5.0


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_bit_identical(made, tmp_path):
    class Interrupts(Callback):
        def on_update_begin(self, update):
            if update == 3:
                raise KeyboardInterrupt

    whole = made(Talk, output=tmp_path / "whole", save_every=1)
    whole.train()
    first = made(Talk, output=tmp_path / "run", save_every=1)
    first.add_callback(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = made(Talk, output=tmp_path / "run", save_every=1, resume=True)
    second.train()
    assert_equal_weights(second, whole)


def test_samples_show_the_turns(made, tmp_path):
    made(Talk, output=tmp_path / "run").train()
    files = sorted((tmp_path / "run" / "samples").iterdir())
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 4
    assert all("[answer 1]" in row["completion"] and "[answer 2]" in row["completion"] for row in rows)


# --- bad input -------------------------------------------------------------------------------------------------------


class NoReset:
    def observe(self, completion):
        return None


class Nothing:
    def reset(self, **row):
        return None


class Tools(Nothing):
    def look(self, place: str) -> str:
        """Look.

        Args:
            place: where.
        """
        return place


class Broken(Talk):
    def __init__(self):
        raise ValueError("no server")


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        (NoReset, "reset"),
        (Nothing, "observe"),
        (Tools, "observe"),
        (Broken, "no server"),
        ({"one": Talk}, "observe"),
        ("no_such", "no_such"),
        (3, "3"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(made, environment, named):
    with pytest.raises(UserError) as raised:
        made(environment, rewards=[lambda completions, **_: [0.0] * len(completions)])
    (problem,) = raised.value.problems
    assert named in str(problem)


def test_a_module_as_reward_is_refused_in_one_line(made):
    with pytest.raises(UserError) as raised:
        made(Talk, rewards=[torch.nn.Linear(1, 1)])
    (problem,) = raised.value.problems
    assert "rewards" in problem.place


def test_an_instance_that_cannot_be_constructed_later_is_one_line(made):
    constructed = []

    class Twice(Talk):
        def __init__(self):
            super().__init__()
            constructed.append(self)
            if len(constructed) == 3:
                raise ValueError("no third server")

    with pytest.raises(UserError) as raised:
        made(Twice, evaluated=[]).play(ROWS[:4])
    (problem,) = raised.value.problems
    assert "no third server" in str(problem)


def test_settings_that_cannot_read_turns_are_refused():
    with pytest.raises(UserError) as raised:
        make_config("demo", environment="crossing")
    assert "rm_model" in raised.value.problems[0].settings
    with pytest.raises(UserError):
        make_config("demo", environment="crossing", rm_model=None, rollout_engine="vllm")
    with pytest.raises(UserError):
        parse_cli(["--recipe", "demo", "--max-turns", "3"])

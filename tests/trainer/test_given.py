"""Tests of what a loop by hand gives to a trainer, of its order of calls, and of how it ends."""

from __future__ import annotations

import gc
import json
import math
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.algorithms.table import ALGORITHMS
from rlhf.api import make_trainer
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config
from rlhf.rollout.episodes import LIMIT, Episode
from rlhf.utils.errors import RunError
from rlhf.utils.signals import TrainingInterrupted
from rlhf.utils.system import stop_signals

PROMPTS = [f"What is {word}?" for word in ("a cat", "a table", "the river", "Paris", "a number", "help")]
SCORES = [1.0, 0.0, 2.0, 0.5]


def letters(completions, **_):
    return [len(set(text)) / 10 for text in completions]


@pytest.fixture
def made(start_model, tmp_path, monkeypatch):
    """Return a function that makes a trainer of 4 episodes per update and 3 updates, without evaluations."""
    monkeypatch.chdir(tmp_path)
    before = {which: signal.getsignal(which) for which in stop_signals()}
    for which in before:
        signal.signal(which, signal.default_int_handler)

    def make(algorithm="ppo", output=None, callbacks=(), rewards=letters, evaluation=(), **settings):
        groups = {"batch_size": 2, "K": 2} if ALGORITHMS[algorithm].group_size > 1 else {"batch_size": 4}
        tiny = {"actor_model": str(start_model), "rm_model": None, "max_new_tokens": 8, "num_iterations": 3}
        tiny |= {"temperature": 1.0, "learning_rate": 1e-3, "save_every": 1, "max_episode_tokens": 40}
        return make_trainer(
            make_config(algorithm=algorithm, **tiny | groups | settings), PROMPTS, [rewards],
            callbacks=callbacks, evaluation_prompts=evaluation, output=output, progress=False,
        )  # fmt: skip

    yield make
    for which, handler in before.items():  # a run that a test leaves open has its own
        signal.signal(which, handler)


def sampled(trainer, **how):
    return trainer.generate(PROMPTS[: 4 // trainer.config.group_size], **how)


def update(trainer):
    trainer.step(sampled(trainer))
    trainer.after_step()


def weights(trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.host.model.parameters()]


def equal_weights(one, other) -> bool:
    return all(map(torch.equal, weights(one), weights(other)))


def without_a_break(made):
    """Return a trainer after three updates."""
    trainer = made()
    for _ in range(3):
        update(trainer)
    return trainer


def status(folder: str) -> str:
    return RunRecord.read(Path(folder)).status


# --- prompts, ids and scores -----------------------------------------------------------------------------------------


def test_prompts_and_episodes_may_be_arrays_and_tensors(made):
    trainer = made()
    expected = trainer.generate([[5, 6], [7, 8]], greedy=True)
    for prompts in (torch.tensor([[5, 6], [7, 8]]), [np.array([5, 6]), (7, np.int64(8))]):
        found = trainer.generate(prompts, greedy=True)
        assert [e.prompt_ids for e in found] == [[5, 6], [7, 8]] and [e.ids for e in found] == [
            e.ids for e in expected
        ]
    episode = Episode.of(torch.tensor([5, 6]), np.array([7, 8]), np.array([True, False]), torch.tensor([-1.0, -2.0]))
    assert (episode.prompt_ids, episode.ids, episode.logprobs) == ([5, 6], [7, 8], [-1.0, 0.0])
    (one, *_) = sampled(trainer, max_new_tokens=2)
    one.add(torch.tensor([9, 10]))
    assert one.ids[-2:] == [9, 10] and all(type(token) is int for token in one.ids)


def test_what_is_no_list_of_prompts_episodes_ids_or_numbers_is_one_line(made, user_error):
    trainer = made()
    episodes = sampled(trainer, max_new_tokens=2)
    ids = [list(episode.ids) for episode in episodes]
    one = episodes[0]
    cases = {
        ("not a list", "str", "generate()"): lambda: trainer.generate("What is a cat?"),
        ("not a list", "dict"): lambda: trainer.generate({"prompt": "What is a cat?"}),
        ("not a list", "Episode"): lambda: trainer.generate(one),
        ("not a list", "NoneType"): lambda: trainer.generate(None),
        ("not a list", "step()"): lambda: trainer.step(one),
        ("the same episode twice", "generate()"): lambda: trainer.generate([one, one]),
        ("no episode", "'What'"): lambda: trainer.generate([one, "What"]),
        ("999999", "generate(), prompt 1"): lambda: trainer.generate([[5], [999999]]),
        ("-3", "generate()"): lambda: trainer.generate([[5, -3]]),
        ("prompt 1",): lambda: trainer.generate([[5, 1.5]]),
        ("999999", "generate()"): lambda: trainer.generate([Episode.of([5], [999999])]),
        ("'a'", "Episode.of()"): lambda: Episode.of("ab", [1]),
        ("None", "add()"): lambda: one.add(None),
        ("'hi'", "add()"): lambda: one.add(["hi"]),
        ("999999", "add()"): lambda: one.add([999999]),
        ("role", "content"): lambda: one.add({"content": "hi"}),
        ("'content': None",): lambda: one.add({"role": "user", "content": None}),
        ("max_new_tokens", "2.5"): lambda: trainer.generate(PROMPTS[:1], max_new_tokens=2.5),
        ("stop", "generate()"): lambda: trainer.generate(PROMPTS[:1], stop=[""]),
        ("no trainer", "Episode.of()"): lambda: Episode.of([5], [6]).text,
        ("scores", "'a'"): lambda: trainer.step(episodes, ["a"] * 4),
        ("scores", "step()"): lambda: trainer.step(episodes, 1.0),
        ("step(), scores",): lambda: trainer.step(episodes, turn_scores=[1.0] * 4),
    }
    for parts, call in cases.items():
        with user_error(*parts):
            call()
    assert [episode.ids for episode in episodes] == ids and trainer.update == 0
    assert trainer.step(episodes, np.ones(4))["rewards/mean"] == 1


def test_a_prompt_leaves_room_in_the_context(made, user_error):
    trainer = made(prompt_length=2000)
    context = trainer.actor.policy.config.max_position_embeddings
    with user_error("generate(), prompt 0", context - 1):
        trainer.generate([[5] * context])
    (episode, *_) = trainer.generate([[5] * (context - 1)])
    assert len(episode.ids) == 1 and episode.stop_reason == LIMIT


def test_given_episodes_that_fill_the_limit_are_done(made):
    trainer = made()
    full = [Episode.of([5], [6] * 40) for _ in range(4)]
    assert trainer.generate(full) is not None and all(len(e.ids) == 40 and e.stop_reason == LIMIT for e in full)
    assert trainer.step(full, SCORES, assume_on_policy=True)["episodes/assumed_on_policy"] == 4


# --- turns and groups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["greedy first", "greedy last"])
def test_a_turn_may_be_greedy(made, first):
    trainer = made()
    episodes = sampled(trainer, max_new_tokens=2, greedy=first)
    for episode in episodes:
        episode.add([9, 10])
    trainer.generate(episodes, max_new_tokens=2, greedy=not first)
    assert trainer.collector.rollout(episodes).completions.allowed_tokens is None
    assert math.isfinite(trainer.step(episodes, SCORES)["policy/loss"])


def test_all_tokens_were_allowed_where_no_mask_is_known(made):
    trainer = made(top_p=0.5)
    given = [Episode.of([5, 6], [7, 8, 9], [True, False, True]) for _ in range(4)]
    trainer.generate(given, max_new_tokens=2)
    masks = trainer.collector.rollout(given).completions.allowed_tokens
    for row, episode in enumerate(given):
        assert (masks[row, [0, 2]] == 255).all() and not masks[row, 1].any()
        own = range(episode.spans[-1].start, len(episode.ids))
        assert all(int((masks[row, place] != 255).sum()) > 0 for place in own if place > 2)
    assert math.isfinite(trainer.step(given, SCORES, assume_on_policy=True)["policy/loss"])


def test_groups_of_several_updates_can_be_mixed(made):
    trainer = made("grpo")
    first = trainer.generate(PROMPTS[:4], logprobs=True)  # twice as many as the update takes
    trainer.step(first[:4], SCORES)
    second = sampled(trainer)
    assert not {episode.group for episode in first} & {episode.group for episode in second}
    assert trainer.step([*second[:2], *first[4:6]], SCORES)["episodes/stale"] == 2
    third = sampled(trainer)
    edited = Episode.of(third[0].prompt_ids, [9, 10], logprobs=[-1.0, -1.0], group=third[0].group)
    assert trainer.step([edited, *third[1:]], SCORES)["episodes/stale"] == 1


# --- the order of calls ----------------------------------------------------------------------------------------------


def test_a_budget_of_episodes_gives_all_of_its_updates(made):
    trainer = made(num_iterations=None, episodes=8)
    while trainer.update < trainer.updates:
        update(trainer)
    assert trainer.update == 2 and trainer.episodes == 8
    trainer.finish()


def test_after_step_may_come_first_and_twice_but_not_after_the_end(made):
    trainer = made(evaluation=PROMPTS[4:], eval_every=1, output="run")
    trainer.after_step()
    assert [e.update for e in trainer.evaluations] == [0] and not Path("run/checkpoint-0").exists()
    update(trainer)
    trainer.after_step()
    assert [e.update for e in trainer.evaluations] == [0, 1] and Path("run/checkpoint-1").is_dir()
    trainer.finish()
    with pytest.raises(RunError):
        trainer.after_step()


def test_an_evaluation_before_the_first_update_is_part_of_the_run(made):
    trainer = made(evaluation=PROMPTS[4:], eval_every=1, output="run")
    trainer.evaluate()
    for _ in range(3):
        update(trainer)
    trainer.finish()
    assert [e["update"] for e in RunRecord.read(Path("run")).best.evaluations] == [0, 1, 2, 3]


def test_a_run_may_end_before_its_first_update(made):
    made(evaluation=PROMPTS[4:], output="run").finish()
    run = RunRecord.read(Path("run"))
    assert (run.status, run.spent.updates, run.best.update) == ("finished", 0, 0)


def test_a_step_that_failed_can_be_repeated(made):
    broken = [True]

    def fails_once(completions, **_):
        if broken:
            broken.clear()
            raise ValueError("the service is away")
        return letters(completions)

    trainer = made(rewards=fails_once)
    episodes = sampled(trainer)
    with pytest.raises(RunError):
        trainer.step(episodes)
    trainer.step(episodes)
    straight = made()
    straight.step(sampled(straight))
    assert equal_weights(trainer, straight)


def test_tokens_of_a_loop_by_hand_are_recorded(made):
    trainer = made("grpo", output="run", record_tokens=True)
    trainer.step(trainer.generate(["Who?", PROMPTS[0]]))
    rows = [json.loads(line) for file in Path("run/tokens").iterdir() for line in file.read_text().splitlines()]
    assert {row["prompt_index"] for row in rows} == {0, len(PROMPTS)}


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_stop_signal_ends_the_run_after_its_checkpoint(made):
    trainer = made(output="run", save_every=100)
    update(trainer)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    signal.raise_signal(signal.SIGINT)
    trainer.step(sampled(trainer))
    with pytest.raises(TrainingInterrupted):
        trainer.after_step()
    assert status("run") == "stopped" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(RunError):
        sampled(trainer)
    again = made(output="run", save_every=100, resume=True)
    update(again)
    assert again.update == 3
    again.finish()
    assert equal_weights(again, without_a_break(made))


def test_a_trainer_that_nobody_has_any_more_leaves_the_program_alone(made):
    first = made(output="run")
    update(first)
    sampled(first)  # as if the program had ended between generate and step
    second = made(output="other")
    second.begin()
    handler = signal.getsignal(signal.SIGINT)
    out = sys.stdout
    del first
    gc.collect()
    assert signal.getsignal(signal.SIGINT) == handler and sys.stdout is out
    again = made(output="run", resume=True)
    again.begin()
    assert again.update == 1
    update(again)
    update(again)
    again.finish()
    assert equal_weights(again, without_a_break(made))


def test_two_runs_by_hand_may_end_in_the_order_in_which_they_began(made):
    runs = [made(output="one"), made("grpo", output="two")]
    for trainer in runs:
        update(trainer)
    for trainer in runs:
        trainer.finish()
    assert status("one") == status("two") == "finished"
    with pytest.raises(KeyboardInterrupt):  # not the handler of a run that has ended
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

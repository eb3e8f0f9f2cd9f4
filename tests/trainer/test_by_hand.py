"""Tests of the loop by hand: `generate`, `step`, `after_step`, `finish`, and episodes of several turns."""

from __future__ import annotations

import json
import math

import pytest
import torch

from rlhf.algorithms.table import ALGORITHMS
from rlhf.api import make_trainer
from rlhf.config import make_config
from rlhf.rollout.episodes import END, LIMIT, Episode
from rlhf.utils.errors import RunError
from tests.conftest import LEARN_FROM_ALL

PROMPTS = [f"What is {word}?" for word in ("a cat", "a table", "the river", "Paris", "a number", "help")]


def lengths(completions, **_):
    return [len(set(text)) / 10 for text in completions]


@pytest.fixture
def made(start_model, tmp_path):
    """Return a function that makes a trainer of 4 episodes per update and 3 updates."""

    def make(algorithm="ppo", output=None, prompts=PROMPTS, callbacks=(), **settings):
        groups = {"batch_size": 2, "K": 2} if ALGORITHMS[algorithm].group_size > 1 else {"batch_size": 4}
        config = make_config(
            algorithm=algorithm,
            **{"actor_model": str(start_model), "rm_model": None, "reward_func": ["exact_match"]}
            | {"max_new_tokens": 8, "num_iterations": 3, "temperature": 1.0, "learning_rate": 1e-3, "eval_every": 3}
            | groups
            | settings,
        )
        return make_trainer(
            config, prompts, rewards=[lengths], evaluation_prompts=PROMPTS[:2], output=output, progress=False,
            callbacks=callbacks,
        )  # fmt: skip

    return make


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.host.model.named_parameters()}


def assert_equal_weights(one, other):
    different = [name for name, weight in weights(one).items() if not torch.equal(weight, weights(other)[name])]
    assert not different


def loop(trainer, updates=3):
    for update in range(trainer.update + 1, updates + 1):
        episodes = trainer.generate(trainer.sampler.prompts_of(update))
        trainer.step(episodes, lengths([episode.text for episode in episodes]))
        trainer.after_step()
    return trainer


@pytest.mark.parametrize("algorithm", LEARN_FROM_ALL)
def test_a_loop_by_hand_gives_the_weights_of_train(made, algorithm):
    trained = made(algorithm)
    final = trained.train()
    by_hand = loop(made(algorithm))
    assert by_hand.finish()["eval/score"] == final["eval/score"]
    assert_equal_weights(by_hand, trained)
    assert [e.update for e in by_hand.evaluations] == [e.update for e in trained.evaluations] == [0, 3]
    assert by_hand.episodes == trained.episodes == 12


def test_reward_functions_score_a_step_without_scores(made):
    one = made()
    other = made()
    for trainer, scored in ((one, True), (other, False)):
        episodes = trainer.generate(PROMPTS[:4])
        trainer.step(episodes, lengths([e.text for e in episodes]) if scored else None)
    assert_equal_weights(one, other)


# --- turns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"top_p": 0.8}, {"rollout_engine": "plain"}], ids=str)
def test_two_calls_for_some_tokens_give_what_one_call_gives(made, flags):
    trainer = made(num_iterations=2, max_episode_tokens=16, **flags)
    whole = trainer.generate(PROMPTS[:4], max_new_tokens=16)
    again = made(num_iterations=2, max_episode_tokens=16, **flags)
    parts = again.generate(PROMPTS[:4], max_new_tokens=8)
    for episode in parts:
        if episode.ended:
            episode.end()
    assert again.generate(parts, max_new_tokens=8) == parts  # the same objects
    assert [e.ids for e in parts] == [e.ids for e in whole]
    assert [e.spans for e in parts] == [e.spans for e in whole]
    assert all(e.stop_reason == LIMIT for e in parts if len(e.ids) == 16)
    one, other = (t.step(e, [1.0, 0.0, 2.0, 0.0]) for t, e in ((trainer, whole), (again, parts)))
    assert one["policy/loss"] == pytest.approx(other["policy/loss"])


def test_an_observation_is_rendered_as_the_chat_template_does(made):
    trainer = made(max_episode_tokens=60)
    tokenizer = trainer.processing_class
    (episode, *_) = trainer.generate(PROMPTS[:1])
    before = list(episode.ids)
    ended = before[-1] == tokenizer.eos_token_id
    episode.add("No <|im_end|>, more.")
    text = tokenizer.decode(episode.ids[len(before) :])
    assert text.startswith("\n<|im_start|>user\n" if ended else "<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert episode.ids[: len(before)] == before
    own_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert episode.ids[len(before) :].count(own_end) == (1 if ended else 2)  # the text's is no special token
    assert episode.action_mask == [True] * len(before) + [False] * (len(episode.ids) - len(before))
    trainer.generate([episode], max_new_tokens=4)
    (first, second) = episode.turns
    assert first.observation == "No <|im_end|>, more." and second.observation is None
    assert [m["role"] for m in episode.messages] == ["assistant", "user", "assistant"]
    assert episode.messages[1]["content"] == "No <|im_end|>, more."
    episode.add([7, 8])
    assert episode.ids[-2:] == [7, 8] and not episode.done
    episode.end()
    assert episode.stop_reason == END


def test_generate_continues_only_what_is_not_done(made):
    trainer = made(max_episode_tokens=30)
    assert trainer.generate([]) == []
    episodes = trainer.generate(PROMPTS[:2], max_new_tokens=2)
    episodes[0].end()
    before = [list(e.ids) for e in episodes]
    trainer.generate(episodes, max_new_tokens=3)
    assert episodes[0].ids == before[0] and len(episodes[1].ids) > len(before[1])
    assert episodes[1].ids[: len(before[1])] == before[1]


def test_greedy_takes_the_most_likely_token(made):
    trainer = made()
    one = trainer.generate(PROMPTS[:2], greedy=True)
    other = trainer.generate(PROMPTS[:2], greedy=True)
    assert [e.ids for e in one] == [e.ids for e in other] and one[0].number != other[0].number


def test_given_log_probs_are_those_of_the_policy(made):
    trainer = made(max_episode_tokens=40)
    episodes = trainer.generate(PROMPTS[:4], logprobs=True, max_new_tokens=4)
    for episode in episodes:
        episode.add([9, 9])
    trainer.generate(episodes, logprobs=True, max_new_tokens=4)
    for episode in episodes:
        ids = torch.tensor([[*episode.prompt_ids, *episode.ids]])
        with torch.no_grad():
            every = torch.log_softmax(trainer.actor.policy(ids).logits.float(), -1)[0, :-1].gather(1, ids[0, 1:, None])
        expected = every.squeeze(1)[len(episode.prompt_ids) - 1 :]
        known = torch.tensor(episode.action_mask)
        assert torch.allclose(torch.tensor(episode.logprobs)[known], expected[known], atol=1e-5)
        assert not torch.tensor(episode.logprobs)[~known].any()


# --- given episodes --------------------------------------------------------------------------------------------------


def copies(episodes):
    return [Episode.of(e.prompt_ids, e.ids, e.action_mask, e.logprobs, e.group) for e in episodes]


@pytest.mark.parametrize("algorithm", LEARN_FROM_ALL)
def test_given_episodes_of_the_same_policy_train_as_sampled_ones(made, algorithm):
    """They are the same tokens with the same log-probs; only their KL is unknown, which nothing charges here."""
    found = []
    for foreign in (False, True):
        trainer = made(algorithm, kl_placement="none")
        episodes = trainer.generate(PROMPTS[: 4 // trainer.config.group_size], logprobs=True)
        metrics = trainer.step(copies(episodes) if foreign else episodes, [1.0, 0.0, 0.5, 2.0])
        found.append(weights(trainer))
        assert ("kl_divergence" in metrics) != foreign and metrics.get("episodes/stale", 0) == 4 * foreign
    for name, weight in found[0].items():
        assert torch.allclose(weight, found[1][name], atol=1e-6), name


def test_stale_episodes_never_move_beta(made):
    trainer = made(kl_target="0.001/sequence", kl_horizon=10)
    old = trainer.generate(PROMPTS[:4], logprobs=True)
    trainer.step(trainer.generate(PROMPTS[:4]))
    beta = trainer.kl_coef
    metrics = trainer.step(old, [1.0, 2.0, 0.0, 0.0])
    assert trainer.kl_coef == beta and "kl_divergence" not in metrics and metrics["episodes/stale"] == 4
    trainer.step(trainer.generate(PROMPTS[:4]))
    assert trainer.kl_coef != beta


def test_assumed_episodes_are_counted(made):
    trainer = made(ppo_epochs=1, minibatches=1)
    given = [Episode.of([5, 6, 7], [8, 9, number + 3]) for number in range(4)]
    metrics = trainer.step(given, [0.0, 1.0, 0.0, 1.0], assume_on_policy=True)
    assert metrics["episodes/assumed_on_policy"] == 4 and metrics["policy/ratio"] == pytest.approx(1)
    assert trainer.episodes == 4


def test_turn_and_token_scores_are_paid_where_they_belong(made):
    batches = []

    class Reads:
        def on_batch(self, update, batch, scores):
            batches.append(batch)

    trainer = made(callbacks=[Reads()], kl_placement="none", missing_eos_penalty=0)
    given = [Episode.of([5, 6], [8, 9, 10, 11, 12], [True, True, False, False, True]) for _ in range(4)]
    trainer.step(given, turn_scores=[[1.0, 2.0]] * 4, assume_on_policy=True)
    assert batches[0].rewards.tolist() == [[0, 1, 0, 0, 2]] * 4 and batches[0].scores.tolist() == [3] * 4
    again = [Episode.of([5, 6], [8, 9, 10, 11, 12], [True, True, False, False, True]) for _ in range(4)]
    trainer.step(again, [5.0] * 4, token_scores=[[0.5, 0, 0, 0, 0]] * 4, assume_on_policy=True)
    assert batches[1].rewards.tolist() == [[0.5, 0, 0, 0, 5]] * 4 and batches[1].scores.tolist() == [5.5] * 4


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.ci)])
def test_groups_use_the_sum_of_turn_scores(made, algorithm):
    found = []
    for dense in (False, True):
        trainer = made(algorithm)
        given = [Episode.of([5, 6], [8, 9, 10, 11, 12 + n], [1, 1, 0, 0, 1], group=n // 2) for n in range(4)]
        turns = [[1.0, float(n)] for n in range(4)]
        parts = {"turn_scores": turns} if dense else {"scores": [sum(each) for each in turns]}
        trainer.step(given, **parts, assume_on_policy=True)
        found.append(trainer)
    assert_equal_weights(*found)


def test_groups_may_come_in_any_order(made):
    found = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        trainer = made("grpo")
        episodes = trainer.generate(PROMPTS[:2])
        scores = [1.0, 0.0, 3.0, 0.5]
        trainer.step([episodes[row] for row in order], [scores[row] for row in order])
        found.append(weights(trainer))
    for name, weight in found[0].items():
        assert torch.allclose(weight, found[1][name], atol=1e-6), name


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_loop_by_hand_resumes_bit_identically(made, tmp_path):
    straight = loop(made(output=tmp_path / "straight", save_every=1))
    straight.finish()
    first = loop(made(output=tmp_path / "two", save_every=1), updates=2)
    first.by_hand.__exit__(SystemExit, SystemExit(), None)  # the program ends
    second = made(output=tmp_path / "two", save_every=1, resume=True)
    second.begin()
    assert second.update == 2
    loop(second).finish()
    assert_equal_weights(straight, second)
    run = json.loads((tmp_path / "two" / "run.json").read_text(encoding="utf-8"))
    assert run["status"] == "finished" and run["spent"]["updates"] == 3


def test_a_state_without_a_run_folder(made, tmp_path):
    straight = loop(made())
    first = loop(made(), updates=2)
    first.save_state(tmp_path / "state")
    second = made()
    second.load_state(tmp_path / "state")
    assert second.update == 2
    loop(second)
    assert_equal_weights(straight, second)


def test_finish_before_the_planned_end(made, tmp_path):
    trainer = made(output=tmp_path / "run", num_iterations=50)
    loop(trainer, updates=1)
    trainer.finish()
    run = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert run["status"] == "finished" and run["spent"]["updates"] == 1
    with pytest.raises(RunError):
        trainer.generate(PROMPTS[:1])


# --- bad input -------------------------------------------------------------------------------------------------------


def given(**changes):
    return [
        Episode.of(**{"prompt_ids": [5, 6, 7], "ids": [8, 9], "logprobs": [-1.0, -1.0]} | changes) for _ in range(4)
    ]


def test_what_does_not_fit_is_one_line_and_changes_nothing(made, user_error):
    trainer = made()
    before = weights(trainer)
    episodes = trainer.generate(PROMPTS[:4])
    other = made()
    other.begin()
    foreign = other.generate(PROMPTS[:1])
    cases = [
        (("3 scores", "4"), lambda: trainer.step(episodes, [1.0] * 3)),
        (("episode 2", "nan"), lambda: trainer.step(episodes, [1.0, 1.0, math.nan, 1.0])),
        (("another trainer",), lambda: trainer.step([*episodes[:3], *foreign], [1.0] * 4)),
        (("3 episodes", "4"), lambda: trainer.step(episodes[:3], [1.0] * 3)),
        (("twice",), lambda: trainer.step([*episodes[:3], episodes[0]], [1.0] * 4)),
        (("no log-probs", "episode 0"), lambda: trainer.step(given(logprobs=None), [1.0] * 4)),
        (("no token of the policy",), lambda: trainer.step(given(action_mask=[0, 0]), [1.0] * 4)),
        (("token_scores", "action_mask"), lambda: trainer.step(given(action_mask=[1, 0]), token_scores=[[0, 1]] * 4)),
        (("turn_scores", "2 scores for 1"), lambda: trainer.step(given(), turn_scores=[[0, 1]] * 4)),
        (("9 tokens", "8"), lambda: trainer.step(given(ids=[9] * 9, logprobs=None), [1.0] * 4, assume_on_policy=True)),
        (("no episode",), lambda: trainer.step([1, 2, 3, 4], [1.0] * 4)),
        (("Episode.of()", "2 ids"), lambda: Episode.of([1], [2, 3], logprobs=[0.1])),
        (("max_new_tokens",), lambda: trainer.generate(PROMPTS[:1], max_new_tokens=0)),
        (("does not fit", "add()"), lambda: trainer.generate(PROMPTS[:1], max_new_tokens=2)[0].add([5] * 40)),
    ]
    for parts, call in cases:
        with user_error(*parts):
            call()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trainer).items()) and trainer.update == 0
    trainer.step(episodes, [1.0, 2.0, 3.0, 4.0])
    with user_error("episode 0"):
        trainer.step(episodes, [1.0] * 4)


def test_steps_and_calls_beyond_the_end_are_refused(made, user_error):
    trainer = loop(made(num_iterations=1), updates=1)
    with user_error("step()", "num_iterations"):
        trainer.step(given(), [1.0] * 4)
    trainer.finish()
    for call in (lambda: trainer.generate(PROMPTS[:1]), trainer.finish, trainer.train):
        with pytest.raises(RunError):
            call()


def test_a_done_episode_takes_no_observation(made, user_error):
    trainer = made(max_episode_tokens=12)
    (episode, *_) = trainer.generate(PROMPTS[:1], max_new_tokens=2)
    episode.end()
    with user_error("done", "add()"):
        episode.add([5])
    with user_error("no trainer"):
        Episode.of([1], [2]).add("text")


@pytest.mark.parametrize("settings", [{"dynamic_sampling": 2}], ids=str)
def test_settings_that_only_train_can_follow(made, settings, user_error):
    with user_error("begin()"):
        made("grpo", **settings).begin()

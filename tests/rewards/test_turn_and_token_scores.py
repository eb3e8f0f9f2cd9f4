"""Tests of reward functions that return turn_scores or token_scores: sums, where they are paid, errors, and runs."""

from __future__ import annotations

from decimal import Decimal

import numpy
import pytest
import torch

from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.rewards.call import BadScore
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.episodes import Episode
from rlhf.utils.errors import RunError
from tests.conftest import BY_TIER

ROWS = [Prompt((1,), Example(({"role": "user", "content": "2 + 2?"},)))] * 2
COMPLETIONS = (["4 ok 5", "6"], [[5, 6, 7, 8, 9], [5, 2, 3]], [True, False])  # texts, ids, ended
# the environment has written tokens 2 and 3 of the first completion
EPISODES = [Episode.of([1], COMPLETIONS[1][0], [1, 1, 0, 0, 1]), Episode.of([1], COMPLETIONS[1][1])]


def returns(*scores):
    """Return a reward function with these scores."""

    def given(completions, **_):
        return list(scores)

    return given


def scores_of(*functions, weights=None):
    return Rewards(functions, weights, None).score(ROWS, *COMPLETIONS, episodes=EPISODES)


def weights(trainer) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.host.model.parameters()])


# --- sums and places -------------------------------------------------------------------------------------------------


def test_turn_scores_are_paid_at_the_last_token_of_each_turn():
    found = scores_of(returns({"turn_scores": [1, 2.5]}, {"turn_scores": [4]}))
    assert found.total == [3.5, 4] and found.by_function == {"given": [3.5, 4]}
    assert found.by_token == [[0, 1, 0, 0, 2.5], [0, 0, 4]]


def test_forms_may_be_mixed_and_the_weighted_sum_adds_them_up():
    """A plain score is paid at the last token of the policy. None pays nothing."""
    dense = returns({"token_scores": [1, 0, 0, 0, 2]}, None)
    mixed = returns({"turn_scores": [1, 1]}, 7.0)
    found = scores_of(dense, mixed, returns(0.5, None), weights=[2.0, 10.0, 1.0])
    assert found.total == [2 * 3 + 10 * 2 + 0.5, 70.0]
    assert found.by_token == [[2, 10, 0, 0, 14.5], [0, 0, 70]]
    assert found.by_function == {"given_1": [3, None], "given_2": [2, 7], "given_3": [0.5, None]}


def test_plain_scores_have_no_places():
    assert scores_of(returns(1.0, None)).by_token is None


@pytest.mark.parametrize("make", [tuple, iter, numpy.array, torch.tensor, lambda v: map(Decimal, v)])
def test_any_iterable_of_numbers_is_accepted(make):
    found = scores_of(returns({"token_scores": make([1, 0, 0, 0, 2])}, {"turn_scores": make([3])}))
    assert found.by_token == [[1, 0, 0, 0, 2], [0, 0, 3]]


@pytest.mark.parametrize(
    ("score", "kind", "part"),
    [
        ({"turn_scores": [1.0]}, RunError, "2 numbers"),
        ({"token_scores": [1.0] * 4}, RunError, "5 numbers"),
        ({"token_scores": 1.0}, RunError, "5 numbers"),
        ({"token_scores": [0.0, 0.0, 1e-9, 0.0, 1.0]}, RunError, "did not sample"),
        ({"token_scores": [0.0, float("nan"), 0.0, 0.0, 0.0]}, BadScore, "finite"),
        ({"turn_scores": [0.0, None]}, BadScore, "None"),
        ({"turn_scores": [0.0, 1e10]}, BadScore, "too large"),
        ({"turn_scores": [0.0, 1.0], "token_scores": [0.0] * 5}, BadScore, "not a number"),
        ({"turn_score": [0.0, 1.0]}, BadScore, "not a number"),
        ({}, BadScore, "not a number"),
    ],
    ids=str,
)
def test_unusable_scores_are_one_line_with_the_function(score, kind, part, user_error):
    with user_error(part, "'given'", "'4 ok 5'", kind=RunError) as caught:
        scores_of(returns(score, 1.0))
    assert type(caught.value) is kind and len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


# --- in runs ---------------------------------------------------------------------------------------------------------

PAID = [1.0, 0.0, -2.0, 0.0, 4.0]  # the tiny model never ends a completion: each has five tokens
FIVE = ("--max-new-tokens", 5, "--kl-placement", "none")


def at_tokens(completion_ids, **_):
    """Other scores for every second completion, so that the groups have unequal ones."""
    return [{"token_scores": [value * (1 + row % 2) for value in PAID]} for row in range(len(completion_ids))]


def their_sums(completion_ids, **_):
    return [sum(PAID) * (1 + row % 2) for row in range(len(completion_ids))]


def scored_rollout(trainer):
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    assert rollout.completions.mask.shape == (4, 5) and rollout.completions.mask.all()
    return rollout, trainer.collector.score(rollout)


def test_reinforce_pays_each_score_where_it_belongs(build):
    """The returns of the first completion are sums of the scores to go: 3, 2, 2, 4, 4."""
    trainer = build(*FIVE, algorithm="reinforce_pp", rewards=[at_tokens])
    rollout, scores = scored_rollout(trainer)
    batch = trainer.advantages(rollout, scores.shaped)
    assert scores.shaped.tolist() == [3, 6, 3, 6]
    assert batch.rewards[0].tolist() == PAID and batch.rewards[1].tolist() == [2, 0, -4, 0, 8]
    assert batch.returns[0].tolist() == [3, 2, 2, 4, 4]


@pytest.mark.parametrize(("penalty", "last"), [(0, 4.0), (1, 3.0)])
def test_ppo_pays_each_score_where_it_belongs(build, penalty, last):
    """V = 0.5, gamma 1, lambda 0.95. No completion has EOS, so each pays the penalty at its last token."""
    trainer = build(
        *FIVE, "--gamma", 1, "--lam", 0.95, "--missing-eos-penalty", penalty, rewards=[at_tokens]
    )  # fmt: skip
    rollout, scores = scored_rollout(trainer)
    rollout.values = torch.full_like(rollout.values, 0.5)
    batch = trainer.advantages(rollout, scores.shaped)
    assert scores.raw[0] == 3 and scores.shaped[0] == 3 - penalty
    assert batch.rewards[0].tolist() == [1, 0, -2, 0, last]
    advantages = [last - 0.5]
    for reward in (0, -2, 0, 1):
        advantages.insert(0, reward + 0.95 * advantages[0])  # V is the same before and after
    assert batch.raw_advantages[0].tolist() == pytest.approx(advantages)
    if not penalty:
        assert advantages == pytest.approx([2.045771875, 1.1008125, 1.15875, 3.325, 3.5])


def test_a_completion_without_a_score_is_paid_nothing(build):
    def some(completion_ids, **_):
        return [None, *at_tokens(completion_ids)[1:]]

    trainer = build(*FIVE, "--missing-eos-penalty", 1, rewards=[some])
    rollout, scores = scored_rollout(trainer)
    assert scores.shaped.isnan().tolist() == [True, False, False, False]
    assert rollout.token_scores[:2].tolist() == [[0] * 5, [2, 0, -4, 0, 7]]
    assert not trainer.advantages(rollout, scores.shaped).advantages.isnan().any()


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_training_differs_from_that_with_the_sums_only_if_tokens_have_rewards(build, algorithm):
    dense, plain = (build(*FIVE, algorithm=algorithm, rewards=[one]) for one in (at_tokens, their_sums))
    for update in (1, 2):
        one, other = dense.update_step(update), plain.update_step(update)
        assert one["rewards/mean"] == other["rewards/mean"]
    rewards = dense.advantages(*scored_and_shaped(dense)).rewards
    assert torch.equal(weights(dense), weights(plain)) == (rewards is None)


def scored_and_shaped(trainer):
    rollout, scores = scored_rollout(trainer)
    return rollout, scores.shaped


def test_metrics_and_evaluations_use_the_sums(build):
    trainer = build(*FIVE, rewards=[at_tokens, their_sums])
    metrics = trainer.update_step(1)
    assert metrics["rewards/each/at_tokens"] == metrics["rewards/each/their_sums"] == 4.5
    assert metrics["rewards/mean"] == 9.0
    assert trainer.evaluate()["eval/score"] == 9.0


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (("--dynamic-sampling", 2), "dynamic_sampling"),
        (("--control", "shuffled"), "control"),
        (("--normalize-scores",), "normalize_scores"),
    ],
)
def test_settings_that_need_one_score_refuse_others_at_once(build, flags, setting):
    """In the first update, and not with plain scores."""
    build(*FIVE, *flags, algorithm="grpo", rewards=[their_sums]).train()
    trainer = build(*FIVE, *flags, algorithm="grpo", rewards=[at_tokens])
    with pytest.raises(RunError) as caught:
        trainer.train()
    (problem,) = caught.value.problems
    assert problem.settings == (setting,) and "at_tokens" in problem.place
    assert trainer.host.state.global_step == 0


def test_a_bad_token_score_skips_the_update(build):
    def broken(completion_ids, trainer_state, **_):
        bad = float("nan") if trainer_state.global_step == 1 else 1.0
        return [{"token_scores": [bad] * len(ids)} for ids in completion_ids]

    trainer = build(*FIVE, rewards=[broken])
    trainer.update_step(1)
    trainer.update_step(2)
    assert trainer.progress.skipped == 1


# --- episodes of several turns ---------------------------------------------------------------------------------------


def test_a_function_receives_the_turns_of_an_episode_and_pays_each(build):
    """The rewards of the update are those of the function, at the last token of each turn, with the penalty at the
    last token of the episode, because it was cut off."""
    seen = []

    def by_turn(completions, completion_ids, completion_logprobs, turns, **_):
        seen.extend(zip(completions, completion_ids, completion_logprobs, turns, strict=True))
        return [{"turn_scores": [1.0 + number for number in range(len(one))]} for one in turns]

    found = []
    look = type("Look", (), {"on_batch": lambda self, update, batch, scores: found.append(batch)})()
    flags = ("--max-episode-tokens", 60, "--missing-eos-penalty", 0.25, "--kl-placement", "none")
    trainer = build(*flags, "--max-new-tokens", 3, rewards=[by_turn], callbacks=[look])
    episodes = trainer.generate(trainer.train_prompts[:4])
    seen.clear()  # the evaluation of the start model
    for episode in episodes[:2]:
        episode.add("More.")
    trainer.generate(episodes[:2])
    expected = [episode.ids for episode in episodes]
    trainer.step(episodes)
    (batch,) = found
    for row, (completion, ids, logprobs, turns) in enumerate(seen):
        episode = episodes[row]
        assert ids == expected[row] and turns == episode.turns and completion == episode.text
        assert [number == 0 for number in logprobs] == [not wrote for wrote in episode.action_mask]
        own = torch.tensor(episode.action_mask)
        torch.testing.assert_close(
            torch.tensor(logprobs)[own], batch.logprobs[row][: len(ids)][own], rtol=0, atol=1e-5
        )
        paid = {span[-1]: 1.0 + number for number, span in enumerate(episode.spans)}
        paid[episode.spans[-1][-1]] -= 0.0 if episode.ended else 0.25
        assert batch.rewards[row].tolist() == [paid.get(place, 0.0) for place in range(batch.mask.shape[1])]
    assert [len(turns) for *_, turns in seen] == [2, 2, 1, 1]


def test_completions_of_chats_are_the_messages_of_all_turns():
    seen = []

    def spy(completions, **_):
        seen.extend(completions)
        return [0.0] * len(completions)

    messages = [{"role": role, "content": role} for role in ("assistant", "user", "assistant")]
    Several = type("Several", (Episode,), {"messages": messages})
    chat = Prompt((1,), Example(({"role": "user", "content": "2 + 2?"},), conversational=True))
    episode = Several.of([1], COMPLETIONS[1][0], [1, 1, 0, 0, 1])
    Rewards([spy], None, None).score([chat] * 2, *COMPLETIONS, episodes=[episode, EPISODES[1]])
    assert seen == [messages, [{"role": "assistant", "content": "6"}]]

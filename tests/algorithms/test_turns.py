"""Tests of episodes of several turns: the equations see the policy's tokens only, in two units of time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from rlhf.algorithms import objectives as o
from rlhf.algorithms.classes import CLASSES
from rlhf.config import make_config
from rlhf.models.actor_critic import PolicyOutputs
from rlhf.models.packing import PackedMicroBatch, PaddedMicroBatch
from rlhf.rollout.completions import Completions, LogProbs, Rollout, token_batch
from rlhf.settings.fields import replaced

CPU = torch.device("cpu")
# two tokens of the policy, an observation of two, one token of the policy
MASK = torch.tensor([[True, True, False, False, True]])
ENDS = torch.tensor([[False, True, False, False, True]])
VALUES = torch.full((1, 5), 0.5)
SCORE = torch.tensor([1.0])
NO_KL = torch.zeros(1, 5)


def test_the_score_is_paid_once_at_the_last_token_of_the_policy():
    mask = torch.tensor([[True, True, False, True, False], [False] * 5, [True, False, False, False, False]])
    assert o.last_token(mask).tolist() == [
        [False, False, False, True, False],
        [False] * 5,
        [True, False, False, False, False],
    ]
    for at in ("token", "eos"):
        assert o.shape_rewards(NO_KL, SCORE, MASK, 0.1, at).tolist() == [[0, 0, 0, 0, 1]]
    kl = torch.tensor([[1.0, 2.0, 99.0, 99.0, 3.0]]) * MASK
    assert_close(o.shape_rewards(kl, SCORE, MASK, 0.1, "token"), torch.tensor([[-0.1, -0.2, 0, 0, 0.7]]))
    assert_close(o.shape_rewards(kl, SCORE, MASK, 0.1, "eos"), torch.tensor([[0, 0, 0, 0, 0.4]]))


def test_scores_of_tokens_are_paid_where_they_belong():
    paid = torch.tensor([[0.0, 2.0, 7.0, 7.0, -1.0]])  # at the ends of two turns; the sevens belong to no token
    assert o.shape_rewards(NO_KL, SCORE, MASK, 0.0, token_scores=paid).tolist() == [[0, 2, 0, 0, -1]]
    rewards = o.shape_rewards(NO_KL, SCORE, MASK, 0.0, "eos", paid)
    returns, _ = o.generalized_advantage_estimate(rewards, torch.zeros(1, 5), MASK, 1.0, 1.0)
    assert returns.tolist() == [[1, 1, 0, 0, -1]]


@pytest.mark.parametrize(
    ("gamma", "ends", "expected"),
    [
        (1.0, None, (0.451250, 0.475, 0.5)),
        (1.0, ENDS, (0.475, 0.475, 0.5)),
        (0.9, None, (0.2727625, 0.3775, 0.5)),
        (0.9, ENDS, (0.3775, 0.3775, 0.5)),
    ],
)
def test_gae_goes_from_one_token_of_the_policy_to_the_next(gamma, ends, expected):
    """lambda .95, V = .5. The value after the first turn is that after the observation."""
    rewards = o.shape_rewards(NO_KL, SCORE, MASK, 0.0)
    advantages, returns = o.generalized_advantage_estimate(rewards, VALUES, MASK, gamma, 0.95, ends)
    assert_close(advantages, torch.tensor([[expected[0], expected[1], 0, 0, expected[2]]]))
    assert_close(returns, torch.where(MASK, advantages + 0.5, 0.0))


def batch_of(gaps: bool):
    """Return completions of eight episodes; with `gaps`, an environment's tokens are between those of the policy."""
    draw = torch.Generator().manual_seed(3)
    rows = []
    turns = []
    for number in range(8):
        row: list[int] = []
        spans = []
        for _ in range(1 + number % 3):
            own = torch.randint(3, 50, (1 + int(torch.randint(0, 4, (1,), generator=draw)),), generator=draw).tolist()
            spans.append(range(len(row), len(row) + len(own)))
            row += own + ([9] * (number % 2 + 1) if gaps else [])
        rows.append(row)
        turns.append(spans)
    batch = token_batch([[5, 6]] * 8, rows, 0, CPU)
    return Completions(
        **vars(replace(batch, turns=turns, action_mask=None)), ended=torch.ones(8, dtype=torch.bool),
        allowed_tokens=None, vocabulary=60,
    )  # fmt: skip


def spread(values: list[torch.Tensor], completions: Completions) -> torch.Tensor:
    """Return values of the policy's tokens (B lists) at their places, (B, T); 1000 elsewhere."""
    found = torch.full(completions.mask.shape, 1000.0)
    for row, own in enumerate(values):
        found[row, completions.actions(row)] = own
    return found


@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize("algorithm", CLASSES)
def test_an_environments_tokens_change_nothing(algorithm, unit):
    """Advantages, returns and loss of the policy's tokens equal those of the same tokens without a gap."""
    groups = {"K": 4, "batch_size": 2} if CLASSES[algorithm].compares_groups else {"batch_size": 8}
    config = make_config(algorithm=algorithm, max_new_tokens=40, entropy_coef=0.01, kl_placement="reward", **groups)
    config = replaced(config, gae_unit=unit, gamma=0.9)
    made = CLASSES[algorithm](config)
    scores = torch.tensor([1.0, 0.5, -1.0, 2.0, 0.0, float("nan"), 3.0, 1.0])
    found = {}
    for gaps in (False, True):
        completions = batch_of(gaps)
        lengths = [len(completions.actions(row)) for row in range(8)]
        draw = torch.Generator().manual_seed(4)
        sets = [[torch.randn(n, generator=draw) for n in lengths] for _ in range(6)]
        old, ref, values, new, entropy, new_values = (spread(own, completions) for own in sets)
        new = old + 0.1 * new.clamp(-3, 3)
        rollout = Rollout(completions, [], *LogProbs(old, ref, values))
        experience = made.advantages(rollout, scores, 0.1)
        outputs = PolicyOutputs(new, entropy, new_values if algorithm == "ppo" else None)
        loss, stats = made.loss(experience, torch.arange(8), outputs, experience.loss_mask.sum().float())
        parts = [experience.advantages, experience.raw_advantages, experience.returns]
        compact = [p[completions.action_mask] for p in parts if p is not None]
        found[gaps] = [*compact, loss, *stats.values()]
    for without, within in zip(*found.values(), strict=True):
        assert_close(within, without)


def test_the_end_of_each_turn():
    completions = batch_of(gaps=True)
    expected = [[turn[-1] for turn in turns] for turns in completions.turns]
    assert [row.nonzero().flatten().tolist() for row in completions.turn_ends] == expected
    assert completions.tokens == int(completions.action_mask.sum()) < sum(completions.completion_lengths)


def test_rows_are_selected_with_their_turns():
    whole = batch_of(gaps=True)
    chosen = whole.select([5, 0])
    assert chosen.turns == [whole.turns[5], whole.turns[0]] and chosen.rows() == [whole.rows()[5], whole.rows()[0]]
    width = chosen.mask.shape[1]
    assert torch.equal(chosen.action_mask, whole.action_mask[[5, 0], :width])


@pytest.mark.parametrize("kind", [PackedMicroBatch, PaddedMicroBatch])
def test_a_micro_batch_has_the_tokens_of_the_policy_only(kind):
    completions = batch_of(gaps=True)
    rows = [4, 1, 7]
    micro_batch = kind(completions, rows)
    expected = [completions.rows()[row][column] for row in rows for column in completions.actions(row)]
    assert micro_batch.tokens.tolist() == expected
    assert micro_batch.lengths == [len(completions.actions(row)) for row in rows]
    assert torch.equal(micro_batch.mask, completions.action_mask[rows])

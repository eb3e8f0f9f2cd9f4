"""Tests of the arguments that reward functions receive only if they name them: completion_logprobs, turns, group."""

from __future__ import annotations

import pytest
import torch

from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.rewards.arguments import NAMED, check_columns, required_columns
from rlhf.rewards.checks import check_functions
from rlhf.rewards.probes import TOTAL, probe_rewards
from rlhf.rewards.rewards import Rewards
from rlhf.setup.build import load_components
from rlhf.setup.start_samples import sample_and_score
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError
from tests.conftest import BY_TIER

CHAT = ({"role": "user", "content": "2 + 2?"},)
ROWS = [Prompt((1,), Example(CHAT))] * 4
COMPLETIONS = (["4", "5", "6", "7"], [[5, 2], [5, 6, 7], [6], [7]], [True, False, True, True])  # texts, ids, ended
LOGPROBS = [[-0.5, -1.0], [-2.0, -0.25, -0.5], [-1.0], [-3.0]]


class Reader:
    """A reward function that stores what it receives, and whose score does not depend on it."""

    def __init__(self):
        self.calls = []

    def __call__(self, completions, completion_ids, completion_logprobs, turns, group, **_):
        self.calls.append((completion_ids, completion_logprobs, turns, group))
        return [float(len(ids) % 3) for ids in completion_ids]


def same_scores(completions, completion_ids, **_):
    return [float(len(ids) % 3) for ids in completion_ids]


def weights(trainer) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.host.model.parameters()])


# --- which arguments a function receives -----------------------------------------------------------------------------


def test_functions_receive_them_only_if_one_names_them():
    seen = []

    def every(completions, **more):
        seen.append({*NAMED} & more.keys())
        return [0.0] * len(completions)

    def in_groups(completions, group, **more):
        seen.append((group, {*NAMED} & more.keys()))
        return [0.0] * len(completions)

    Rewards([every], None, None).score(ROWS, *COMPLETIONS, 2)
    Rewards([in_groups], None, None).score(ROWS, *COMPLETIONS, 2)
    Rewards([in_groups], None, None).score(ROWS, *COMPLETIONS)
    assert seen == [set(), ([0, 0, 1, 1], set()), ([0, 1, 2, 3], set())]


def test_a_function_receives_the_log_probs_and_the_turn_of_each_completion():
    reader = Reader()
    Rewards([reader], None, None).score(ROWS, *COMPLETIONS, 4, lambda: LOGPROBS)
    ((ids, logprobs, turns, group),) = reader.calls
    assert (ids, logprobs, group) == (COMPLETIONS[1], LOGPROBS, [0, 0, 0, 0])
    assert [[(turn.completion, turn.ended) for turn in one] for one in turns] == [
        [pair] for pair in zip(COMPLETIONS[0], COMPLETIONS[2], strict=True)
    ]


def test_completions_without_log_probs_are_refused_if_a_function_names_them(user_error):
    rewards = Rewards([Reader(), same_scores], None, None)
    assert rewards.reads_logprobs and not Rewards([same_scores], None, None).reads_logprobs
    with user_error("completion_logprobs", kind=RunError):
        rewards.score(ROWS, *COMPLETIONS)


@pytest.mark.parametrize("column", NAMED)
def test_a_column_with_such_a_name_is_an_argument_only_if_no_function_names_it(column, user_error):
    def others(completions, prompt_ids, environments, environment_rewards, **_):
        return [0.0] * len(completions)

    rows = [Example(CHAT, columns={column: 7})]
    names = others if column.startswith(("environment", "prompt")) else Reader()
    check_columns([same_scores], rows, "--prompts x.jsonl")
    with user_error(f"--columns my_{column}={column}"):
        check_columns([same_scores, names], rows, "--prompts x.jsonl")
    assert column not in required_columns(names)
    seen = []
    every = lambda completions, **more: seen.append(more[column]) or [0.0]  # noqa: E731
    Rewards([every], None, None).score([Prompt((1,), rows[0])], ["4"], [[5]], [True])
    assert seen == [[7]]


def test_the_call_before_a_run_gives_all_arguments():
    reader = Reader()
    check_functions([reader], [Example(CHAT, conversational=True)], "--prompts x.jsonl")
    assert [(len(logprobs), len(turns), group) for _, logprobs, turns, group in reader.calls] == [(1, 1, [0])]


# --- in runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--top-p", 0.7), ("--micro-batch-size", 1)], ids=str)
@pytest.mark.parametrize("algorithm", BY_TIER)
def test_log_probs_are_those_of_the_policy_that_sampled(build, algorithm, flags):
    """They equal those of the optimizer steps, and the update makes the same weights as without them."""
    reader = Reader()
    found = []
    look = type("Look", (), {"on_batch": lambda self, update, batch, scores: found.append(batch)})()
    trainer = build(*flags, algorithm=algorithm, rewards=[reader], callbacks=[look])
    plain = build(*flags, algorithm=algorithm, rewards=[same_scores])
    size = trainer.config.group_size
    for update in (1, 2):
        trainer.update_step(update)
        plain.update_step(update)
        (ids, logprobs, _, group), batch = reader.calls[-1], found[-1]
        assert ids == batch.completions.rows() and group == [row // size for row in range(len(ids))]
        for row, numbers in enumerate(logprobs):
            if not batch.completions.turns[row]:  # greedy
                continue
            expected = batch.logprobs[row][batch.mask[row]]
            torch.testing.assert_close(torch.tensor(numbers), expected, rtol=0, atol=1e-5)
    assert torch.equal(weights(trainer), weights(plain))


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_a_deferred_or_shared_pass_stays_right(build, algorithm):
    """With one minibatch, the first optimizer step computes the log-probs, or uses the pass that did."""
    flags = ("--minibatches", 1, "--ppo-epochs", 1, "--kl-placement", "loss", "--learning-rate", "1e-2")
    trainers = [build(*flags, algorithm=algorithm, rewards=[one]) for one in (Reader(), same_scores)]
    assert trainers[0].passes.share_first
    for update in (1, 2):
        one, other = (trainer.update_step(update) for trainer in trainers)
        assert one["policy/ratio"] == other["policy/ratio"] == 1
        assert one["kl_divergence"] == other["kl_divergence"]
    assert torch.equal(*map(weights, trainers))


def test_groups_that_dynamic_sampling_draws_have_log_probs(build):
    reader = Reader()

    def equal(completions, **_):
        return [1.0] * len(completions)

    trainer = build("--dynamic-sampling", 2, algorithm="grpo", rewards=[equal, reader])
    trainer.rewards.weights[1] = 0.0
    trainer.update_step(1)
    assert len(reader.calls) == 2, "the rollout and the groups in place of its groups"
    for ids, logprobs, _, _ in reader.calls:
        assert list(map(len, ids)) == list(map(len, logprobs)) and all(
            number < 0 for row in logprobs for number in row
        )


@pytest.mark.parametrize("samples", [1, 2])
def test_evaluations_give_the_arguments_to_reward_and_evaluation_functions(build, samples):
    """An evaluation of the same weights computes nothing again, and its KL is the one without log-probs."""
    readers = Reader(), Reader()
    flags = ("--eval-samples", samples, "--top-p", 0.8)
    trainer = build(*flags, rewards=[readers[0]], eval_functions=Rewards([readers[1]], None, None))
    plain = build(*flags, rewards=[same_scores], eval_functions=Rewards([same_scores], None, None))
    for one in (trainer, plain):
        one.update_step(1)
        one.evaluate()
        one.evaluate()
    calls = [reader.calls for reader in readers]
    assert calls[0][1:] == calls[1] and calls[0][1] == calls[0][2]
    ids, logprobs, _, group = calls[1][0]
    assert list(map(len, ids)) == list(map(len, logprobs))
    assert group == [row // samples for row in range(6 * samples)]
    evaluations = trainer.evaluations[0], plain.evaluations[0]
    assert evaluations[0].kl.tolist() == evaluations[1].kl.tolist()
    prompts = [prompt for prompt in trainer.evaluation_prompts for _ in range(samples)]
    assert evaluations[0].texts == evaluations[1].texts and len(prompts) == len(ids)


def test_start_samples_have_them(configured):
    config = configured("--K", 2, algorithm="grpo")
    components = load_components(config, torch.device("cpu"), Screen())
    reader = Reader()
    components.rewards = Rewards([reader], None, components.tokenizer)
    sample_and_score(config, components, [3, 5], 2)
    ((ids, logprobs, _, group),) = reader.calls
    assert list(map(len, ids)) == list(map(len, logprobs)) and group == [0, 0, 1, 1]


def test_probes_skip_a_function_that_reads_log_probs(build):
    reader = Reader()
    trainer = build(rewards=[reader, same_scores])
    report = probe_rewards(trainer.config, trainer.rewards, trainer.train_prompts, trainer.processing_class, 2)
    assert report.prompts == 2 and not report.failures and not reader.calls
    for scores in report.scores.values():
        assert scores["Reader"] == [None] * 2 and scores[TOTAL] == scores["same_scores"] != [None] * 2

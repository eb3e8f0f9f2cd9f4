"""Tests TRL's contract of reward functions: form of the arguments, state, logging, None, and columns."""

from __future__ import annotations

import json
from functools import partial

import numpy
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

import train_ppo
from rlhf.algorithms.table import ALGORITHMS
from rlhf.api import make_trainer
from rlhf.config import parse_cli
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rewards.arguments import RESERVED, RewardLog, check_columns
from rlhf.rewards.functions import keyword_bonus, word_penalty
from rlhf.rewards.rewards import Rewards
from rlhf.trainer.metrics import rollout_metrics
from rlhf.utils.errors import RunError
from tests.conftest import BY_TIER, LEARN_FROM_ALL

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"})
ROWS = [Prompt((1,), Example(CHAT, conversational=True)), Prompt((1,), Example(CHAT[1:]))]
COMPLETIONS = (["4", "<think>\neasy\n</think>\nfour"], [[5, 2], [5, 6, 7]], [True, False])  # texts, ids, ended


def score(*functions, weights=None, prompts=ROWS):
    return Rewards(functions, weights, None).score(prompts, *COMPLETIONS)


# --- the arguments ---------------------------------------------------------------------------------------------------


def test_completions_have_the_form_of_the_data_row():
    seen = {}

    def function(prompts, completions, **_):
        seen.update(prompts=prompts, completions=completions)
        return [0.0, 0.0]

    score(function)
    assert seen["prompts"] == [list(CHAT), "2 + 2?"]
    assert seen["completions"] == [[{"role": "assistant", "content": "4"}], COMPLETIONS[0][1]]


def form_of(value):
    """The type of a value, the roles of messages, and the keys of a message."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [(message["role"], sorted(message)) for message in value]
    return type(value)


@pytest.mark.parametrize("prompt", ["2 + 2?", [dict(message) for message in CHAT]], ids=["text", "chat"])
def test_arguments_equal_those_of_trls_trainer(start_model, tmp_path, prompt):
    """TRL's GRPOTrainer and our trainer call the same function on the same rows."""
    calls = []
    states = []

    def spy(trainer_state, **arguments):
        calls.append(arguments)
        states.append((trainer_state.global_step, trainer_state.max_steps))  # TRL changes the object later
        return [float(i) for i in range(len(arguments["completions"]))]

    rows = [{"prompt": prompt, "answer": 4, "source": "hand"}] * 8
    settings = GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, num_generations=2,
        max_completion_length=4, report_to="none", use_cpu=True, bf16=False, save_strategy="no",
    )  # fmt: skip
    policy = AutoModelForCausalLM.from_pretrained(start_model)
    stock = GRPOTrainer(
        policy, [spy], settings, Dataset.from_list(rows), processing_class=load_tokenizer(str(start_model))
    )
    stock.train()
    flags = ["--actor-model", start_model, "--output", tmp_path, "--num-iterations", 1, "--max-new-tokens", 4]
    config = parse_cli([str(flag) for flag in [*flags, "--batch-size", 1, "--K", 2]], "grpo")
    trainer = make_trainer(config, rows, rewards=[spy])
    trainer.collector.score(trainer.collector.collect(trainer.episodes_of(1), 1))
    theirs, *trial, ours = calls
    assert [len(call["completions"]) for call in trial] == ([] if isinstance(prompt, str) else [1]), "before the run"
    assert ours.keys() - theirs.keys() == {"messages", "ended", "prompt"}
    assert theirs.keys() - ours.keys() == set()
    assert len(ours["completions"]) == len(theirs["completions"]) == 2
    assert ours["prompts"] == theirs["prompts"] and ours["answer"] == theirs["answer"] == [4, 4]
    for name in ("completions", "completion_ids"):
        assert [form_of(entry) for entry in ours[name]] == [form_of(entry) for entry in theirs[name]]
    assert (states[0], states[-1]) == ((0, 1), (0, 1))
    for log in (theirs, ours):
        assert log["log_extra"]("answer", [4, 4]) is log["log_metric"]("accuracy", 1.0) is None


def test_functions_of_trl_always_receive_messages():
    texts = [Prompt((1,), Example(CHAT[1:]))] * 2
    assert score(think_format_reward, prompts=texts).total == [0.0, 1.0]
    assert score(partial(think_format_reward), prompts=texts).by_function == {"think_format_reward": [0.0, 1.0]}


def test_built_in_functions_accept_messages():
    assert score(word_penalty, keyword_bonus(["four"])).by_function == {
        "word_penalty": [-1.0, -4.0],
        "keyword_bonus": [0.0, 1.0],
    }


def test_state_is_that_of_the_run_and_a_copy(build):
    seen = []

    def scheduled(completions, trainer_state, **_):
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        trainer_state.global_step = 99  # neither the run nor the next function sees it
        trainer_state.log_history.clear()
        return [trainer_state.max_steps * 1.0] * len(completions)

    def after(completions, trainer_state, **_):
        assert trainer_state.global_step < 99
        return [0.0] * len(completions)

    trainer = build("--num-iterations", 2, "--eval-every", 2, rewards=[scheduled, after])
    trainer.train()
    # the start model's evaluation, the rollouts of updates 1 and 2, and the last evaluation
    assert seen == [(0, 2), (0, 2), (1, 2), (2, 2)]
    assert trainer.host.state.global_step == 2 and trainer.host.state.log_history


def test_logged_columns_and_metrics_reach_the_batch(build):
    found = {}

    def logging(completions, log_extra, log_metric, **_):
        log_extra("length", [len(text) for text in completions])
        log_metric("longest", max(map(len, completions)))
        log_metric("longest", 0)
        return [0.0] * len(completions)

    class Look:
        def on_batch(self, update, batch, scores):
            found.update(extra=scores.extra, texts=batch.completions.texts(trainer.processing_class))

    trainer = build(rewards=[logging], callbacks=[Look()])
    metrics = trainer.update_step(1)
    lengths = [len(text) for text in found["texts"]]
    assert found["extra"] == {"length": lengths} and metrics["rewards/logged/longest"] == max(lengths) / 2


def test_logged_columns_are_saved_next_to_the_completions(run_flags, tmp_path):
    (tmp_path / "rules.py").write_text(
        "def rated(completions, log_extra, **kwargs):\n"
        "    log_extra('length', [len(text) for text in completions])\n"
        "    return [None] + [float(len(text)) for text in completions[1:]]\n"
        "def seen(completions, log_extra, **kwargs):\n"
        "    log_extra('upper', [text.upper() for text in completions])\n"
        "    return [0.0] * len(completions)\n"
    )
    rules = ["--reward-func", f"{tmp_path}/rules.py:rated", "--eval-func", f"{tmp_path}/rules.py:seen"]
    train_ppo.main(run_flags("--rm-model", "none", *rules))
    samples = tmp_path / "run" / "samples"
    names = ["rollout-000001", "rollout-000002", "update-000000", "update-000002"]
    assert sorted(file.stem for file in samples.iterdir()) == names
    for name in names:
        rows = [json.loads(line) for line in (samples / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert len(rows) == (4 if name.startswith("rollout") else 6)
        assert rows[0]["score"] is None and rows[1]["score"] == len(rows[1]["completion"])
        for row in rows:
            upper = {"upper": row["completion"].upper()} if name.startswith("update") else {}
            assert row["extra"] == {"length": len(row["completion"]), **upper}


def test_logged_columns_become_what_a_json_file_can_store():
    """They are part of samples and checkpoints, so an unusual object must not end a run."""
    log = RewardLog(5)
    log.log_extra("any", [numpy.float32(0.5), torch.tensor([1, 2]), {(1, 2): 3}, {4}, (5, {"a": None})])
    assert log.extra == {"any": [0.5, [1, 2], "{(1, 2): 3}", "{4}", [5, {"a": None}]]}


def test_logged_column_needs_one_value_per_completion(user_error):
    def short(completions, log_extra, **_):
        log_extra("gold", ["x"])
        return [0.0] * len(completions)

    with user_error("log_extra('gold')", "1 values", "2 completions", "'short'", kind=RunError):
        score(short)


# --- None ------------------------------------------------------------------------------------------------------------


def first_only(completions, **_):
    return [2.0, None]


def test_function_drops_out_of_a_row_with_none():
    found = score(first_only, lambda completions, **_: [1.0, 5.0], weights=[3.0, 1.0])
    assert found.total == [7.0, 5.0] and found.by_function["first_only"] == [2.0, None]
    assert score(first_only).total == [2.0, None]


def none_for(*rows):
    """A reward function that gives 1, 2, 3, ... and None for these rows."""

    def some(completions, **_):
        return [None if i in rows else i + 1.0 for i in range(len(completions))]

    return some


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_completion_without_a_score_has_advantage_0_and_moves_no_other(build, algorithm):
    """Its score is left out of the statistics: the others' advantages are those of a batch without it."""

    def trainer_of(size: int):
        groups = ["--K", size, "--batch-size", 1] if ALGORITHMS[algorithm].group_size > 1 else []
        return build(*groups, "--kl-placement", "none", algorithm=algorithm, rewards=[none_for(1)])

    trainer = trainer_of(4)
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    scores = trainer.collector.score(rollout)
    assert scores.raw.isnan().tolist() == [False, True, False, False]
    batch = trainer.advantages(rollout, scores.shaped)
    assert not batch.advantages.isnan().any() and not batch.advantages[1].any()
    assert batch.scored_mask.equal(rollout.mask & torch.tensor([[True], [False], [True], [True]]))
    others = [0, 2, 3]
    fewer = trainer_of(3)
    part = fewer.collector.logprobs(fewer.collector.rollout([rollout.episodes[row] for row in others]))
    expected = fewer.advantages(part, scores.shaped[others]).advantages
    found = batch.advantages[others, : expected.shape[1]]
    assert found.any() and torch.allclose(found, expected, atol=1e-5)
    # scores 1, 3, 4: mean 8/3; the others' means are 7/2, 5/2, 2
    by_hand = {"grpo": [-5 / 3, 1 / 3, 4 / 3], "rloo": [-5 / 2, 1 / 2, 2]}
    if algorithm in by_hand:
        assert found[:, 0].tolist() == pytest.approx(by_hand[algorithm])


@pytest.mark.parametrize("algorithm", LEARN_FROM_ALL)
def test_update_with_missing_scores_has_finite_metrics_without_them(build, algorithm):
    trainer = build(algorithm=algorithm, rewards=[none_for(0, 1), none_for(0, 1, 2)])
    metrics = trainer.update_step(1)
    count = trainer.config.episodes_per_update
    totals = [(i + 1.0) * (1 if i == 2 else 2) for i in range(2, count)]
    assert metrics["rewards/mean"] == pytest.approx(sum(totals) / len(totals))
    assert metrics["rewards/unscored"] == pytest.approx(2 / count)
    assert metrics["rewards/each/some_2"] == pytest.approx(sum(range(4, count + 1)) / (count - 3))
    assert all(value == value for value in metrics.values()), "no metric is NaN"


def test_value_loss_leaves_out_completions_without_a_score(build):
    """With a score for completion 0 alone, only its tokens have an error of the critic."""
    trainer = build("--kl-placement", "none", "--value-clip-range", 100, rewards=[none_for(1, 2, 3)])
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    batch = trainer.advantages(rollout, trainer.collector.score(rollout).shaped)
    stats = trainer.policy_optimizer.minibatch_gradients(batch, [0, 1, 2, 3])
    errors = (batch.values - batch.returns)[0][rollout.mask[0]].square().sum()
    assert float(stats["value/loss"]) == pytest.approx(float(errors / 2 / rollout.mask.sum()), rel=1e-4)


def nothing(completions, **_):
    return [None] * len(completions)


def test_run_without_any_score_ends_before_the_first_update(build, user_error):
    with user_error("(nothing)", "update 0", kind=RunError):
        build(rewards=[nothing]).train()


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_update_without_a_score_has_advantage_0(build, algorithm):
    """More updates in a row than may be skipped. The weights do not change: nothing else is in the loss."""
    trainer = build(
        "--num-iterations",
        6,
        "--normalize-scores",
        "--kl-placement",
        "none",
        algorithm=algorithm,
        rewards=[nothing],
    )
    before = [weight.detach().clone() for weight in trainer.actor.parameters()]
    for update in range(2, 6):
        metrics = trainer.update_step(update)
        assert metrics["rewards/unscored"] == 1 and "rewards/mean" not in metrics
        assert all(value == value for value in metrics.values())
    assert trainer.progress.skipped == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters(), strict=True))


def test_normalizer_uses_only_known_scores(build):
    trainer = build("--normalize-scores", rewards=[none_for(0)])
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    shaped = trainer.collector.score(rollout).shaped
    assert shaped[0].isnan() and shaped[1:].tolist() == pytest.approx([-1.0, 0.0, 1.0])  # scores 2, 3 and 4


def test_group_of_missing_scores_counts_as_equal(build):
    trainer = build("--K", 2, algorithm="grpo", rewards=[none_for(0, 1, 2)])
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    scores = trainer.collector.score(rollout)
    metrics = rollout_metrics(trainer.advantages(rollout, scores.shaped), scores, 2)
    groups = len(rollout.mask) // 2
    assert metrics["rewards/equal_groups"] == pytest.approx(2 / groups)


# --- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", RESERVED)
def test_column_named_like_an_argument_is_refused(column, user_error):
    rows = [Example(CHAT, columns={column: 1})]
    with user_error(f"--columns my_{column}={column}"):
        check_columns([first_only], rows, "--prompts x.jsonl")
    check_columns([], rows, "--prompts x.jsonl")  # without a function nothing is hidden

"""Tests of --control shuffled: the algorithm receives the scores of an update in a random order, across prompts. All
else, such as logged rewards and evaluations, uses the true scores."""

from __future__ import annotations

import functools
import math
from collections import Counter

import pytest
import torch

import train_grpo
import train_rloo
from rlhf.checkpoints.run_record import RunRecord
from rlhf.rewards.scores import Scores
from tests.conftest import BY_TIER

NAN = math.nan


@pytest.fixture(params=BY_TIER)
def make(build, request):
    """`build` for each algorithm: 4 prompts, or 2 prompts x 2 completions."""
    return functools.partial(build, algorithm=request.param)


def scores_of(*shaped: float) -> Scores:
    raw = torch.tensor(shaped)
    return Scores(raw.tolist(), {"a": raw.tolist()}, {"column": list(shaped)}, {"logged": 1.0}, raw, raw.clone())


def shuffled(scores: Scores, seed: int = 42, update: int = 1) -> list[float]:
    return scores.for_control("shuffled", seed, update).shaped.tolist()


def test_shaped_scores_are_the_same_numbers_in_an_order_by_seed_and_update():
    given = scores_of(*range(32))
    orders = {(seed, update): shuffled(given, seed, update) for seed in (1, 2) for update in (1, 2, 3)}
    assert all(sorted(order) == list(range(32)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == len(orders)
    assert shuffled(given, 2, 3) == orders[2, 3]
    assert given.shaped.tolist() == list(range(32)), "the given scores are not changed"


def test_only_the_shaped_scores_are_exchanged():
    given = scores_of(*range(8))
    control = given.for_control("shuffled", 42, 1)
    assert control.raw is given.raw and control.by_function == given.by_function
    assert control.extra == given.extra and control.logged == given.logged
    assert given.for_control("none", 42, 1) is given


def test_a_completion_without_a_score_keeps_none():
    order = shuffled(scores_of(1, NAN, 2, 3, NAN, 4, 5, 6))
    assert [math.isnan(score) for score in order] == [False, True, False, False, True, False, False, False]
    assert sorted(score for score in order if not math.isnan(score)) == [1, 2, 3, 4, 5, 6]
    assert all(math.isnan(score) for score in shuffled(scores_of(NAN, NAN)))


def test_every_completion_receives_every_score_equally_often():
    """4 completions, 4,000 updates: each of the 16 pairs is expected 1,000 times, with a standard deviation of 27."""
    given = scores_of(0, 1, 2, 3)
    pairs = Counter(pair for update in range(1, 4001) for pair in enumerate(shuffled(given, update=update)))
    assert len(pairs) == 16 and all(abs(count - 1000) < 5 * 27 for count in pairs.values())


def test_the_algorithm_receives_the_exchanged_scores_and_the_metrics_the_true_ones(make, monkeypatch):
    """With the penalty for a missing EOS, which is exchanged together with the score."""
    logged = {}
    received = {}
    given = [0.0, 1.0, 2.0, 4.0]
    for control in ("none", "shuffled"):
        trainer = make("--control", control, "--missing-eos-penalty", 0.5, rewards=[lambda **_: given])
        original = trainer.advantages
        seen = []
        monkeypatch.setattr(trainer, "advantages", lambda r, s, seen=seen, f=original: seen.append(s) or f(r, s))
        logged[control] = trainer.update_step(1)
        (received[control],) = (scores.tolist() for scores in seen)
    assert sorted(received["shuffled"]) == sorted(received["none"]) and received["shuffled"] != received["none"]
    for name in ("rewards/mean", "rewards/std"):
        assert logged["shuffled"][name] == logged["none"][name]
    assert logged["shuffled"]["policy/grad_norm"] != logged["none"]["policy/grad_norm"]


def test_evaluations_use_the_true_scores(make):
    """The completions of the start model are the same, so its evaluation is, too."""
    found = [make("--control", control).evaluate()["eval/score"] for control in ("none", "shuffled")]
    assert found[0] == found[1]


@pytest.mark.parametrize("script", [train_grpo, train_rloo])
def test_dynamic_sampling_chooses_prompts_by_the_true_scores(build, script):
    """A group has equal true scores for two prompts of three. Both runs draw the same prompts."""
    from tests.trainer.test_dynamic_sampling import Recorder, by_prompt, kept_prompts, rewards_of

    kept = []
    for control in ("none", "shuffled"):
        recorder = Recorder()
        trainer = build(
            "--dynamic-sampling", 3, "--batch-size", 4, "--control", control, algorithm=script.__name__[6:],
            callbacks=[recorder], rewards=rewards_of(build, by_prompt),
        )  # fmt: skip
        trainer.update_step(1)
        kept.append((kept_prompts(recorder.batches[0]), recorder.scores[0]))
    (prompts, true), (again, exchanged) = kept
    assert prompts == again and true.raw.equal(exchanged.raw)
    assert sorted(true.shaped.tolist()) == sorted(exchanged.shaped.tolist())
    assert not true.shaped.equal(exchanged.shaped)


def test_summary_and_run_json_name_the_control(run_flags, tmp_path, capsys):
    flags = ["--batch-size", 2, "--K", 2, "--num-iterations", 1, "--control", "shuffled"]
    train_grpo.main(run_flags(*flags))
    plan, _, summary = capsys.readouterr().out.partition("before -> after training")
    assert "GRPO control (scores shuffled)" in plan and "GRPO control (scores shuffled)" in summary
    run = tmp_path / "run"
    assert RunRecord.read(run).flat_settings["control"] == "shuffled"
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "GRPO control (scores shuffled)" in card and "| `control` | shuffled |" in card

"""Tests the figures of benchmarks/credit_over_turns.py: values of a critic, curves, and the tables."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.credit_over_turns import (
    ARMS,
    by_turn_and_risk,
    compared,
    file_of,
    half_way,
    main,
    mean,
    settings_of,
    with_interval,
)
from rlhf.demo.crossing import RISKS, expected_pots, random_play, reach
from rlhf.settings.training import Config
from tests.documents import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "crossing"
SEEDS = (42, 123, 777, 1, 2)  # in the order of the page


def test_values_are_compared_weighted_with_the_reach():
    """By hand: states with the probabilities 3/4 and 1/4, values 1 and 2, exact values 2 and 6."""
    states = [("safe",), ("risky",)]
    values, exact, reached = (dict(zip(states, pair, strict=True)) for pair in ((1.0, 2.0), (2.0, 6.0), (0.75, 0.25)))
    found = compared(values, exact, reached)
    assert found["correlation"] == pytest.approx(1)
    assert found["rmse"] == pytest.approx(math.sqrt(0.75 * 1 + 0.25 * 16))
    assert found["exact_std"] == pytest.approx(4 * math.sqrt(0.75 * 0.25))
    assert math.isnan(compared(dict.fromkeys(states, 1.0), exact, reached)["correlation"])


def test_exact_values_are_perfect_values():
    exact = expected_pots(random_play)
    found = compared(exact, exact, reach(random_play))
    assert (found["correlation"], found["rmse"]) == (pytest.approx(1), 0)


def test_states_are_grouped_by_pot_and_risk():
    groups = by_turn_and_risk(reach(random_play))
    assert len(groups) == 16
    assert sum(groups["0 safe"].values()) == RISKS["safe"].share
    assert mean(len, groups["3 risky"]) == pytest.approx(4)
    assert {seen[-1] for seen in groups["3 risky"]} == {"risky"}


def test_half_way_is_the_first_update_with_the_mean_score():
    """Half way from 0.577 to 2.475 is 1.526."""
    assert half_way([0.5] * 5 + [1.6] * 5) == 10
    assert half_way([0.5] * 5 + [3.0] * 5) == 8
    assert half_way([1.5] * 20) == math.inf


def test_intervals_are_over_seeds():
    """Student's t with 4 degrees of freedom: 2.776."""
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert with_interval([1, 2, 3, 4, 5]) == f"3.00 ({3 - half:.2f} to {3 + half:.2f})"


def test_the_report_has_one_row_per_arm_with_runs(tmp_path, capsys):
    for arm, seed, score in (("ppo_turn_dense", 1, 2.0), ("ppo_turn_dense", 2, 2.2), ("grpo", 1, 1.5)):
        critic = {"correlation": 0.9, "rmse": 0.5} if arm.startswith("ppo") else None
        end = {"exact": score, "sampled": score, "error": 0.1, "illegal": 0.01}
        run = {"arm": arm, "seed": seed, "end": end, "critic": critic, "curve": [score] * 9, "seconds": 60}
        file_of(tmp_path, arm, seed).write_text(json.dumps(run))
    main(["--work", str(tmp_path), "--report"])
    _, _, ppo, grpo = capsys.readouterr().out.strip().split("\n")
    assert "| ppo_turn_dense | 1, 2 | 2.00; 2.20 | 2.10 (" in ppo and "| 0.90 | 0.50 | 60 |" in ppo
    assert "| grpo | 1 | 1.50 | 1.50 | 1.50 | not reached |" in grpo


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("benchmarks.credit_over_turns.in_a_process", lambda *job: started.append(job[:2]) or "")
    monkeypatch.setattr("rlhf.demo.parts.prepare_parts", lambda *_: None)
    monkeypatch.setattr("benchmarks.credit_over_turns.report", lambda work: "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    file_of(tmp_path, "grpo", 1).write_text("{}")
    main(["--work", str(tmp_path), "--arms", "grpo", "rloo", "--seeds", "1", "2"])
    assert sorted(started) == [("grpo", 2), ("rloo", 1), ("rloo", 2)]


def test_settings_of_the_arms_are_settings():
    from rlhf.config import make_config

    for algorithm, game, own in ARMS.values():
        config = make_config("demo-game", algorithm=algorithm, environment=game, **own)
        assert isinstance(config, Config)
        assert config.episodes_per_update == make_config("demo-game").episodes_per_update
    assert settings_of(["lam=0.5", 'kl_placement="none"']) == {"lam": 0.5, "kl_placement": "none"}


def test_the_page_has_the_scores_of_the_stored_runs():
    """Each arm's scores, in the order of the table's seeds."""
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    table = page.split("| algorithm, unit of time, game |")[1].split("\n\n")[0]
    rows = [line.split("|")[2].strip() for line in table.splitlines()[2:]]
    stored = [
        "; ".join(f"{json.loads(file_of(RESULTS, arm, seed).read_text())['end']['exact']:.2f}" for seed in SEEDS)
        for arm in ARMS
    ]
    assert rows == stored

"""Tests of benchmarks/scan_against_rise.py: correlations by hand, made-up run folders, and a whole command."""

from __future__ import annotations

import json

import numpy as np
import pytest

import train_grpo
from benchmarks.scan_against_rise import PREDICTION, correlations, main, rank_correlation, rises_of
from rlhf.utils.errors import UserError

TOPICS = ("a", "b", "c", "d", "e")


def write_samples(folder, update: int, scores: dict[str, list[float | None]]) -> None:
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    rows = [{"topic": topic, "score": s, "metrics": {"f": 1.0}} for topic, found in scores.items() for s in found]
    (folder / "samples" / f"update-{update:06d}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_rise_is_the_last_evaluation_minus_the_first(tmp_path):
    write_samples(tmp_path, 0, {"a": [0.0, 1.0], "b": [0.0, None]})
    write_samples(tmp_path, 50, {"a": [0.0, 0.0], "b": [0.0, 0.0]})
    write_samples(tmp_path, 100, {"a": [1.0, 1.0], "b": [1.0, 0.0], "c": [1.0]})
    assert rises_of(tmp_path) == {"a": 0.5, "b": 0.5}
    assert rises_of(tmp_path, "f") == {"a": 0.0, "b": 0.0}
    with pytest.raises(UserError, match="fewer than two evaluations"):
        rises_of(tmp_path / "other")


def test_rank_correlation_by_hand():
    """Ranks 1 2 3 4 5 and 1 3 2 5 4: rho = 1 - 6 (1 + 1 + 1 + 1) / (5 x 24) = 0.8. Ties get their mean rank."""
    x, y = np.array([[0.0, 0.1, 0.2, 0.3, 0.9]]), np.array([[1.0, 3.0, 2.0, 9.0, 8.0]])
    assert rank_correlation(x, y) == pytest.approx(0.8)
    assert rank_correlation(np.concatenate([x, x]), np.concatenate([y, -y])) == pytest.approx(0)
    assert np.isnan(rank_correlation(np.ones((1, 5)), y))
    # ranks 1.5 1.5 3 against 1 2 3: centred -0.5 -0.5 1 and -1 0 1, 1.5 / sqrt(1.5 x 2)
    assert rank_correlation(np.array([[1.0, 1, 2]]), np.array([[1.0, 2, 3]])) == pytest.approx(1.5 / 3**0.5)


def test_intervals_contain_the_value_and_are_reproducible():
    rng = np.random.default_rng(0)
    rises = [dict(zip(TOPICS, rng.random(5), strict=True)) for _ in range(3)]
    same = [{PREDICTION: rise, "opposite": {t: -v for t, v in rise.items()}} for rise in rises]
    found = correlations(TOPICS, same, rises)
    assert found[PREDICTION]["mean_over_seeds"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert [one["value"] for one in found["opposite"]["per_seed"]] == pytest.approx([-1.0] * 3)
    other = correlations(TOPICS, [{"x": rises[1]}, {"x": rises[2]}], rises[:2])
    assert other == correlations(TOPICS, [{"x": rises[1]}, {"x": rises[2]}], rises[:2])
    mean = other["x"]["mean_over_seeds"]
    assert mean["low"] <= mean["value"] <= mean["high"]


def test_command_prints_the_prediction_and_the_other_candidates(run_flags, tmp_path, capsys):
    rows = [{"prompt": f"What is number {i}?", "topic": TOPICS[i % 5]} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    function = "def odd(completion_ids, **_):\n    return [float(sum(ids) % 2) for ids in completion_ids]\n"
    (tmp_path / "scores.py").write_text(function)
    reward = ["--rm-model", "none", "--reward-func", f"{tmp_path / 'scores.py'}:odd", "--kl-schedule", "fixed"]
    data = ["--prompts", tmp_path / "rows.jsonl", "--split", "0/60/40", "--eval-prompts", 60, "--K", 2]
    train_grpo.main(run_flags(*reward, *data, "--seeds", 1, 2))
    runs = [str(tmp_path / f"run_seed{seed}") for seed in (1, 2)]
    with pytest.raises(UserError, match=r"the run has reward functions in files: .*Add --trust-reward-code"):
        main(runs)
    capsys.readouterr()
    main([*runs, "--trust-reward-code", "--samples", "4", "--prompts", "20", "--json", str(tmp_path / "found.json")])
    out = " ".join(capsys.readouterr().out.split())
    assert "Spearman's rank correlation with the rise, 5 topics" in out and "means over seeds" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted(found["topics"]) == sorted(TOPICS) and list(found["rises"]) == runs
    candidates = [PREDICTION, "score", "groups with a difference", "prompts in reach"]
    assert list(found["correlations"]) == candidates
    assert len(found["correlations"][PREDICTION]["per_seed"]) == 2


def test_too_few_topics_are_refused(tmp_path, monkeypatch):
    write_samples(tmp_path, 0, {"a": [0.0], "b": [0.0]})
    write_samples(tmp_path, 1, {"a": [0.0], "b": [0.0]})
    monkeypatch.setattr("benchmarks.scan_against_rise.predictions_of", lambda *_: {PREDICTION: {"a": 0.1, "b": 0.2}})
    with pytest.raises(UserError, match="only 2 topics in the scan and in the evaluations"):
        main([str(tmp_path)])

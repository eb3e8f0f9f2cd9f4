"""Tests of benchmarks/scan_against_rise.py: a correlation by hand, and a whole command."""

from __future__ import annotations

import json

import numpy as np
import pytest

import train_grpo
from benchmarks.scan_against_rise import PREDICTION, main, rank_correlation
from rlhf.utils.errors import UserError

TOPICS = ("a", "b", "c", "d", "e")


def test_rank_correlation_by_hand():
    """Ranks 1 2 3 4 5 and 1 3 2 5 4: rho = 1 - 6 (1 + 1 + 1 + 1) / (5 x 24) = 0.8. Ties get their mean rank:
    1.5 1.5 3 against 1 2 3, centred -0.5 -0.5 1 and -1 0 1, 1.5 / sqrt(1.5 x 2)."""
    x, y = np.array([[0.0, 0.1, 0.2, 0.3, 0.9]]), np.array([[1.0, 3.0, 2.0, 9.0, 8.0]])
    assert rank_correlation(x, y) == pytest.approx(0.8)
    assert rank_correlation(np.array([[1.0, 1, 2]]), np.array([[1.0, 2, 3]])) == pytest.approx(1.5 / 3**0.5)


def test_command_prints_the_prediction_and_the_other_candidates(run_flags, tmp_path):
    rows = [{"prompt": f"What is number {i}?", "topic": TOPICS[i % 5]} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    function = "def odd(completion_ids, **_):\n    return [float(sum(ids) % 2) for ids in completion_ids]\n"
    (tmp_path / "scores.py").write_text(function)
    reward = ["--rm-model", "none", "--reward-func", f"{tmp_path / 'scores.py'}:odd", "--kl-schedule", "fixed"]
    data = ["--prompts", tmp_path / "rows.jsonl", "--split", "0/60/40", "--eval-prompts", 60, "--K", 2]
    train_grpo.main(run_flags(*reward, *data))
    run = str(tmp_path / "run")
    with pytest.raises(UserError, match="Add --trust-reward-code"):
        main([run])
    main([run, "--trust-reward-code", "--samples", "4", "--prompts", "20", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted(found["topics"]) == sorted(TOPICS) and list(found["rises"]) == [run]
    candidates = [PREDICTION, "score", "groups with a difference", "prompts in reach"]
    assert list(found["correlations"]) == candidates
    last = [json.loads(line) for line in (tmp_path / "run" / "samples" / "update-000002.jsonl").open()]
    first = [json.loads(line) for line in (tmp_path / "run" / "samples" / "update-000000.jsonl").open()]
    means = [np.mean([row["score"] for row in rows if row["topic"] == "a"]) for rows in (first, last)]
    assert found["rises"][run]["a"] == pytest.approx(means[1] - means[0])

"""Tests the comparison of two checkouts' minutes to a result, and the times that it reads, without training."""

from __future__ import annotations

import json
from math import inf, isnan
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import minutes_to_result
from benchmarks.constants import TIMES
from benchmarks.minutes_to_result import ROWS, main, minutes_of
from benchmarks.real_smollm2 import times_of, with_times

# the evaluations of a run: update, seconds since the command, share of right answers
CURVE = ((0, 45, 0.1), (2, 165, 0.2), (4, 290, 0.6))


def write_run(folder: Path, sessions: list | None = None, save_every: int | None = 2) -> list[dict]:
    """Write a run folder of 4 updates of 40 seconds, evaluated and saved every 2. Returns its evaluations."""
    checkpoint = folder / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    seconds = {"updates": [40.0] * 4, "evaluations": [30.0, 35.0, 40.0], "checkpoints": [5.0]}
    (checkpoint / "training.json").write_text(json.dumps({"progress": {"seconds": seconds}}), encoding="utf-8")
    record = {"sessions": sessions, "settings": {"run": {"save_every": save_every}}}
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return [dict(zip(("update", "seconds", "accuracy"), point, strict=True)) for point in CURVE]


def facts_of(folder: Path) -> dict:
    return {"evaluations": with_times(write_run(folder), folder), "seconds": {"total": 300.0}}


def test_each_evaluation_has_the_times_of_the_run_until_it_ended(tmp_path):
    """The start took 15 of 45 seconds; the checkpoint after update 2 is written after its evaluation."""
    found = with_times(write_run(tmp_path), tmp_path)
    assert [[one[name] for name in TIMES] for one in found] == [
        [15.0, 30.0, 0.0, 0.0],
        [15.0, 65.0, 0.0, 80.0],
        [15.0, 105.0, 5.0, 160.0],
    ]


def test_checkpoints_that_the_clock_decided_have_no_known_update(tmp_path):
    found = with_times(write_run(tmp_path, save_every=None), tmp_path)
    assert [one["learning"] for one in found] == [0, 80, 160] and all("checkpoints" not in one for one in found)


@pytest.mark.parametrize("resumed", [True, False], ids=["resumed", "older"])
def test_times_that_are_not_recorded_are_not_invented(tmp_path, resumed):
    run = write_run(tmp_path, sessions=[{}] if resumed else None)
    if not resumed:  # a checkpoint without the seconds of the run
        (tmp_path / "checkpoint-4" / "training.json").write_text(json.dumps({"progress": {}}), encoding="utf-8")
    assert with_times(run, tmp_path) == run and times_of({}) == {}
    minutes = minutes_of({"evaluations": run, "seconds": {"total": 300.0}})
    assert minutes["until 40% are right"] == 227.5 / 60 and minutes["whole run"] == 5.0
    assert all(isnan(minutes[name]) for name in ROWS[2:])


def test_times_of_a_whole_run_are_sums_of_its_parts():
    time = {"imports": 2.0, "models and data": 3.0, "evaluation": 1.0, "evaluation/sampling": 20.0, "best/write": 4.0,
            "checkpoints/hash": 5.0, "final save/write": 6.0, "sampling": 30.0, "optimizer steps": 50.0,
            "other": 7.0}  # fmt: skip
    assert times_of(time) == {"start": 5.0, "measuring": 25.0, "checkpoints": 11.0, "learning": 80.0}


def test_minutes_until_40_percent_are_between_two_evaluations(tmp_path):
    """40% is half way between 20% after 165 s and 60% after 290 s: 227.5 s, with 2.5 of the 5 s of a checkpoint."""
    found = minutes_of(facts_of(tmp_path))
    seconds = dict(zip(ROWS, (227.5, 300, 160, 140, 15, 85, 2.5, 120), strict=True))
    assert found == {name: pytest.approx(value / 60) for name, value in seconds.items()}


def test_a_run_that_does_not_reach_40_percent_has_no_minutes(tmp_path):
    facts = facts_of(tmp_path)
    facts["evaluations"][-1]["accuracy"] = 0.39
    found = minutes_of(facts)
    assert found["until 40% are right"] == inf and found["whole run"] == 5.0


def test_pairs_alternate_their_order_and_finished_runs_are_not_repeated(tmp_path, monkeypatch, capsys):
    """The evaluations of the new checkout are half as late, and so are its updates."""
    started = []
    records = {}

    def train(words, log):
        seed = int(words[words.index("--seed") + 1])
        started.append((Path(words[0]).parent.name, log.parent.name, seed, "--bf16" in words))
        log.parent.mkdir(parents=True)
        (log.parent / "output").mkdir()
        (log.parent / "output" / "model.safetensors").write_bytes(b"weights")
        records[log.parent / "output"] = SimpleNamespace(status="finished")

    def facts_of_run(output, log):
        found = facts_of(output / "run")
        share = 0.5 if "new" in str(output.relative_to(tmp_path)) else 1.0
        for one in found["evaluations"]:
            one.update({name: share * one[name] for name in ("seconds", *TIMES)})
        return found

    monkeypatch.setattr(minutes_to_result, "train", train)
    monkeypatch.setattr(minutes_to_result, "facts_of_run", facts_of_run)
    monkeypatch.setattr(minutes_to_result.RunRecord, "read", lambda folder: records.get(folder))
    words = [str(tmp_path / "old"), str(tmp_path / "new"), "--work", str(tmp_path / "work")]
    main([*words, "--pairs", "1", "--", "--bf16"])
    (tmp_path / "work" / "new" / "2" / "output").mkdir(parents=True)  # of an interrupted run
    main([*words, "--pairs", "2", "--", "--bf16"])
    order = (("old", "1", 42), ("new", "1", 42), ("new", "2", 43), ("old", "2", 43))
    assert started == [(*run, True) for run in order]
    assert not list(tmp_path.rglob("*.safetensors"))
    lines = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    assert rows["until 40% are right"] == ["3.79; 3.79", "3.79", "1.90; 1.90", "1.90", "0.500; 0.500", "0.500"]
    assert rows["updates"] == ["2.67; 2.67", "2.67", "1.33; 1.33", "1.33", "0.500; 0.500", "0.500"]
    assert rows["whole run"] == ["5.00; 5.00", "5.00", "5.00; 5.00", "5.00", "1.000; 1.000", "1.000"]

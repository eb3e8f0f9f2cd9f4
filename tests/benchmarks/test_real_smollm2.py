"""Tests of benchmarks/real_smollm2.py without a model: what is trained or skipped, times, tables, and the split."""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

import rlhf.demo
from benchmarks import real_smollm2
from benchmarks.real_smollm2 import CONTROL, SESSION, facts_of_run, measure, sweep_of, train, trainings_of
from benchmarks.real_smollm2_probe import with_examples
from benchmarks.real_smollm2_report import above_control, draw, gain_table, split_gain, tables
from rlhf.checkpoints.run_record import flat_settings
from rlhf.config import make_config, parse_cli
from rlhf.data.chat_template import encode_prompt
from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt
from rlhf.data.tokenizer import load_tokenizer
from rlhf.settings.fields import to_dict
from rlhf.utils.errors import RunError, UserError
from tests.records import record_of

# --- commands --------------------------------------------------------------------------------------------------------


def test_runs_are_ordered_by_seed_and_the_control_is_grpo():
    found = trainings_of(["ppo", "grpo", "control"], [1, 2])
    assert [t.name for t in found] == ["ppo_1", "grpo_1", "control_1", "ppo_2", "grpo_2", "control_2"]
    assert [(t.algorithm, t.words) for t in found[:3]] == [("ppo", ()), ("grpo", ()), ("grpo", CONTROL)]


def test_a_sweep_has_one_valid_command_per_combination():
    found = sweep_of(["learning_rate=1e-5,2e-5", "ppo_epochs=1,2"], [42], 8)
    runs = [flat_settings(to_dict(parse_cli(["--recipe", "demo-checker", *t.words], t.algorithm))) for t in found]
    points = [(run["learning_rate"], run["ppo_epochs"]) for run in runs]
    assert points == [(1e-5, 1), (1e-5, 2), (2e-5, 1), (2e-5, 2)]
    assert {(run["num_iterations"], run["eval_every"]) for run in runs} == {(8, 8)}
    assert len({t.name for t in found}) == 4
    with pytest.raises(UserError, match="learning_rate"):
        sweep_of(["learning_rate"], [42], 8)


@pytest.mark.parametrize("status", [None, "running", "stopped", "finished"])
def test_a_run_is_started_resumed_or_only_read(tmp_path, monkeypatch, status):
    started = []
    monkeypatch.setattr(real_smollm2, "train", lambda words, log: started.append(words))
    monkeypatch.setattr(real_smollm2, "facts_of_run", lambda folder, log: {"folder": folder.name})
    (training,) = trainings_of(["rloo"], [7])
    if status is not None:
        folder = tmp_path / "runs" / "rloo_7"
        folder.mkdir(parents=True)
        record_of(make_config("demo-checker", "rloo"), status=status).write(folder)
    given = argparse.Namespace(recipe="r", runs=tmp_path / "runs", results=tmp_path / "results", more=["--x"])
    measure(training, given, lambda _: None)
    assert len(started) == (status != "finished")
    assert all(("--resume" in words) == (status is not None) for words in started)
    assert all("--x" in words and "train_rloo.py" in words[1] for words in started)
    file = tmp_path / "results" / "rloo_7.json"
    assert json.loads(file.read_text()) == {"name": "rloo_7", "kind": "rloo", "folder": "rloo_7"}
    started.clear()
    measure(training, given, lambda _: None)  # the JSON file is there now
    assert started == []


def test_a_failed_command_reports_its_last_output(tmp_path):
    log = tmp_path / "runs" / "x.log"
    with pytest.raises(RunError, match="no such thing"):
        train([sys.executable, "-c", "raise SystemExit('no such thing')"], log)
    assert log.read_text().count(SESSION) == 1


# --- the JSON file of a run ------------------------------------------------------------------------------------------

T0 = datetime(2026, 1, 1, tzinfo=UTC).timestamp()  # start of the second session, which made the first evaluation


def write_run(root: Path) -> tuple[Path, Path]:
    """Write a finished run with 4 questions of two topics, evaluated after updates 0 and 2, and its log."""
    folder, log = root / "grpo_42", root / "grpo_42.log"
    (folder / "samples").mkdir(parents=True)
    ended = datetime.fromtimestamp(T0 + 200, UTC).isoformat()
    record_of(make_config("demo-checker", "grpo"), ended=ended, figures={"kl_after": 3.0}, data={"start_model": "ab"},
              ).write(folder)  # fmt: skip
    for update, scores, at in ((0, [0, 0, 1, 0], 60), (2, [1, 0, 1, 1], 180)):
        rows = [{"score": float(s), "topic": topic} for s, topic in zip(scores, "aabb", strict=True)]
        file = folder / "samples" / f"update-{update:06d}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        os.utime(file, (T0 + at, T0 + at))
    names = ("score", "length", "eos_rate", "perplexity", "kl_divergence")
    first, last = ({f"eval/{n}": v for n in names} for v in (0.25, 0.75))
    times = [{"time/rollout_s": 10.0, "time/score_s": 1.0, "time/update_s": s, "loss": 0.0} for s in (4.0, 8.0)]
    rows = [{"update": 0, **first}, {"update": 1, **times[0]}, {"update": 2, **times[1]}, {"update": 2, **last}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with SummaryWriter(folder / "logs") as writer:
        writer.add_scalar("eval/score", 0.25, 0, walltime=T0 + 60)
        writer.add_scalar("eval/score", 0.75, 2, walltime=T0 + 180)
    sessions = [{"start": T0 + s, "busy_before_percent": b} for s, b in ((-500, 3.0), (0, 9.0))]
    log.write_text("".join(f"{SESSION}{json.dumps(s)}\nother output\n" for s in sessions))
    return folder, log


def test_figures_of_a_run_by_hand(tmp_path):
    found = facts_of_run(*write_run(tmp_path))
    assert [(e["update"], e["accuracy"]) for e in found["evaluations"]] == [(0, 0.25), (2, 0.75)]
    assert [e["seconds"] for e in found["evaluations"]] == pytest.approx([60, 180], abs=0.01)
    # updates of 15 and 19 s; the run ended 20 s after the last evaluation
    assert found["seconds"] == pytest.approx({"total": 200, "update_median": 17, "busy_before_percent": 9}, abs=0.01)
    a = found["accuracy"]
    assert (a["questions"], a["before"], a["after"], a["rise"]) == (4, 0.25, 0.75, 0.5)
    assert a["low"] < 0.5 < a["high"]
    assert found["topics"]["b"] == {"questions": 2, "before": 0.5, "after": 1.0}
    assert found["right"] == {"before": "0010", "after": "1011"}
    assert found["kl_per_sequence"] == 3.0 and found["start_model"]["weights_sha256"] == "ab"


def test_unfinished_run_has_no_figures(tmp_path):
    folder, log = write_run(tmp_path)
    record_of(make_config("demo-checker", "grpo"), status="stopped").write(folder)
    with pytest.raises(UserError, match="stopped"):
        facts_of_run(folder, log)


# --- tables and picture ----------------------------------------------------------------------------------------------


def result(kind: str, before: str, after: str, seed: int = 42) -> dict:
    """Return the content of a run's JSON file: one character per question."""
    was, now = (sum(map(int, text)) / len(text) for text in (before, after))
    evaluation = {"length": 20.0, "eos_rate": 0.5, "perplexity": 5.0, "kl": 0.0}
    interval = {"low": 0.1, "high": 0.6}
    return {
        "name": f"{kind}_{seed}", "kind": kind, "seed": seed, "kl_per_sequence": 4.0,
        "machine": {"processor": "A CPU", "cores": 2}, "settings": {"bf16": True},
        "seconds": {"total": 600.0, "update_median": 20.0, "busy_before_percent": None},
        "accuracy": {"questions": len(before), "before": was, "after": now, "rise": now - was, **interval},
        "evaluations": [
            {"update": 0, "seconds": 60.0, "accuracy": was, **evaluation},
            {"update": 24, "seconds": 540.0, "accuracy": now, **evaluation, "perplexity": 10.0},
        ],
        "topics": {"a": {"questions": len(before), "before": was, "after": now}},
        "right": {"before": before, "after": after},
    }  # fmt: skip


def cell(right: str, attempts: int = 1) -> dict:
    return {"tokens": 24, "attempts": attempts, "accuracy": 0.5, "low": 0.4, "high": 0.6, f"pass_at_{attempts}": 0.9,
            "length": 20.0, "cut_off": 0.25, "right": right}  # fmt: skip


def probe(sampled: str, greedy: str, sampled_long: str, greedy_long: str) -> dict:
    rights = {"greedy": greedy, "sampled_long": sampled_long, "greedy_long": greedy_long}
    cells = {"sampled": cell(sampled, 8), **{name: cell(right) for name, right in rights.items()}}
    return {"questions": len(greedy), "seed": 42, "cells": cells}


START = probe("0080", "0010", "0110", "0111")  # sampled: 8 attempts, so 8 is always right
TRAINED = probe("8888", "0111", "1111", "1111")


def test_the_split_of_a_gain_by_hand():
    """Sampled: 1/4 -> 2/4 with 128 tokens -> 3/4 greedy with 128 tokens -> 4/4. Greedy: 1/4 -> 3/4 -> 3/4."""
    assert [part.mean() for part in split_gain(START, TRAINED, greedy=False)] == [0.75, 0.25, 0.25, 0.25]
    assert [part.mean() for part in split_gain(START, TRAINED, greedy=True)] == [0.5, 0.5, 0.0, 0.0]
    for greedy in (False, True):
        gain, *parts = split_gain(START, TRAINED, greedy)
        assert np.array_equal(gain, sum(parts))
    rows = gain_table(START, {"grpo_42": TRAINED}).splitlines()
    assert [row.count("33% of the gain") for row in rows if row.startswith("| grpo_42")] == [3, 0]


def test_rise_above_the_control_is_paired_by_question_and_seed():
    run, control = result("grpo", "0000", "1110"), result("control", "0000", "1000")
    other = result("control", "0000", "1111", seed=7)
    assert above_control(run, [run, control, other]).value == 0.5
    assert above_control(run, [run, other]) is None
    assert above_control(control, [run, control]) is None


def test_tables_and_picture_of_given_files(tmp_path):
    runs = [result("control", "0000", "1000"), result("grpo", "0000", "1110"), result("grpo", "0000", "1111", 7)]
    sweep = {**result("grpo", "0000", "0011"), "kind": "sweep", "name": "sweep_learning_rate=1e-5_8_42"}
    files = {run["name"]: run for run in [*runs, sweep]} | {"probe_start": START, "probe_grpo_42": TRAINED}
    for name, facts in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))
    cells = [[c.strip() for c in row.strip("|").split("|")] for row in tables(tmp_path).splitlines() if row[:1] == "|"]
    rows = [row for row in cells if row[0] == "GRPO"]
    first = next(row for row in rows if row[1] == "42")
    assert first[2:5] == ["0.0", "75.0", "+75.0 (+10.0 to +60.0)"] and first[5].startswith("+50.0 (")
    assert first[-1] == "2.00"  # perplexity 5 -> 10
    minutes = next(row for row in rows if "min" in row[2] and row[1] == "42")
    assert minutes[2:6] == ["1.0 min: 0.0%", "9.0 min: 75.0%", "10.0", "20.0"]
    assert minutes[-2:] == ["bfloat16", "A CPU, 2 cores"]
    assert ["a", "4", "0.0", "87.5", "25.0"] in cells  # topic: start model, GRPO (mean of two seeds), control
    assert any("learning_rate=1e-5" in row[0] and row[2] == "50.0" for row in cells)
    assert ["grpo_42", "sampled", "24", "50.0 (40.0 to 60.0)", "90.0 (k = 8)", "20.0", "25.0"] in cells
    picture = tmp_path / "x.png"
    draw(tmp_path, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="no JSON files"):
        tables(tmp_path / "empty")


# --- the probe -------------------------------------------------------------------------------------------------------


def test_worked_examples_are_earlier_turns_of_different_topics():
    tokenizer = load_tokenizer(str(Path(rlhf.demo.__path__[0]) / "checker_weights"))

    def row(text: str, topic: str, answer: int) -> Prompt:
        return Prompt((), Example(({"role": "user", "content": text},), topic=topic, columns={"answer": answer}))

    training = [row(f"Reverse: {c}.", topic, i) for i, (c, topic) in enumerate(zip("abcdefg", "xxyyzwv", strict=True))]
    (question,) = with_examples([row("Reverse: q.", "x", 9)], training, tokenizer)
    turns = [(m["role"], m["content"]) for m in question.example.messages]
    shots = [("Reverse: a.", "0"), ("Reverse: c.", "2"), ("Reverse: e.", "4"), ("Reverse: f.", "5")]
    assert turns == [*(t for q, a in shots for t in (("user", q), ("assistant", a))), ("user", "Reverse: q.")]
    assert question.ids == tuple(encode_prompt(tokenizer, question.example.messages))

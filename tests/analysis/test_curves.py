"""Tests reading the scalars of runs (resumed, running, corrupted) and the CSV table against the values written."""

from __future__ import annotations

import csv
import json
import math
import shutil
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from plot_training_progress import main
from rlhf.analysis.curves import read_curves, read_runs, read_scalars, running_mean, seeds_band, write_table
from rlhf.callbacks.logging import TensorBoardLog
from rlhf.checkpoints import run_log
from rlhf.checkpoints.run_folder import RunLock
from rlhf.checkpoints.run_log import RunLog
from rlhf.config import make_config
from rlhf.settings.types import KLTarget
from rlhf.utils.errors import UserError
from tests.records import facts_of, record_of


def write_events(logs: Path, name: str, opened: float, points, damaged_at: int | None = None) -> Path:
    """Writes an event file with chosen wall times. `points` are (second, tag, update, value)."""
    logs.mkdir(parents=True, exist_ok=True)
    file = logs / f"events.out.tfevents.{name}"
    with file.open("wb") as opened_file:
        writer = RecordWriter(opened_file)
        writer.write(Event(wall_time=opened, file_version="brain.Event:2").SerializeToString())
        for number, (second, tag, update, value) in enumerate(points):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            if number == damaged_at:
                start = opened_file.tell()
            writer.write(Event(wall_time=second, step=update, summary=summary).SerializeToString())
    if damaged_at is not None:
        data = bytearray(file.read_bytes())
        data[start + 14] ^= 0xFF  # inside the record's data
        file.write_bytes(data)
    return file


def make_run(folder: Path, algorithm="ppo", seed=42, updates=20, status="finished", recipe="demo", **settings) -> Path:
    """Writes a run folder without logs. An update of the demo recipe is 64 episodes."""
    folder.mkdir(parents=True)
    config = make_config(recipe, algorithm, seed=seed, **settings)
    record_of(config, updates, status=status).write(folder)
    return folder


def at_update(done: int) -> SimpleNamespace:
    """Return a trainer that has done some updates, for TensorBoardLog."""
    return SimpleNamespace(host=SimpleNamespace(state=SimpleNamespace(global_step=done)))


def losses(start: int, values, opened: float, pace: float = 1.0):
    return [(opened + pace * (i + 1), "loss", start + i, value) for i, value in enumerate(values)]


def pairs(curve) -> list[tuple[int, float]]:
    return list(zip(curve.updates.tolist(), curve.values.tolist(), strict=True))


def as_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


# reading


def test_scalars_of_the_training_writer_are_read(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for update in range(1, 4):
            writer.add_scalar("loss", 0.1 * update, update)
            writer.add_scalar("kl_divergence/token", update, update)
        writer.add_text("note", "no scalar", 3)
    scalars, remarks = read_scalars(tmp_path)
    assert pairs(scalars["loss"]) == [(u, as_float32(0.1 * u)) for u in (1, 2, 3)]
    assert sorted(scalars) == ["kl_divergence/token", "loss"] and remarks == []


def test_more_than_10_000_points_are_all_read(tmp_path):
    write_events(tmp_path, "1", 0, losses(1, range(12_345), 0))
    assert pairs(read_scalars(tmp_path)[0]["loss"]) == [(u, u - 1) for u in range(1, 12_346)]


def test_resumed_session_overwrites_later_updates_per_tag(tmp_path):
    """Session 1 reached update 6. Session 2 resumed from the checkpoint of update 3 and has reached update 5."""
    first = [*losses(1, [1, 2, 3, 4, 5, 6], 100), (107, "eval/score", 2, 0.5)]
    write_events(tmp_path, "100.a", 100, first)
    write_events(tmp_path, "500.b", 500, losses(4, [40, 50], 500))
    scalars, _ = read_scalars(tmp_path)
    assert pairs(scalars["loss"]) == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50)], (
        "update 6 belongs to session 1 only and is discarded"
    )
    assert pairs(scalars["eval/score"]) == [(2, 0.5)]


def test_repeated_updates_within_one_file_are_overwritten(tmp_path):
    write_events(tmp_path, "1", 0, [*losses(1, [1, 2, 3], 0), *losses(2, [22], 10)])
    assert pairs(read_scalars(tmp_path)[0]["loss"]) == [(1, 1), (2, 22)]


def test_purge_step_drops_all_tags_from_that_update(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for update in range(1, 7):
            writer.add_scalar("loss", update, update)
        writer.add_scalar("eval/score", 0.5, 3)
        writer.add_scalar("eval/score", 0.9, 6)
    with SummaryWriter(str(tmp_path), purge_step=4) as writer:
        writer.add_scalar("loss", 40, 4)
    scalars, _ = read_scalars(tmp_path)
    assert pairs(scalars["loss"]) == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert pairs(scalars["eval/score"]) == [(3, 0.5)]


def test_seconds_are_those_of_training_in_all_sessions(tmp_path, monkeypatch):
    """An update takes ten seconds. The clock jumps during session 1. Session 2 starts a day later, from update 2."""
    passed = [1000.0]
    clock = [0.0]
    monkeypatch.setattr(run_log.time, "monotonic", lambda: passed[0])
    monkeypatch.setattr(time, "time", lambda: clock[0])

    def session(log: RunLog, updates) -> None:
        writer = TensorBoardLog(tmp_path / "logs", log.training_time)
        writer.on_train_begin(at_update(updates[0] - 1))
        for update in updates:
            passed[0], clock[0] = passed[0] + 10, clock[0] + (10 if update % 2 else -3600)
            writer.on_update_end(update, {"loss": float(update)})
        writer.close()

    with RunLog(tmp_path, **facts_of()) as log:
        session(log, range(1, 5))
        at_update_2 = 20.0
    passed[0], clock[0] = 5.0, 86_400.0  # another process
    with RunLog(tmp_path, resume=True) as log:
        log.seconds_before = at_update_2
        session(log, range(3, 6))
        assert log.seconds() == 50
    loss = read_scalars(tmp_path / "logs")[0]["loss"]
    assert pairs(loss) == [(u, u) for u in range(1, 6)]
    assert loss.seconds.tolist() == pytest.approx([0, 10, 20, 30, 40])


# incomplete and damaged files


@pytest.mark.parametrize("left", [1, 8, 11, 20, -1])
def test_incomplete_file_is_read_up_to_its_last_complete_record(tmp_path, left):
    """The third record has only `left` bytes: part or all of its length, part of a checksum or of the data."""
    two = write_events(tmp_path, "1", 0, losses(1, [1, 2], 0)).stat().st_size
    file = write_events(tmp_path, "1", 0, losses(1, [1, 2, 3], 0))
    file.write_bytes(file.read_bytes()[: two + left if left > 0 else left])
    scalars, [remark] = read_scalars(tmp_path)
    assert pairs(scalars["loss"]) == [(1, 1), (2, 2)]
    assert remark.startswith(f"{file}: the last {file.stat().st_size - two} bytes")


def test_data_after_a_damaged_record_is_reported(tmp_path):
    two = write_events(tmp_path, "1", 0, losses(1, [1, 2], 0)).stat().st_size
    file = write_events(tmp_path, "1", 0, losses(1, [1, 2, 3, 4, 5], 0), damaged_at=2)
    scalars, [remark] = read_scalars(tmp_path)
    assert pairs(scalars["loss"]) == [(1, 1), (2, 2)]
    assert remark.startswith(f"{file}: the last {file.stat().st_size - two} bytes")


def test_trailing_zeros_after_a_power_cut_are_reported_as_damage(tmp_path):
    file = write_events(tmp_path, "1", 0, losses(1, [1], 0))
    file.write_bytes(file.read_bytes() + bytes(512))
    assert "512 bytes" in read_scalars(tmp_path)[1][0]


def test_session_resumed_after_an_incomplete_file_is_read(tmp_path):
    file = write_events(tmp_path, "1", 0, losses(1, [1, 2, 3], 0))
    file.write_bytes(file.read_bytes()[:-3])
    write_events(tmp_path, "2", 50, losses(3, [30], 50))
    scalars, remarks = read_scalars(tmp_path)
    assert pairs(scalars["loss"]) == [(1, 1), (2, 2), (3, 30)] and len(remarks) == 1


# runs


@pytest.mark.parametrize(
    ("status", "hint"), [("running", "Try again"), ("failed", "This run logged nothing: choose another run")]
)
def test_run_without_logs_is_a_one_line_error(tmp_path, status, hint):
    run = make_run(tmp_path / "run", status=status)
    lock = RunLock(run) if status == "running" else None  # without it, the run was killed
    for prepare in (lambda: None, (run / "logs").mkdir, lambda: write_events(run / "logs", "1", 0, [])):
        prepare()
        with pytest.raises(UserError) as caught:
            read_curves(run)
        assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"no scalars yet: {run / 'logs'}. {hint}")
    if lock is not None:
        lock.close()


def test_a_run_that_was_copied_without_its_logs_has_logged_something(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"update": 1, "loss": 0.5}\n')
    with pytest.raises(UserError) as caught:
        read_curves(run)
    (problem,) = caught.value.problems
    assert "logged nothing" not in problem.fix and "event files" in problem.fix


def test_error_reports_the_unreadable_event_file(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    (run / "logs" / "events.out.tfevents.1").write_bytes(b"no event file at all, but long enough for one")
    with pytest.raises(UserError, match=r"no scalars yet: .*events.out.tfevents.1: .*45 bytes"):
        read_curves(run)


def test_error_lists_every_unreadable_run(tmp_path):
    good = make_run(tmp_path / "good")
    empty = make_run(tmp_path / "empty")
    write_events(good / "logs", "1", 0, losses(1, [1.0], 0))
    with pytest.raises(UserError) as caught:
        read_runs([good, empty, tmp_path / "nowhere", tmp_path / "empty" / ".." / "good"])
    starts = ["no scalars yet: ", "folder not found: ", "the same run is given twice: "]
    assert [
        problem[: len(start)] for problem, start in zip(map(str, caught.value.problems), starts, strict=True)
    ] == starts
    assert str(empty) in str(caught.value.problems[0]) and "nowhere" in str(caught.value.problems[1])


def test_a_copy_of_a_run_is_not_a_second_run(tmp_path, user_error):
    run = make_run(tmp_path / "run")
    write_events(run / "logs", "1", 0, losses(1, [1.0], 0))
    shutil.copytree(run, tmp_path / "copy")
    with user_error("the same run", "copy"):
        read_runs([run, tmp_path / "copy"])


def test_run_json_without_a_plan_is_a_one_line_error(tmp_path):
    run = make_run(tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    del facts["plan"]
    (run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="run.json is incomplete or corrupted, 'plan' is missing or invalid: "):
        read_curves(run)


def test_non_finite_values_are_counted_in_one_remark(tmp_path):
    run = make_run(tmp_path / "run")
    rest = [(9, "rewards/mean", 1, math.inf), (9, "rewards/mean", 2, 1.0), (9, "learning_rate", 1, 1e-4)]
    write_events(run / "logs", "1", 0, [*losses(1, [1, math.nan, 3, math.nan], 0), *rest])
    [remark] = read_curves(run).remarks
    assert remark == (f"{run}: values that are not finite (loss 2 of 4, rewards/mean 1 of 2) are gaps in the plot")


def test_kl_targets_are_read_from_the_run(tmp_path):
    def read(name, **settings):
        run = make_run(tmp_path / name, **settings)
        write_events(run / "logs", "1", 0, losses(1, [1.0], 0))
        return read_curves(run)

    adaptive = read("adaptive")
    assert adaptive.aim == ((KLTarget(3.0, "sequence"),), False)
    phased = read("phased", kl_schedule="phased", kl_target="0.05/token 0.02/token".split(), updates=10)
    assert phased.aim == ((KLTarget(0.05, "token"), KLTarget(0.02, "token")), False)
    assert [str(phased.targets.target_of(u)) for u in (5, 6)] == ["0.05/token", "0.02/token"]
    (tmp_path / "fixed.yaml").write_text("kind: recipe\nkl_schedule: fixed\nkl_target: 2/sequence\n")
    assert read("named", recipe=str(tmp_path / "fixed.yaml")).aim == ((KLTarget(2.0, "sequence"),), True)
    assert read("fixed", kl_schedule="fixed", recipe="smollm2-orca", kl_target=None).aim is None


# figures


def test_running_mean_matches_hand_computed_values():
    # a window of 3 updates: 1, (1+2)/2, (1+2+6)/3. Update 4 is missing, so the window of update 5 has updates 3 and 5
    updates = np.array([1, 2, 3, 5])
    values = np.array([1.0, 2.0, 6.0, 4.0])
    assert running_mean(updates, values, 3).tolist() == [1, 1.5, 3, 5]
    assert running_mean(updates, values, 1).tolist() == values.tolist()


def test_running_mean_skips_non_finite_values_and_is_exact_after_a_spike():
    updates = np.arange(1, 7)
    values = np.array([1.0, np.nan, 3.0, 1e20, 5.0, 7.0])
    found = running_mean(updates, values, 2)
    assert math.isnan(found[1]) and found[[0, 2, 5]].tolist() == [1, 3, 6]


def test_seeds_band_matches_hand_computed_values():
    """One run has updates 1 to 4, the other 2, 4 and 6. The band covers 2 to 4; the value at 3 is interpolated."""
    places = [np.array([1, 2, 3, 4]), np.array([2, 4, 6])]
    lines = [np.array([0.0, 1.0, 2.0, 3.0]), np.array([3.0, 5.0, 9.0])]
    x, low, mean, high = seeds_band(places, lines)
    assert x.tolist() == [2, 3, 4] and low.tolist() == [1, 2, 3]
    assert mean.tolist() == [2, 3, 4] and high.tolist() == [3, 4, 5]


def test_seeds_band_has_a_gap_if_one_run_has_no_value():
    x, *_, mean, _ = seeds_band([np.arange(3)] * 2, [np.array([1.0, np.nan, 3.0]), np.ones(3)])
    assert x.tolist() == [0, 1, 2] and mean[[0, 2]].tolist() == [1, 2] and math.isnan(mean[1])


# the table


def test_table_contains_exactly_the_logged_values(tmp_path):
    """Two runs written with the training's writer: the table has every scalar with its value and nothing else."""
    rng = np.random.default_rng(0)
    logged = {}
    for algorithm, tags in (("ppo", ("loss", "value/loss")), ("grpo", ("loss", "eval/score"))):
        run = make_run(tmp_path / algorithm, algorithm, seed=7)
        with SummaryWriter(str(run / "logs")) as writer:
            for tag in tags:
                for update in range(0 if tag.startswith("eval") else 1, 20, 5 if tag.startswith("eval") else 1):
                    value = float(rng.standard_normal() * 10.0 ** rng.integers(-12, 12))
                    writer.add_scalar(tag, value, update)
                    logged[str(run), update, tag] = as_float32(value)
            writer.add_scalar("loss", math.nan, 20)
            writer.add_scalar("learning_rate", -math.inf, 20)
    groups = {tmp_path / "ppo": "PPO", tmp_path / "grpo": "GRPO"}
    rows = write_table(read_runs(list(groups)), tmp_path / "t.csv", groups)
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    tags = ["eval/score", "learning_rate", "loss", "value/loss"]
    assert list(table[0]) == ["run", "algorithm", "seed", "update", "episodes", "seconds", "group", *tags]
    assert rows == len(table) == 20 + 21
    found = {(r["run"], int(r["update"]), tag): r[tag] for r in table for tag in tags if r[tag]}
    special = [found.pop((str(tmp_path / a), 20, tag)) for a in ("ppo", "grpo") for tag in ("loss", "learning_rate")]
    assert special == ["nan", "-inf"] * 2
    assert {key: float(text) for key, text in found.items()} == logged
    last = table[-1]
    assert (last["algorithm"], last["seed"], last["update"], last["episodes"]) == ("grpo", "7", "20", "1280")
    assert {row["group"] for row in table} == {"PPO", "GRPO"}


def test_table_seconds_exclude_the_evaluation_after_the_update(tmp_path):
    run = make_run(tmp_path / "run")
    points = [(100, "eval/score", 0, 0.0), (110, "loss", 1, 1.0), (117.25, "eval/score", 1, 0.5)]
    write_events(run / "logs", "1", 90, points)
    write_table([read_curves(run)], tmp_path / "t.csv", {run: "PPO"})
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        assert [(r["update"], r["seconds"]) for r in csv.DictReader(file)] == [("0", "0.000"), ("1", "10.000")]


# the script


def test_script_reports_a_run_without_scalars(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no scalars yet: run"):
        main([])
    assert sorted(tmp_path.iterdir()) == [run], "no partial output"


@pytest.mark.parametrize("output", ["nowhere/plot", "taken"])
def test_script_checks_the_output_before_it_reads_runs(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.csv").mkdir()
    with pytest.raises(UserError, match=r"(no such folder|cannot write the files): --output"):
        main([str(tmp_path / "no run"), "--output", output])


def test_script_without_a_run_in_the_current_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run in the current folder"):
        main([])


def test_reading_many_points_is_fast(tmp_path):
    write_events(tmp_path, "1", 0, losses(1, range(30_000), 0))
    started = time.process_time()
    read_scalars(tmp_path)
    assert time.process_time() - started < 10, "CPU seconds; usually about 0.4"

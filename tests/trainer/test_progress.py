"""Tests of the seconds of a run's parts: measured, predicted, in the progress line and the summary, and resumed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import train_ppo
from rlhf.callbacks.logging import ProgressLine
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.progress import Progress, evaluation_updates, parts_text
from rlhf.trainer.state import STATE_FILE
from rlhf.utils.console import Screen

RUN = SimpleNamespace(eval_every=4, save_every=5)  # of 10 updates: evaluations after 0, 4, 8, 10; checkpoints 5, 10
SECONDS = {"start": [7.0], "updates": [2.0], "evaluations": [10.0], "checkpoints": [100.0]}


@pytest.mark.parametrize(
    ("update", "updates", "evaluations", "checkpoints"),
    [
        (1, 18, 30, 200),
        (3, 14, 30, 200),
        (4, 12, 30, 200),  # its evaluation follows
        (5, 10, 20, 200),  # its checkpoint follows
        (8, 4, 20, 100),
        (9, 2, 10, 100),
        (10, 0, 10, 100),
    ],
)
def test_what_remains_after_an_update(update, updates, evaluations, checkpoints):
    found = Progress(seconds=SECONDS).left(RUN, 10, update)
    assert found == {"start": 0, "updates": updates, "evaluations": evaluations, "checkpoints": checkpoints}


@pytest.mark.parametrize(
    ("update", "seconds", "checkpoints"),
    [(1, 2, 1), (1, 200, 5), (2, 200, 5), (3, 200, 4), (10, 200, 1), (1, 400, 10)],
)
def test_checkpoints_by_time_follow_from_the_seconds_of_an_update(update, seconds, checkpoints):
    """Updates of 200 s: a checkpoint follows each second one, because 300 s have passed. The last one is saved."""
    run = SimpleNamespace(eval_every=4, save_every=None)
    found = Progress(seconds={**SECONDS, "updates": [seconds]}).left(run, 10, update)
    assert found["checkpoints"] == 100 * checkpoints


@pytest.mark.parametrize(
    ("every", "updates", "expected"),
    [
        (None, 24, [0, 6, 12, 18, 24]),
        (None, 10, [0, 3, 5, 8, 10]),
        (None, 2, [0, 1, 2]),
        (None, 1, [0, 1]),
        (6, 24, [0, 6, 12, 18, 24]),
        (4, 10, [0, 4, 8, 10]),
        (50, 10, [0, 10]),
    ],
)
def test_evaluations_are_due_at_the_quarters_of_a_run_or_every_few_updates(every, updates, expected):
    run = SimpleNamespace(eval_every=every, save_every=5)
    assert evaluation_updates(run, updates) == expected
    progress = Progress(seconds={"evaluations": [1.0]})
    for update in range(updates + 1):
        assert progress.left(run, updates, update) == {"evaluations": sum(due >= update for due in expected)}


@pytest.mark.parametrize(("stopped", "evaluated"), [(None, [0, 2, 4, 6, 8]), (3, [0, 2, 3])])
def test_a_run_is_evaluated_at_its_quarters_and_at_its_end(build, stopped, evaluated):
    """Also if a callback ends it."""
    trainer = build("--num-iterations", 8, "--eval-every", "none")

    class Stops:
        def on_update_done(self, update):
            if update == stopped:
                trainer.request_stop()

    trainer.add_callback(Stops())
    trainer.train()
    assert [evaluation.update for evaluation in trainer.evaluations] == evaluated


def test_a_run_that_begins_has_one_more_evaluation():
    assert Progress(seconds={"updates": [2.0], "evaluations": [10.0]}).left(RUN, 10, 0) == {
        "updates": 20,
        "evaluations": 40,
    }


def test_the_latest_ten_decide_by_their_median():
    """The first update compiles and fills caches, and one update waits for another program."""
    progress = Progress(seconds={"updates": [90.0, 1.0, *[3.0] * 4, *[2.0] * 5, 50.0]})
    assert progress.left(RUN, 10, 9) == {"updates": 2.5}


def test_parts_are_listed_after_their_sum():
    assert parts_text({"start": 4.4, "updates": 65}) == "1:09 (start 4 s, updates 1:05)"


# --- in runs ---------------------------------------------------------------------------------------------------------


def test_the_line_has_the_whole_time_that_is_left(build, capsys):
    """3 updates of 2 seconds, evaluations after 4, 6 and 7 of 10 seconds, checkpoints after 5 and 7 of 100 seconds."""
    trainer = build("--num-iterations", 7, "--eval-every", 2, "--save-every", 5)
    metrics = trainer.update_step(1)
    trainer.progress.seconds = {part: [*each] for part, each in SECONDS.items()}
    ProgressLine(trainer, Screen()).on_update_end(4, metrics)
    assert capsys.readouterr().out.splitlines()[-1].endswith("| 3:56 left")


def test_the_first_updates_predict_the_run(build, capsys):
    trainer = build("--num-iterations", 8, "--eval-every", 4)
    metrics = trainer.update_step(1)
    trainer.progress.seconds = {"start": [7.0], "updates": [9.0, 2.0, 2.0], "evaluations": [11.0]}
    line = ProgressLine(trainer, Screen())
    line.on_update_end(2, metrics)
    assert trainer.progress.predicted == {}
    line.on_update_end(3, metrics)
    ((when, parts),) = trainer.progress.predicted.items()
    assert "after update 3 of 8" in when
    assert parts == {"start": 7, "updates": 13 + 5 * 2, "evaluations": 11 + 2 * 11}
    assert "1:03 (start 7 s, updates 23 s, evaluations 33 s)" in capsys.readouterr().out


def test_the_loop_measures_its_parts(build):
    trainer = build("--num-iterations", 3, "--eval-every", 2)
    trainer.train()
    logged = [
        sum(v for name, v in entry.items() if name.startswith("time/")) for entry in trainer.host.state.log_history
    ]
    seconds = trainer.progress.seconds
    assert {part: len(each) for part, each in seconds.items()} == {"evaluations": 3, "updates": 3}
    assert all(passed >= parts for passed, parts in zip(seconds["updates"], filter(None, logged), strict=True))


class Killed(BaseException):
    """Stands for a signal that a process cannot catch."""


def times_of(printed: str) -> dict[str, str]:
    """Return the rows of the summary that have times."""
    rows = [line.split("  ") for line in printed.partition("before -> after")[2].splitlines()]
    return {row[1]: row[-1].strip() for row in rows if len(row) > 1 and row[1].startswith(("time", "predicted "))}


def test_the_summary_of_a_resumed_run_compares_its_predictions_with_the_whole_run(
    run_flags, tmp_path, monkeypatch, capsys
):
    """It was killed in update 5 of 6, after the checkpoint of update 4. The resumed session predicts nothing anew."""
    flags = run_flags("--num-iterations", 6, "--eval-every", 2, "--save-every", 2)
    original = OnPolicyLoop.update_step

    def update_step(self, update):
        if update == 5:
            raise Killed
        return original(self, update)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(OnPolicyLoop, "update_step", update_step)
        train_ppo.main(flags)
    file = tmp_path / "run" / "checkpoint-4" / STATE_FILE
    stored = json.loads(file.read_text())["progress"]
    counts = {part: len(each) for part, each in stored["seconds"].items()}
    assert counts == {"start": 1, "evaluations": 3, "updates": 4, "checkpoints": 1}, "not that of its own checkpoint"
    first, third = stored["predicted"]
    assert "update 1 of 6" in first and "update 3 of 6" in third
    capsys.readouterr()

    trainers = []
    with monkeypatch.context() as patch:
        patch.setattr(OnPolicyLoop, "update_step", lambda self, n: trainers.append(self) or original(self, n))
        train_ppo.main(["--resume", "--output", str(tmp_path / "run")])
    progress = trainers[0].progress
    assert progress.predicted == stored["predicted"]
    assert {part: each[: counts[part]] for part, each in progress.seconds.items()} == stored["seconds"]
    assert {part: len(each) for part, each in progress.seconds.items()} == {
        "start": 1,
        "evaluations": 4,
        "updates": 6,
        "checkpoints": 2,
    }
    times = times_of(capsys.readouterr().out)
    spent = {"time": {part: sum(each) for part, each in progress.seconds.items()}}
    assert times == {name: parts_text(parts) for name, parts in (progress.predicted | spent).items()}

"""Tests metrics.jsonl: a line per update and evaluation with the TensorBoard tags, cut back when a run is resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

from rlhf.callbacks.metrics_file import MetricsFile
from rlhf.checkpoints.run_folder import METRICS_LOG
from rlhf.trainer.progress import Progress
from tests.conftest import attach
from tests.documents import python_block
from tests.kills import scalars


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def begin(file: Path, update: int) -> MetricsFile:
    """Return the callback of a run that starts, or resumes after this update."""
    callback = MetricsFile(file)
    progress = Progress(skipped=2)
    callback.on_train_begin(
        SimpleNamespace(host=SimpleNamespace(state=SimpleNamespace(global_step=update)), progress=progress)
    )
    return callback


def test_a_line_per_update_and_evaluation_has_the_values_of_tensorboard(build):
    trainer = build("--num-iterations", 3, "--eval-every", 2)
    with attach(trainer):
        trainer.train()
    output = Path(trainer.config.run.output)
    rows = lines(output / METRICS_LOG)
    assert [(row["update"], "eval/score" in row) for row in rows] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (3, True),
    ]  # fmt: skip
    for tag, points in scalars(output / "logs").items():
        here = [(row["update"], row[tag]) for row in rows if tag in row]
        assert [update for update, _ in here] == [update for update, _ in points], tag
        assert all(math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(here, points, strict=True)), tag
    assert (
        rows[1]["kl_divergence/target"] == 6.0
        and {"rewards/mean", "policy/entropy", "learning_rate"} <= rows[1].keys()
    )


def test_a_resumed_run_cuts_the_file_back_to_its_checkpoint(tmp_path):
    file = tmp_path / METRICS_LOG
    first = begin(file, 0)
    for update in range(1, 5):
        first.on_update_end(update, {"loss": update / 4})
    first.opened.write('{"update": 5, "lo')  # the process is killed in a write
    first.opened.close()
    resumed = begin(file, 2)
    assert lines(file) == [{"update": 1, "loss": 0.25}, {"update": 2, "loss": 0.5}]
    resumed.on_update_end(3, {"loss": 0.75})
    resumed.on_train_end()
    assert [row["update"] for row in lines(file)] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [file], "no temporary file is left"


def test_a_run_that_starts_again_has_an_empty_file(tmp_path):
    file = tmp_path / METRICS_LOG
    file.write_text('{"update": 0, "eval/score": 1.0}\n')
    begin(file, 0)
    assert file.read_text() == ""


def test_a_skipped_update_has_its_reason_and_numbers_that_are_not_finite_are_null(tmp_path):
    callback = begin(tmp_path / METRICS_LOG, 0)
    callback.on_update_skipped(1, None, None, ValueError("the loss is nan"))
    callback.on_update_end(2, {"loss": math.nan})
    assert lines(tmp_path / METRICS_LOG) == [
        {"update": 1, "updates/skipped": 2.0, "skipped": "the loss is nan"},
        {"update": 2, "loss": None},
    ]


def test_the_code_of_the_page_reads_the_file(tmp_path, monkeypatch):
    (tmp_path / "ppo_training_output").mkdir()
    callback = begin(tmp_path / "ppo_training_output" / METRICS_LOG, 0)
    callback.write(0, {"eval/score": 0.5})
    callback.write(1, {"loss": 0.25})
    monkeypatch.chdir(tmp_path)
    made: dict = {}
    exec(python_block("metrics.jsonl"), made)
    assert made["scores"] == [(0, 0.5)]

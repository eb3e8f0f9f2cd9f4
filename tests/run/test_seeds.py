"""Tests of --seeds: the folders of the runs, which runs are skipped or refused, and the table of results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest

from rlhf.algorithms.kl_control import with_horizon
from rlhf.checkpoints.run_log import RunLog
from rlhf.config import parse_cli
from rlhf.run.seeds import for_each_seed, show_seeds
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from tests.records import facts_of


@pytest.fixture
def train_seeds(tmp_path, capsys):
    """Returns a function that runs the seeds of the flags and returns those that were trained. Each run writes only a
    finished run.json."""

    def run_seeds(*flags, fail_at=None):
        trained = []

        def train(config, screen):
            if config.run.seed == fail_at:
                raise UserError("test error")
            trained.append((config.run.seed, Path(config.run.output).name))
            Path(config.run.output).mkdir(parents=True, exist_ok=True)
            with RunLog(Path(config.run.output), **facts_of(with_horizon(config, 2))) as log:
                log.add(figures={"score_after": float(config.run.seed), "seconds": 60.0})

        config = parse_cli(["--output", str(tmp_path / "out"), *map(str, flags)], "grpo")
        for_each_seed(train, config, Screen())
        return trained

    return run_seeds


def test_one_seed_uses_the_output_folder_itself(train_seeds):
    assert train_seeds("--seed", 7) == [(7, "out")]


def test_each_seed_has_a_folder_and_finished_seeds_are_skipped(train_seeds, capsys):
    assert train_seeds("--seeds", 42, 123, 777) == [(42, "out_seed42"), (123, "out_seed123"), (777, "out_seed777")]
    assert train_seeds("--seeds", 42, 5) == [(5, "out_seed5")]
    assert "seed 42: already finished" in capsys.readouterr().out


def test_same_command_continues_after_a_failed_seed(train_seeds):
    with pytest.raises(UserError, match="test error"):
        train_seeds("--seeds", 1, 2, 3, fail_at=2)
    assert train_seeds("--seeds", 1, 2, 3) == [(2, "out_seed2"), (3, "out_seed3")]


def test_finished_seed_with_other_settings_is_refused(train_seeds, user_error):
    train_seeds("--seeds", 1)
    with user_error("(K, kl_horizon, learning_rate)", "out_seed1"):
        train_seeds("--seeds", 1, 2, "--K", 4, "--learning-rate", 1e-3)
    assert train_seeds("--seeds", 1, "--K", 4, "--overwrite") == [(1, "out_seed1")]


def test_finished_seed_of_an_older_format_is_refused_or_replaced(train_seeds, tmp_path, user_error):
    train_seeds("--seeds", 1)
    file = tmp_path / "out_seed1" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 1}))
    for flags in ((), ("--resume",)):
        with user_error(1, 4, "out_seed1"):
            train_seeds("--seeds", 1, 2, *flags)
    assert train_seeds("--seeds", 1, 2, "--overwrite") == [(1, "out_seed1"), (2, "out_seed2")]


def test_output_folders_of_all_seeds_are_checked_before_the_first_run(train_seeds, tmp_path, user_error):
    (tmp_path / "out_seed3").mkdir()
    RunLog(tmp_path / "out_seed3", **facts_of())  # a run that did not finish
    with user_error("out_seed3"):
        train_seeds("--seeds", 1, 2, 3)
    assert not (tmp_path / "out_seed1").exists()
    assert [seed for seed, _ in train_seeds("--seeds", 1, 2, 3, "--overwrite")] == [1, 2, 3]


def test_dry_run_ignores_existing_folders(train_seeds):
    train_seeds("--seeds", 1)
    assert train_seeds("--seeds", 1, "--K", 4, "--dry-run") == [(1, "out_seed1")]


def test_duplicate_seed_is_refused(user_error):
    with user_error("--seeds"):
        parse_cli(["--seeds", "1", "2", "1"])


def test_table_has_mean_and_standard_deviation(tmp_path, capsys):
    scores = {42: 1.0, 123: 2.0, 777: 4.5}
    config = parse_cli(["--output", str(tmp_path / "out")], "grpo")
    watched = {"eval/right_before": 0.5, "eval/right_after": 0.75, "eval/right_rise_interval": [0.1, 0.4]}
    runs = {seed: {"score_after": score, "seconds": 90.0, **watched} for seed, score in scores.items()}
    del runs[777]["seconds"]
    show_seeds(config, runs, Screen())
    output = capsys.readouterr().out
    assert "GRPO, 3 seeds" in output and "standard deviation" in output
    assert f"{fmean(scores.values()):.3f}" in output and f"{stdev(scores.values()):.3f}" in output
    written = json.loads((tmp_path / "out_seeds.json").read_text())["figures"]
    assert written["score_after"]["mean"] == 2.5 and written["score_after"]["by_seed"] == {
        "42": 1,
        "123": 2,
        "777": 4.5,
    }
    assert "seconds" not in written, "a figure that is missing for one seed has no mean"
    assert "right before" in output and written["eval/right_after"]["mean"] == 0.75
    assert "eval/right_rise_interval" not in written

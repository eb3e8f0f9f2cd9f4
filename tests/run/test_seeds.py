"""Tests of --seeds: the folders of the runs, which are skipped, refused or left to another process, and the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev

import pytest

from rlhf.algorithms.kl_control import with_horizon
from rlhf.checkpoints.run_folder import LOCK_FILE, claim_output, is_in_use
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.run_record import RunRecord
from rlhf.commands.train import train_command
from rlhf.config import parse_cli
from rlhf.data import prompts
from rlhf.data.examples import load_examples
from rlhf.run import seeds
from rlhf.run.seeds import for_each_seed, show_seeds
from rlhf.setup.inputs import placing
from rlhf.utils import system
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from tests.documents import ROOT
from tests.records import facts_of


@pytest.fixture
def train_seeds(tmp_path, capsys):
    """Return a function that runs the seeds of the flags and returns those that were trained. Each run writes only a
    finished run.json. `meanwhile` is called with each seed that is trained, while its models would be loaded."""

    def run_seeds(*flags, fail_at=None, meanwhile=lambda seed: None):
        trained = []

        def train(config, screen):
            meanwhile(config.run.seed)
            if config.run.seed == fail_at:
                raise UserError("test error")
            folder = Path(config.run.output)
            trained.append((config.run.seed, folder.name))
            if config.run.dry_run:
                return
            held = None if config.run.resume else claim_output(folder, **placing(config))[0]
            with RunLog(folder, held, **facts_of(with_horizon(config, 2))) as log:
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


# --- several processes -----------------------------------------------------------------------------------------------


def elsewhere(folder: Path, *flags: object) -> RunLog:
    """Start the run of a seed with a lock of its own, as another process with these flags does."""
    seed = folder.name.rpartition("seed")[2]
    folder.mkdir(exist_ok=True)
    config = parse_cli(["--seed", seed, *map(str, flags)], "grpo")
    return RunLog(folder, **facts_of(with_horizon(config, 2)), figures={"score_after": float(seed), "seconds": 60.0})


def end(log: RunLog, error: Exception | None = None) -> None:
    log.__exit__(error and type(error), error, None)


def test_a_seed_that_another_process_trains_is_left_to_it_and_the_last_to_end_prints_the_table(
    train_seeds, tmp_path, capsys
):
    other = elsewhere(tmp_path / "out_seed2")
    assert [seed for seed, _ in train_seeds("--seeds", 1, 2, 3)] == [1, 3]
    printed = capsys.readouterr().out
    assert printed.count("seed 2: another process ") == 2, "at its turn, and in place of the table"
    assert "3 seeds" not in printed and "warning" not in printed and not (tmp_path / "out_seeds.json").exists()
    end(other)
    assert train_seeds("--seeds", 3, 2, 1) == []
    assert "GRPO, 3 seeds" in capsys.readouterr().out and (tmp_path / "out_seeds.json").exists()


def test_if_two_processes_end_together_both_print_the_table(train_seeds, tmp_path, capsys, monkeypatch):
    """The other one ends after this one has seen its lock. A run is finished before its folder is free."""
    other = elsewhere(tmp_path / "out_seed2")
    look = seeds.is_in_use
    seen = []

    def look_and_end(folder):
        seen.append(look(folder))
        if len(seen) == 3:
            end(other)
        return seen[-1]

    monkeypatch.setattr(seeds, "is_in_use", look_and_end)
    train_seeds("--seeds", 1, 2)
    train_seeds("--seeds", 1, 2)
    assert seen == [True, False, True, False, False], "before the first seed, and twice at the end"
    assert capsys.readouterr().out.count("GRPO, 2 seeds") == 2


def test_a_folder_is_locked_while_models_are_loaded_and_free_after_an_error(train_seeds, tmp_path):
    """A process that starts in the same moment takes the next seed, and does not load models in vain."""
    locks = []

    def look(seed):
        locks.append(system.lock(tmp_path / f"out_seed{seed}" / LOCK_FILE))

    with pytest.raises(UserError, match="test error"):
        train_seeds("--seeds", 1, 2, fail_at=2, meanwhile=look)
    assert locks == [None, None], "another process could not lock them"
    assert not any(is_in_use(tmp_path / f"out_seed{seed}") for seed in (1, 2))
    assert not (tmp_path / "out_seed2").exists(), "a folder with a lock file only"
    assert [seed for seed, _ in train_seeds("--seeds", 1, 2)] == [2]


@pytest.mark.parametrize("flag", [None, "--overwrite", "--resume"])
@pytest.mark.parametrize("error", [None, ValueError("a test")])
def test_a_run_that_another_process_has_started_meanwhile_stays_as_it_is(train_seeds, tmp_path, capsys, flag, error):
    """While this process loads the models of seed 1, another one trains seed 2. With a flag, its folder had an
    unfinished run before, which the flag is about."""
    folder = tmp_path / "out_seed2"
    flags = [] if flag is None else [flag]
    if flag is not None:
        end(elsewhere(folder), ValueError("before"))
    runs = []

    def train_elsewhere(seed):
        end(elsewhere(folder, *flags), error)
        runs.append(RunRecord.read(folder))

    assert train_seeds("--seeds", 1, 2, *flags, meanwhile=train_elsewhere) == [(1, "out_seed1")]
    assert runs == [RunRecord.read(folder)] and not (tmp_path / "out_seed2_1").exists()
    printed = capsys.readouterr().out
    assert ("GRPO, 2 seeds" in printed) == (error is None)
    assert ("warning: no table, because seed 2 " in printed) == (error is not None)
    assert ("--resume --seeds 1 2" in printed) == (error is not None)


def test_overwrite_moves_only_unfinished_runs_and_those_with_other_settings(train_seeds, tmp_path):
    end(elsewhere(tmp_path / "out_seed1"))
    end(elsewhere(tmp_path / "out_seed2"), ValueError("a test"))
    end(elsewhere(tmp_path / "out_seed3", "--K", 4))
    other = elsewhere(tmp_path / "out_seed4")
    assert [seed for seed, _ in train_seeds("--seeds", 1, 2, 3, 4, "--overwrite")] == [2, 3]
    moved = sorted(path.name for path in tmp_path.iterdir() if path.name.count("_") == 2)
    assert moved == ["out_seed2_1", "out_seed3_1"]
    end(other)


def test_a_seed_that_another_process_trains_with_other_settings_is_refused(train_seeds, tmp_path, user_error):
    other = elsewhere(tmp_path / "out_seed2", "--K", 4)
    with user_error("(K, kl_horizon)", "out_seed2"):
        train_seeds("--seeds", 2, 1)
    end(other)


WAITS = """
import os, time
def waits(completions, **_):
    while os.environ.get("WAIT") and not os.path.exists("go"):
        time.sleep(0.05)
    return [1.0 * len(str(c)) for c in completions]
"""


@pytest.fixture
def command(start_model, reward_folder, pairs_file, tmp_path):
    """Return a function that starts a short train_ppo.py --seeds 1 2 in tmp_path, with more environment variables."""
    (tmp_path / "reward.py").write_text(WAITS, encoding="utf-8")
    words = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file, "--batch-size", 4,
             "--num-iterations", 2, "--max-new-tokens", 8, "--prompt-length", 100, "--eval-prompts", 6,
             "--allow-weak-reward-model", "--reward-func", "reward.py:waits", "--seeds", 1, 2,
             "--output", "run"]  # fmt: skip
    started = []

    def start(*more: str, **variables: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train_ppo.py"), *map(str, words), *more], cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **variables},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.ci
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_two_processes_share_the_seeds(command, tmp_path, flags):
    """The first process trains seed 1 all the time that the second one needs for seed 2."""
    first = command(*flags, WAIT="1")
    until = time.monotonic() + 120
    while not (tmp_path / "run_seed1" / "run.json").exists():
        assert first.poll() is None and time.monotonic() < until, first.communicate()[0]
        time.sleep(0.05)
    second = command(*flags)
    printed = second.communicate(timeout=200)[0]
    assert second.returncode == 0 and "seed 1: another process trains it" in printed, printed
    assert "2 seeds" not in printed and not (tmp_path / "run_seeds.json").exists()
    (tmp_path / "go").touch()
    printed = first.communicate(timeout=200)[0]
    assert first.returncode == 0 and "seed 2: already finished" in printed and "PPO, 2 seeds" in printed, printed
    assert [RunRecord.read(tmp_path / f"run_seed{seed}").pid for seed in (1, 2)] == [first.pid, second.pid]
    assert sorted(path.name for path in tmp_path.glob("run_seed*")) == ["run_seed1", "run_seed2", "run_seeds.json"]


@pytest.mark.ci
def test_two_processes_that_start_together_train_each_seed_once(command, tmp_path):
    processes = [command(), command()]
    printed = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    assert any("PPO, 2 seeds" in text for text in printed), printed
    assert sum(text.count("update 2/2") for text in printed) == 2
    assert sorted(path.name for path in tmp_path.glob("run_seed*")) == ["run_seed1", "run_seed2", "run_seeds.json"]


@pytest.mark.parametrize("more", [(), ("--seeds", 1, 2)])
def test_a_command_reads_its_data_once(run_flags, pairs_file, tmp_path, monkeypatch, capsys, more):
    """Before the imports, and for each seed; a plan trains nothing."""
    rows = pairs_file.read_text("utf-8")
    file = tmp_path / "twice.jsonl"
    file.write_text(rows + rows, encoding="utf-8")
    read = []
    monkeypatch.setattr(prompts, "load_examples", lambda *of, **how: read.append(of) or load_examples(*of, **how))
    train_command("ppo", run_flags("--prompts", file, "--dry-run", *more))
    printed = capsys.readouterr().out
    assert printed.count("algorithm") == (2 if more else 1)
    assert len(read) == 1 and printed.count("rows are duplicates") == 1

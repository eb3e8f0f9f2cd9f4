"""Tests of --seeds with --parallel: one process per seed, places on GPUs or CPU cores, stops, failures, locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train_ppo
from rlhf.checkpoints.run_folder import RunLock
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import parse_cli
from rlhf.distributed import join
from rlhf.run import parallel_seeds
from rlhf.utils.system import WINDOWS
from tests.kills import differing
from tests.scripts.test_scripts import ROOT

FAILS_ONCE = """
import os
def fails_once(completions, **_):
    if os.path.exists("fail"):
        os.rename("fail", "failed")
        raise ValueError("a test")
    return [1.0 * len(str(c)) for c in completions]
"""


@pytest.fixture
def flags(start_model, reward_folder, pairs_file) -> list[str]:
    """Return the flags of a run of three updates."""
    words = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file, "--batch-size", 4,
             "--num-iterations", 3, "--save-every", 2, "--eval-every", 50, "--max-new-tokens", 8,
             "--prompt-length", 100, "--eval-prompts", 6, "--allow-weak-reward-model"]  # fmt: skip
    return list(map(str, words))


@pytest.fixture
def command(flags, tmp_path):
    """Return a function that starts train_ppo.py in tmp_path with the flags of a short run and others."""

    def start(*more: object) -> subprocess.Popen:
        argv = [*([] if "--resume" in more else flags), "--output", "run", *map(str, more)]
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train_ppo.py"), *argv], cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        )  # fmt: skip

    return start


def status_of(folder: Path) -> str | None:
    run = RunRecord.read(folder)
    return None if run is None else run.status


@pytest.mark.ci
def test_failed_seed_is_reported_and_the_others_finish_as_alone(command, flags, tmp_path, monkeypatch):
    """Seed 3 is trained by another process all the time, so it is left to that process."""
    (tmp_path / "reward.py").write_text(FAILS_ONCE, encoding="utf-8")
    (tmp_path / "fail").touch()
    (tmp_path / "run_seed3").mkdir()
    rule = ("--reward-func", "reward.py:fails_once")
    with RunLock(tmp_path / "run_seed3"):
        process = command("--seeds", 1, 2, 3, "--parallel", *rule)
        printed = process.communicate(timeout=200)[0]
        assert process.returncode == 1 and "another process trains seed 3" in printed, printed
        statuses = {seed: status_of(tmp_path / f"run_seed{seed}") for seed in (1, 2, 3)}
        assert sorted([statuses[1], statuses[2]]) == ["failed", "finished"] and statuses[3] is None, printed
        failed, other = sorted((1, 2), key=statuses.get)
        assert f"error: seed {failed}: " in printed and "ValueError: a test" in printed
        assert "update 3/3" in (tmp_path / f"run_seed{other}.log").read_text(encoding="utf-8")
        process = command("--resume", "--seeds", 1, 2, 3, "--parallel", *rule)
        printed = process.communicate(timeout=200)[0]
        assert process.returncode == 0 and printed.count("already finished") == 1, printed
        assert "PPO, 2 seeds" in printed and status_of(tmp_path / f"run_seed{failed}") == "finished"
    # the same run alone, in this process
    monkeypatch.chdir(tmp_path)
    train_ppo.main([*flags, "--seed", str(other), *rule, "--output", "alone"])
    assert differing(tmp_path / "alone", tmp_path / f"run_seed{other}") == []


@pytest.mark.ci
@pytest.mark.skipif(WINDOWS, reason="a test cannot send Ctrl-C to one process on Windows")
def test_ctrl_c_saves_all_seeds_and_prints_the_command_that_resumes_them(command, tmp_path):
    process = command("--seeds", 1, 2, "--parallel", "--num-iterations", 60)
    folders = [tmp_path / f"run_seed{seed}" for seed in (1, 2)]
    until = time.monotonic() + 120
    while not all(list(folder.glob("checkpoint-*[0-9]")) for folder in folders):
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 130, printed
    assert [status_of(folder) for folder in folders] == ["stopped", "stopped"]
    assert "--resume --seeds 1 2 --parallel --output run" in printed


@pytest.mark.parametrize(
    ("gpus", "cores", "seeds", "expected"),
    [
        (["0", "3"], 8, 4, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "3"}]),
        ([], 8, 3, [{"OMP_NUM_THREADS": "2"}] * 3),
        ([], 2, 4, [{"OMP_NUM_THREADS": "1"}] * 2),
        ([], 8, 1, [{"OMP_NUM_THREADS": "8"}]),
    ],
)
def test_places_are_gpus_or_shares_of_the_cores(monkeypatch, gpus, cores, seeds, expected):
    monkeypatch.setattr(parallel_seeds, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(parallel_seeds, "available_cores", lambda: cores)
    assert [slot.environment for slot in parallel_seeds.slots_for(seeds)] == expected


@pytest.mark.parametrize(
    ("visible", "number", "expected"), [(None, 1, "1"), ("2,5", 1, "5"), ("", 0, ""), ("GPU-a,GPU-b", 0, "GPU-a")]
)
def test_each_process_sees_one_gpu(monkeypatch, visible, number, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    join.select_gpu(number)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_more_processes_than_gpus_are_refused(monkeypatch, user_error):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with user_error(3):
        join.select_gpu(2)


def test_parallel_needs_several_seeds_and_no_launcher(monkeypatch, user_error):
    with user_error("--parallel", "--seeds", "--sweep"):
        parse_cli(["--parallel"], "ppo")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with user_error():
        parse_cli(["--parallel", "--seeds", "1", "2"], "ppo")

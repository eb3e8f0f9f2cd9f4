"""Kills a run on real weights after its first checkpoint, resumes it, and compares it with an uninterrupted run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import train_ppo
from rlhf.checkpoints.manifest import MANIFEST
from rlhf.checkpoints.model_folder import WEIGHTS_FILE
from rlhf.utils import system
from tests.kills import differing
from tests.scripts.test_scripts import ROOT

pytestmark = pytest.mark.proof


def kill_after_first_checkpoint(flags: list[str], output: Path) -> None:
    """Run train_ppo.py in a process, and kill it as soon as checkpoint-1 is complete."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train_ppo.py", *flags, "--output", str(output)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        while not (output / "checkpoint-1" / MANIFEST).exists():  # the run ends by itself, so this needs no time limit
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"


@pytest.mark.skipif(system.WINDOWS, reason="Windows has no SIGKILL")
def test_killed_run_resumes_with_bit_identical_weights(real_flags, smollm2, reward_file, large_folder):
    """All weights are trained, with Adam's state and the value head: weights, best/, checkpoints and metrics."""
    flags = real_flags("--num-iterations", 2, "--save-every", 1, "--keep", 1, "--max-new-tokens", 8)
    train_ppo.main([*flags, "--output", str(large_folder / "plain")])
    kill_after_first_checkpoint(flags, large_folder / "killed")
    assert not (large_folder / "killed" / "checkpoint-2").exists()
    reward = ["--reward-func", f"{reward_file}:letters"]  # the code of a reward is given again
    train_ppo.main(["--resume", *reward, "--output", str(large_folder / "killed")])
    assert differing(large_folder / "plain", large_folder / "killed") == []
    start, end = (load_file(folder / WEIGHTS_FILE) for folder in (smollm2, large_folder / "killed"))
    assert all(not start[name].equal(end[name]) for name in start), "training must change every weight"

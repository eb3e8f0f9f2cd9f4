"""Tests that need two GPUs: gradients added up by NCCL, and seeds that two processes share, on one GPU each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from rlhf.checkpoints.run_record import RunRecord
from tests.distributed.proof import Inputs, largest_gap
from tests.distributed.ranks import free_port
from tests.distributed.runs import FLAGS, words
from tests.scripts.test_scripts import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA GPUs on this machine"),
]
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "false"}


def run(folder, start, *argv):
    ended = subprocess.run(
        [sys.executable, *start, *map(str, argv)], cwd=folder, capture_output=True, text=True, timeout=400,
        env=ENVIRONMENT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.parametrize("algorithm", list(FLAGS))
def test_two_gpus_train_like_one(tmp_path, algorithm):
    """In float32. The completions may differ if a random number falls between two rounded probabilities."""
    inputs = Inputs.make(tmp_path / "inputs")
    script = ROOT / f"train_{algorithm}.py"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    for name, start in (("one", []), ("two", launcher)):
        printed = run(tmp_path, start, script, *words(algorithm, inputs, tmp_path / name, "--no-bf16"))
        assert printed.count("update 5/5") == 1
    assert RunRecord.read(tmp_path / "two").processes == 2
    for file in (tmp_path / "one").glob("*.safetensors"):
        assert largest_gap(load_file(file), load_file(tmp_path / "two" / file.name)) < 1e-3


def test_two_processes_share_the_seeds_on_one_gpu_each(tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    argv = [word for word in words("ppo", inputs, tmp_path / "run") if word not in ("--seed", "7")]
    processes = [
        subprocess.Popen(
            [sys.executable, ROOT / "train_ppo.py", *map(str, argv), "--seeds", "1", "2"], cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for gpu in "01"
    ]  # fmt: skip
    printed = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    assert any("PPO, 2 seeds" in text for text in printed) and all("cuda" in text for text in printed), printed
    assert len({RunRecord.read(tmp_path / f"run_seed{seed}").pid for seed in (1, 2)}) == 2

"""Saved files have the permissions that the umask allows: teammates can read them, or nobody else can."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

import compare_runs
import evaluate_generations
import plot_training_progress
import reward_model.train
import train_ppo
from rlhf.utils.system import add_umask_permissions

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")


@pytest.fixture
def with_umask():
    """Return a function that sets the umask until the end of the test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def permissions(folder: Path) -> dict[str, str]:
    """Return the permissions of all files and folders in a folder, in octal, by path."""
    return {
        path.relative_to(folder).as_posix() + "/" * path.is_dir(): oct(stat.S_IMODE(path.stat().st_mode))
        for path in folder.rglob("*")
    }


def expected(found: dict[str, str], umask: int) -> dict[str, str]:
    return {name: oct((0o777 if name.endswith("/") else 0o666) & ~umask) for name in found}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002], ids=oct)
def test_a_private_file_gets_what_the_umask_allows_and_keeps_its_other_bits(with_umask, tmp_path, umask):
    with_umask(umask)
    for name, mode in (("private", 0o600), ("executable", 0o711)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
        add_umask_permissions(tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode | (0o666 & ~umask)
    assert os.umask(umask) == umask, "the umask itself has not changed"


@pytest.mark.parametrize("umask", [0o022, pytest.param(0o077, marks=pytest.mark.ci)], ids=oct)
def test_every_file_of_a_run_has_the_umasks_permissions(with_umask, run_flags, tmp_path, umask):
    """Final model, best/, checkpoints, merged/, run.json, samples, token records, logs, model cards."""
    with_umask(umask)
    train_ppo.main(run_flags("--use-lora", "--merge-lora", "--record-tokens", "--critic", "separate"))
    found = permissions(tmp_path / "run")
    assert found == expected(found, umask)
    for name in ("adapter_model.safetensors", "critic.safetensors", "best/adapter_model.safetensors", "run.json",
                 "merged/model.safetensors", "merged/README.md", "checkpoint-2/training.safetensors",
                 "checkpoint-2/best/adapter_model.safetensors", "samples/update-000002.jsonl",
                 "tokens/"):  # fmt: skip
        assert name in found


@pytest.mark.ci
@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_reward_models_and_reports_have_the_umasks_permissions(
    with_umask, runs, start_model, pairs_file, tmp_path, umask
):
    with_umask(umask)
    words = [
        "--base-model",
        start_model,
        "--actor-model",
        "none",
        "--pairs",
        pairs_file,
        "--rm-output",
        tmp_path / "rm",
    ]
    reward_model.train.main([str(word) for word in words])
    both = [str(runs["ppo", 1]), str(runs["grpo", 1])]
    compare_runs.main([*both, "--output", str(tmp_path / "comparison"), "--num-prompts", "4", "--limit-minutes", "0"])
    evaluate_generations.main(
        ["--model-path", both[0], "--output", str(tmp_path / "evaluation"), "--num-prompts", "4"]
    )
    plot_training_progress.main([*both, "--output", str(tmp_path / "plots")])
    found = permissions(tmp_path)
    assert found == expected(found, umask)
    written = {"rm/model.safetensors", "rm/metrics.json", "comparison/comparison.html", "evaluation/evaluation.json"}
    assert written | {"plots.png", "plots.csv"} <= found.keys()

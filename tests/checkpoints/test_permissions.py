"""Saved files have the permissions that the umask allows: teammates can read them, or nobody else can. Files of other
users, who have closed them, are reported as such."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

import compare_runs
import evaluate_generations
import plot_training_progress
import reward_model.train
import train_ppo
from rlhf.analysis.curves import read_scalars
from rlhf.checkpoints.run_folder import LOCK_FILE, RunLock, present_status
from rlhf.checkpoints.run_record import RunRecord
from rlhf.checkpoints.token_record import read_tokens, recorded_updates
from rlhf.checkpoints.trust import readable
from rlhf.utils import system
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


def read_weights(folder: Path) -> None:
    """Fail as safetensors does for a file that it may not read: without an error number."""
    with readable(str(folder)):
        raise FileNotFoundError(f"No such file or directory: {folder / 'model.safetensors'}")


# --- files of another user -------------------------------------------------------------------------------------------


@pytest.fixture
def refused(monkeypatch):
    """Return a function after which the system refuses to open a file, or only to write it: the tests may run as
    root, who may open all files."""
    original = Path.open

    def refuse(file: Path, only_to_write: bool = False) -> None:
        def opened(self, mode="r", *more, **named):
            if self == file and not (only_to_write and mode in ("r", "rb")):
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return original(self, mode, *more, **named)

        monkeypatch.setattr(Path, "open", opened)

    return refuse


def test_a_run_of_another_user_is_killed_if_nobody_holds_its_lock(refused, tmp_path):
    """Its lock can be read only."""
    lock = RunLock(tmp_path)
    with lock:
        refused(tmp_path / LOCK_FILE, only_to_write=True)
        assert present_status(tmp_path, "running") == "running"
    assert present_status(tmp_path, "running") == "killed"
    held = [system.lock(tmp_path / LOCK_FILE, "rb") for _ in range(2)]
    assert all(held), "two commands may look at the same time"
    refused(tmp_path / LOCK_FILE)
    assert present_status(tmp_path, "running") == "running", "nobody can tell"


@pytest.fixture
def closed_run(runs, tmp_path) -> Path:
    return Path(shutil.copytree(runs["ppo", 1], tmp_path / "run"))


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        ("run.json", lambda run: RunRecord.read(run)),
        ("logs/*tfevents*", lambda run: read_scalars(run / "logs")),
        ("tokens/update-*.jsonl", lambda run: [read_tokens(file) for file in recorded_updates(run, "-")]),
        ("model.safetensors", read_weights),
    ],
)
def test_a_file_that_the_system_refuses_to_read_is_no_damaged_or_missing_file(closed_run, refused, pattern, read):
    file = next(closed_run.glob(pattern))
    refused(file)
    with pytest.raises(PermissionError) as error:
        read(closed_run)
    assert error.value.filename == str(file)

"""Tests of when a checkpoint is saved, and of what a save reads, writes and shares with best/."""

from __future__ import annotations

import hashlib
import os
import signal
from collections import Counter
from pathlib import Path
from time import perf_counter

import pytest
import torch

import train_ppo
from rlhf.callbacks import checkpointing
from rlhf.callbacks.base import Callback
from rlhf.checkpoints.manifest import find_checkpoints
from rlhf.settings.training import SAVE_SECONDS
from rlhf.trainer.safety import SkipUpdate
from rlhf.utils import files
from rlhf.utils.errors import RLHFWarning
from tests.conftest import BY_TIER, attach
from tests.trainer.test_safety import set_kl

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"


def scripted(*scores: float):
    """Return a reward function with these scores of the evaluations, and different ones in training."""
    script = iter(scores)

    def function(completions, **_):
        return [next(script)] * 6 if len(completions) == 6 else [float(i) for i in range(len(completions))]

    return function


class Weights(Callback):
    """Stores the trained weights after each update and its evaluation."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.after: dict[int, list[torch.Tensor]] = {}

    def now(self) -> list[torch.Tensor]:
        return [w.detach().clone() for w in self.trainer.host.model.parameters() if w.requires_grad]

    def on_update_done(self, update):
        self.after[update] = self.now()


def train(trainer, *callbacks) -> tuple[Path, dict[int, list[torch.Tensor]]]:
    """Train in a run folder. Return it, and the weights after each update."""
    log = attach(trainer)
    weights = Weights(trainer)
    for callback in (*callbacks, weights):
        trainer.add_callback(callback)
    trainer.train()
    return log.folder, weights.after


def check_weights(trainer, folder: Path, after: dict[int, list[torch.Tensor]]) -> dict[int, Path]:
    """Assert that each checkpoint is valid and has the weights after its update. Return the checkpoints."""
    files._hashes.clear()  # as in another process
    found = find_checkpoints(folder, trainer.session.log.record.id)
    assert found.skipped == []
    for update, path in found.valid.items():
        trainer.load_model(path)
        now = Weights(trainer).now()
        assert all(torch.equal(a, b) for a, b in zip(now, after[update], strict=True)), update
    return found.valid


def skip(trainer, skipped: int, monkeypatch) -> None:
    """Let the trainer skip an update before its first optimizer step."""
    original = trainer.policy_optimizer.run

    def run(experience, update):
        if update == skipped:
            raise SkipUpdate("a test")
        return original(experience, update)

    monkeypatch.setattr(trainer.policy_optimizer, "run", run)


# --- best/ -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", BY_TIER)
@pytest.mark.parametrize("flags", [(), ("--use-lora",)])
def test_best_and_a_checkpoint_of_the_same_weights_are_one_file(build, algorithm, flags):
    """Evaluations 1 and 3 are the best so far, evaluation 2 is not."""
    trainer = build("--num-iterations", 3, "--eval-every", 1, "--save-every", 1, "--keep", 3, *flags,
                    algorithm=algorithm, rewards=[scripted(0.0, 2.0, 1.0, 3.0)])  # fmt: skip
    folder, after = train(trainer)
    assert list(check_weights(trainer, folder, after)) == [1, 2, 3]
    weights = ADAPTER if flags else WEIGHTS
    first, second, third = (folder / f"checkpoint-{update}" for update in (1, 2, 3))
    assert (first / weights).samefile(first / "best" / weights) and (first / weights).samefile(
        second / "best" / weights
    )
    assert (third / weights).samefile(third / "best" / weights) and (third / weights).samefile(
        folder / "best" / weights
    )
    assert (second / weights).stat().st_nlink == 1
    heads = [path / "value_head.safetensors" for path in (third, folder / "best") if algorithm == "ppo"]
    assert not heads or heads[0].samefile(heads[1])
    assert (first / weights).stat().st_nlink == (third / weights).stat().st_nlink == 3


def test_a_disk_without_links_gets_copies(build, monkeypatch):
    def refused(*_):
        raise OSError("no links")

    monkeypatch.setattr(os, "link", refused)
    trainer = build("--num-iterations", 1, "--eval-every", 1, rewards=[scripted(0.0, 1.0)])
    folder, after = train(trainer)
    found = check_weights(trainer, folder, after)
    assert (found[1] / WEIGHTS).stat().st_nlink == 1
    assert (found[1] / WEIGHTS).read_bytes() == (folder / "best" / WEIGHTS).read_bytes()


def test_an_update_without_an_optimizer_step_shares_the_file(build, monkeypatch):
    """The last update is skipped before its first step, so its weights are those of the best evaluation before."""
    trainer = build("--num-iterations", 3, "--eval-every", 2, "--save-every", 5, rewards=[scripted(0.0, 1.0, 0.5)])
    skip(trainer, 3, monkeypatch)
    folder, after = train(trainer)
    assert all(torch.equal(a, b) for a, b in zip(after[2], after[3], strict=True))
    found = check_weights(trainer, folder, after)
    assert list(found) == [3] and (found[3] / WEIGHTS).samefile(folder / "best" / WEIGHTS)


@pytest.mark.parametrize("best_after_rollback", [False, True])
def test_a_checkpoint_after_a_rollback_has_the_restored_weights(build, best_after_rollback):
    """The weights after update 2 are loaded in update 6. Evaluation 5 is the best before."""
    scores = [float(n) for n in range(6)] + [9.0 if best_after_rollback else 0.0, 0.0]
    trainer = build("--num-iterations", 7, "--eval-every", 1, "--save-every", 1, "--keep", 7, "--rollback-on-kl",
                    "--learning-rate", "1e-2", "--best-rule", "score", rewards=[scripted(*scores)])  # fmt: skip
    set_kl(trainer, [6.0, 6.0, 6.0, 30.0, 30.0, 30.0, 6.0])
    folder, after = train(trainer)
    assert all(torch.equal(a, b) for a, b in zip(after[2], after[6], strict=True))
    found = check_weights(trainer, folder, after)
    assert list(found) == [1, 2, 3, 4, 5, 6, 7]
    assert (found[6] / WEIGHTS).samefile(found[6] / "best" / WEIGHTS) == best_after_rollback


class Change(Callback):
    """Changes something after update 2 and its evaluation, before the checkpoint."""

    def __init__(self, change):
        self.change = change

    def on_update_done(self, update):
        if update == 2:
            self.change()


CHANGES = {
    "other weights are loaded": lambda trainer, folder: trainer.load_model(folder / "checkpoint-1"),
    "best/ is removed": lambda trainer, folder: [file.unlink() for file in (folder / "best").iterdir()],
    "best/ has other weights": lambda trainer, folder: files.update_dir_atomically(
        folder / "best", lambda new: files.hardlink_dir(folder / "checkpoint-1", new)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_the_evaluation_and_the_checkpoint_is_noticed(build, change):
    trainer = build("--num-iterations", 2, "--eval-every", 1, "--save-every", 1, "--keep", 1,
                    rewards=[scripted(0.0, 1.0, 2.0)])  # fmt: skip
    folder = Path(trainer.config.run.output)
    _, after = train(trainer, Change(lambda: CHANGES[change](trainer, folder)))
    assert list(check_weights(trainer, folder, after)) == [2]
    assert (folder / "checkpoint-2" / WEIGHTS).stat().st_nlink == 1


# --- reading ---------------------------------------------------------------------------------------------------------


def test_each_file_is_read_once_for_its_hash(run_flags, tmp_path, monkeypatch):
    """In a run that keeps three checkpoints, and in one that resumes it: validated twice, and saved three times."""
    read = []
    original = hashlib.file_digest

    def file_digest(stream, *more):
        stat = os.fstat(stream.fileno())
        read.append((stat.st_ino, stat.st_mtime_ns, Path(stream.name).name))  # numbers of removed files are used again
        return original(stream, *more)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    files._hashes.clear()
    train_ppo.main(run_flags("--num-iterations", 5, "--save-every", 1, "--keep", 3, "--eval-every", 2))
    assert {count for _, count in Counter(read).items()} == {1}
    assert len([name for *_, name in read if name == "training.safetensors"]) == 5
    files._hashes.clear()
    read.clear()
    more = ["--resume-anyway", "--num-iterations", "8", "--lr-schedule", "constant"]
    train_ppo.main(["--resume", "--output", str(tmp_path / "run"), *more])
    assert {count for _, count in Counter(read).items()} == {1}
    assert len([name for *_, name in read if name == "training.safetensors"]) == 3 + 3


# --- by time ---------------------------------------------------------------------------------------------------------


class Minutes(Callback):
    """A clock. An update takes a share of the time between two checkpoints, and a save a little."""

    def __init__(self, monkeypatch, share: float):
        self.share = share
        self.now = perf_counter()
        monkeypatch.setattr(checkpointing, "perf_counter", lambda: self.now)

    def on_update_begin(self, update):
        self.now += self.share * SAVE_SECONDS

    def on_save(self, update):
        self.now += 0.05 * SAVE_SECONDS


@pytest.mark.parametrize("flags", [(), ("--save-every", "none")])
@pytest.mark.parametrize(("share", "saved"), [(0.4, [3, 6, 8]), (1.5, [*range(1, 9)]), (0.01, [8])])
def test_without_a_number_a_checkpoint_follows_every_five_minutes(build, monkeypatch, flags, share, saved):
    assert SAVE_SECONDS == 300
    trainer = build("--num-iterations", 8, "--keep", 9, *flags)
    folder, _ = train(trainer, Minutes(monkeypatch, share))
    assert list(find_checkpoints(folder, trainer.session.log.record.id).valid) == saved


def test_a_signal_saves_before_the_time(build, monkeypatch):
    trainer = build("--num-iterations", 8, "--keep", 9)
    stop = Change(lambda: setattr(trainer.session.checkpoints.stop, "by", signal.SIGTERM))
    with pytest.raises(checkpointing.TrainingInterrupted):
        train(trainer, Minutes(monkeypatch, 0.01), stop)
    assert list(find_checkpoints(trainer.session.folder, trainer.session.log.record.id).valid) == [2]


@pytest.mark.filterwarnings("ignore", category=RLHFWarning)
def test_a_checkpoint_that_is_due_waits_for_an_update_that_succeeds(build, monkeypatch):
    trainer = build("--num-iterations", 6, "--keep", 9)
    skip(trainer, 3, monkeypatch)
    folder, _ = train(trainer, Minutes(monkeypatch, 0.4))
    assert list(find_checkpoints(folder, trainer.session.log.record.id).valid) == [4, 6]

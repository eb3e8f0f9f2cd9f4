"""Tests of resuming from a run with damaged files: an older checkpoint is used if possible. Otherwise the error is one
line."""

from __future__ import annotations

import json
import shutil
import signal

import pytest

import train_ppo
from rlhf.checkpoints.manifest import MANIFEST, find_checkpoints
from rlhf.checkpoints.run_record import RunRecord
from rlhf.utils.files import sha256
from tests.trainer.test_nan import run, stop_after

DEEP = "[" * 200_000


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, start_model, reward_folder, pairs_file):
    """A run of 6 updates that was stopped after update 2. It has a checkpoint of each update."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    words = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file, "--output", folder,
             "--num-iterations", 6, "--max-new-tokens", 8, "--prompt-length", 100, "--eval-prompts", 6, "--save-every",
             1, "--eval-every", 99, "--allow-weak-reward-model"]  # fmt: skip
    stop_after(2, lambda: run(words, 128 + signal.SIGINT))
    return folder


@pytest.fixture
def folder(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


def rewrite_file(place, name: str, text: str) -> None:
    """Change a file of a checkpoint, and update the checksum in its manifest."""
    (place / name).write_text(text)
    manifest = json.loads((place / MANIFEST).read_text())
    manifest["files"][name] = {"size": (place / name).stat().st_size, "sha256": sha256(place / name)}
    (place / MANIFEST).write_text(json.dumps(manifest))


def manifest_of(place, **changed) -> str:
    return json.dumps({**json.loads((place / MANIFEST).read_text()), **changed})


MANIFESTS = {
    "an infinite update": lambda place: manifest_of(place, update=float("inf")),
    "an infinite size": lambda place: manifest_of(
        place, files={"training.json": {"size": float("inf"), "sha256": ""}}
    ),
    "nested deep": lambda _: DEEP,
    "no files": lambda place: manifest_of(place, files={}),
    "files as a list": lambda place: manifest_of(place, files=[]),
    "a list": lambda _: "[]",
    "a name that is no path": lambda place: manifest_of(place, files={"a\0b": {"size": 1, "sha256": ""}}),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_checkpoint_with_an_invalid_manifest_is_skipped(folder, damage):
    place = folder / "checkpoint-2"
    (place / MANIFEST).write_text(MANIFESTS[damage](place))
    (place / "training.json").unlink()
    found = find_checkpoints(folder, RunRecord.read(folder).id)
    assert list(found.valid) == [1] and found.skipped[0].startswith("checkpoint-2: ")


STATES = {
    "not JSON": "{",
    "a list": "[]",
    "an object without keys": "{}",
    "nested deep": DEEP,
}


@pytest.mark.parametrize("damage", STATES)
def test_checkpoint_with_an_invalid_training_state_is_skipped(folder, capsys, damage):
    """The checksums are correct, but the content is invalid."""
    rewrite_file(folder / "checkpoint-2", "training.json", STATES[damage])
    run(["--resume", "--output", folder])
    output = capsys.readouterr().out
    (skipped,) = [line for line in output.splitlines() if line.startswith("warning: ") and "checkpoint-2 " in line]
    assert skipped.endswith(" checkpoint-1"), "the one that is used"
    assert "update 1 of 6, from" in output and RunRecord.read(folder).status == "finished"


def test_checkpoint_with_invalid_weights_is_skipped(folder, capsys):
    rewrite_file(folder / "checkpoint-2", "training.safetensors", "none")
    run(["--resume", "--output", folder])
    assert "update 1 of 6, from" in capsys.readouterr().out


def test_without_a_valid_checkpoint_all_are_listed(folder, capsys):
    for name in ("checkpoint-1", "checkpoint-2"):
        rewrite_file(folder / name, "training.json", "{}")
    run(["--resume", "--output", folder], 2)
    output = capsys.readouterr().err
    assert [": --resume, checkpoint-" in line for line in output.splitlines()].count(True) == 2
    assert "Traceback" not in output


RUNS = {
    "settings are a list": lambda record: {**record, "settings": []},
    "no data": lambda record: {k: v for k, v in record.items() if k != "data"},
    "no versions": lambda record: {k: v for k, v in record.items() if k != "versions"},
    "no recipe": lambda record: {**record, "settings": {"model": {}}},
    "settings of another kind": lambda record: {
        **record,
        "settings": {**record["settings"], "batch": {"batch_size": {}}},
    },
    "nested deep": lambda _: None,
    "a list": lambda _: [],
}


@pytest.mark.parametrize("damage", RUNS)
def test_damaged_run_json_is_one_error_line(folder, capsys, damage):
    changed = RUNS[damage](json.loads((folder / "run.json").read_text()))
    (folder / "run.json").write_text(DEEP if changed is None else json.dumps(changed))
    run(["--resume", "--output", folder], 2)
    output = capsys.readouterr().err
    assert output.startswith("error: ") and "Traceback" not in output and "run" in output


def test_resume_of_an_undamaged_run_uses_the_newest_checkpoint(folder, capsys):
    train_ppo.main(["--resume", "--output", str(folder)])
    assert "update 2 of 6, from" in capsys.readouterr().out

"""Tests of --resume with changed settings on a finished run: an error, or further training with --resume-anyway."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

import train_ppo
from rlhf.analysis.models import find_model_ref
from rlhf.checkpoints.run_record import RunRecord
from rlhf.utils.errors import UserError
from tests.checkpoints.test_damaged import rewrite_file
from tests.trainer.test_nan import run, stop_after

FLAGS = ("--lr-schedule", "constant", "--kl-schedule", "fixed", "--save-every", 1)


@pytest.fixture
def finished(run_flags, tmp_path):
    train_ppo.main(run_flags("--num-iterations", 2, *FLAGS))
    return tmp_path / "run"


def test_changed_run_length_is_refused(finished, user_error):
    with user_error("--resume", "num_iterations", "2", "4"):
        train_ppo.main(["--resume", "--num-iterations", "4", "--output", str(finished)])
    assert RunRecord.read(finished).plan.updates == 2


@pytest.mark.ci
def test_resume_anyway_trains_a_finished_run_further(finished, run_flags, tmp_path, capsys):
    """The weights are bit-identical to a run of 4 updates, because neither the learning rate nor beta depends on the
    length of this run."""
    train_ppo.main(["--resume", "--resume-anyway", "--num-iterations", "4", "--output", str(finished)])
    assert "resuming after update 2 of 4" in capsys.readouterr().out
    record = RunRecord.read(finished)
    assert record.status == "finished" and record.plan.updates == 4 == record.spent.updates
    assert record.flat_settings["num_iterations"] == 4 and record.flat_settings["resume"] is False
    train_ppo.main(run_flags("--num-iterations", 4, *FLAGS, "--output", tmp_path / "uninterrupted"))
    extended, uninterrupted = (
        load_file(folder / "model.safetensors") for folder in (finished, tmp_path / "uninterrupted")
    )
    assert all((extended[name] == uninterrupted[name]).all() for name in extended)


def test_fewer_updates_than_the_run_has_are_refused(finished, user_error):
    with user_error(2, 1, "--resume"):
        train_ppo.main(["--resume", "--resume-anyway", "--num-iterations", "1", "--output", str(finished)])


def test_unchanged_settings_train_nothing(finished, capsys):
    train_ppo.main(["--resume", "--num-iterations", "2", "--output", str(finished)])
    assert "There is nothing to train" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--num-iterations", "1"], ["--num-iterations", "4", "--save-every", "7"]])
def test_refused_command_leaves_run_json_unchanged(finished, words):
    before = (finished / "run.json").read_text()
    for state in finished.glob("checkpoint-*/training.json"):
        if "4" in words:
            rewrite_file(state.parent, "training.json", "{}")  # no checkpoint can be loaded
    with pytest.raises(UserError):
        train_ppo.main(["--resume", "--resume-anyway", *words, "--output", str(finished)])
    assert (finished / "run.json").read_text() == before


def test_interrupted_extension_keeps_the_update_of_the_final_weights(finished):
    """The weights in the run folder are still those of update 2, although 9 updates are planned now."""
    words = ["--resume", "--resume-anyway", "--num-iterations", "9", "--output", str(finished)]
    stop_after(4, lambda: run(words, 130))
    record = RunRecord.read(finished)
    assert record.status == "stopped" and record.plan.updates == 9
    assert find_model_ref(str(finished), "final", None).update == 2

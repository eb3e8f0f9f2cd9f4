"""Every command on disks that refuse one call of the system: shared folders, FAT, FUSE, folders of other users."""

from __future__ import annotations

import os

import pytest

from rlhf.checkpoints.manifest import find_checkpoints
from rlhf.checkpoints.run_record import RunRecord
from tests.forks import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has other disks, and no fork")

# a program that lets calls fail, notes that they did, and then runs a command
SHIM = """
import errno, fcntl, os, runpy, sys

noted, *command = sys.argv[2:]

def refused(calls, number):
    def refuse(*arguments, **named):
        with open(noted, "a") as file:
            file.write(f"{calls}\\n")
        raise OSError(number, os.strerror(number))

    return refuse

modules = {"chmod": (os, "chmod", "fchmod"), "sync": (os, "fsync"), "link": (os, "link", "symlink"),
           "lock": (fcntl, "flock")}
for calls in sys.argv[1].split(","):
    calls, _, error = calls.partition("=")
    module, *names = modules[calls]
    for name in names:
        setattr(module, name, refused(calls, getattr(errno, error)))
sys.argv = command
runpy.run_path(command[0], run_name="__main__")
"""


REFUSED = ["chmod=EPERM", "sync=EINVAL", "link=EPERM", "lock=ENOLCK"]


@pytest.mark.parametrize("calls", [",".join(REFUSED), *(pytest.param(call, marks=pytest.mark.ci) for call in REFUSED)])
def test_commands_work_on_a_disk_without_a_call(forks, start_model, pairs_file, tmp_path, calls):
    """Training with an export, the model's evaluation, comparison and plot, and a reward model. First a disk refuses
    all calls, and in the ci tier one call each."""
    (tmp_path / "shim.py").write_text(SHIM)
    (tmp_path / "rules.py").write_text("def f(completions):\n    return [float(len(c)) for c in completions]\n")
    noted = tmp_path / "noted.txt"
    rule = ["--reward-func", "rules.py:f"]
    commands = {
        "training": ["train_grpo.py", "--actor-model", start_model, "--rm-model", "none", "--prompts", pairs_file,
                     "--batch-size", 2, "--K", 2, "--num-iterations", 2, "--save-every", 1, "--eval-prompts", 4,
                     "--max-new-tokens", 4, "--use-lora", "--merge-lora", "--output", "run", *rule],
        "evaluation": ["evaluate_generations.py", "--model-path", "run", "--num-prompts", 3, *rule],
        "comparison": ["compare_runs.py", "run", "--num-prompts", 3, *rule],
        "plot": ["plot_training_progress.py", "run"],
        "reward model": ["reward_model/train.py", "--base-model", start_model, "--actor-model", "none",
                         "--pairs", pairs_file, "--rm-output", "rm"],
    }  # fmt: skip
    for name, (script, *flags) in commands.items():
        done = forks.run(["shim.py", calls, str(noted), str(ROOT / script), *map(str, flags)], tmp_path)
        assert done.returncode == 0, (name, done.stderr)
        warnings = done.stderr.splitlines()
        assert all("locks" in line for line in warnings) and len(warnings) <= ("lock" in calls), (name, done.stderr)
    assert set(noted.read_text().split()) == {call.partition("=")[0] for call in calls.split(",")}
    assert RunRecord.read(tmp_path / "run").status == "finished"
    assert len(find_checkpoints(tmp_path / "run", RunRecord.read(tmp_path / "run").id).valid) == 2
    for file in ("run/merged/model.safetensors", "evaluation_output/evaluation.json", "rm/model.safetensors",
                 "comparison_output/comparison.html"):  # fmt: skip
        assert (tmp_path / file).is_file()


@pytest.mark.ci
def test_full_disk_in_a_command_names_its_output(forks, runs, tmp_path):
    """Evaluation, comparison and plot: the line has the file or the output, and how to fix this disk."""
    (tmp_path / "full.py").write_text(FULL)
    run = str(runs["ppo", 1])
    for script, flags in (("evaluate_generations.py", ["--model-path", run]), ("compare_runs.py", [run]),
                          ("plot_training_progress.py", [run])):  # fmt: skip
        more = [] if script.startswith("plot") else ["--num-prompts", "3"]
        done = forks.run(["full.py", str(ROOT / script), *flags, *more, "--output", "made/x"], tmp_path)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 1 and "No space left" in line and "made/x" in line and "ree disk space" in line


# a program in which no file can grow: Python's own error of a full disk has no file name
FULL = """
import errno, os, runpy, sys
from pathlib import Path

Path("made").mkdir(exist_ok=True)

def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def savefig(figure, place, **named):
    return full() if isinstance(place, Path) else original(figure, place, **named)

Path.write_bytes = full
from matplotlib.figure import Figure

original, Figure.savefig = Figure.savefig, savefig
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

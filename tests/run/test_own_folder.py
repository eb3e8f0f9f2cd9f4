"""Tests that a run writes only into its own folder: if the folder is moved away while the run trains, what is at its
path afterwards is never changed, and the run ends with an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import train_grpo
import train_ppo
from rlhf.callbacks import checkpointing, incidents
from rlhf.checkpoints.manifest import find_checkpoints
from rlhf.checkpoints.run_folder import RunLock
from rlhf.checkpoints.run_record import RunRecord
from rlhf.run import export, resume, session, summary
from rlhf.trainer.collect import RolloutCollector
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils import system
from rlhf.utils.errors import run_command
from rlhf.utils.paths import NEW

pytestmark = pytest.mark.skipif(system.WINDOWS, reason="Windows does not rename a folder with open files")
FAST = ("--save-every", 1, "--eval-every", 1, "--record-tokens")


def content(folder: Path) -> dict[str, bytes | None]:
    """Return the bytes of every file, and None for every folder, without those that a process was writing."""
    paths = [path for path in folder.rglob("*") if NEW not in str(path)]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def before_call(patch, owner, name: str, act: Callable[[], object], number: int = 1) -> None:
    """Call `act` once, before call `number` of a function."""
    original = getattr(owner, name)
    calls = []

    def replaced(*given, **named):
        calls.append(name)
        if len(calls) == number:
            act()
        return original(*given, **named)

    patch.setattr(owner, name, replaced)


class Takeover:
    """Moves the folder of a run to `moved`, and copies another folder to its path."""

    def __init__(self, output: Path, other: Path | None):
        self.output, self.moved, self.other = output, output.with_name("moved"), other
        self.found: dict[str, bytes | None] | None = None

    def __call__(self) -> None:
        self.output.rename(self.moved)
        if self.other is not None:
            shutil.copytree(self.other, self.output)
            self.found = content(self.output)

    def check(self) -> None:
        """Assert that it happened, and that the run has changed nothing since."""
        assert self.moved.is_dir()
        assert content(self.output) == (self.found or {})


# the function before whose call the folder is moved, and the number of the call
MOMENTS = {
    "the first evaluation": (OnPolicyLoop, "_evaluated", 1),
    "an update": (OnPolicyLoop, "update_step", 2),
    "the optimizer steps": (OnPolicyLoop, "advantages", 2),
    "saving a checkpoint": (checkpointing, "save_trainer_state", 2),
    "the last files of a checkpoint": (checkpointing, "hardlink_dir", 2),
    "saving best/": (checkpointing, "update_dir_atomically", 1),
    "the weights of best/": (OnPolicyLoop, "save_model", 1),
    "the figures at the end": (summary, "results_of", 1),
    "the final weights": (summary, "update_dir_atomically", 1),
    "the status": (session, "show_run_findings", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_whose_folder_was_moved_never_writes_into_another_one(
    run_flags, runs, tmp_path, monkeypatch, capsys, moment
):
    """The other one is a finished run."""
    takeover = Takeover(tmp_path / "run", runs["ppo", 2])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        before_call(patch, *MOMENTS[moment][:2], takeover, MOMENTS[moment][2])
        run_command(lambda: train_ppo.main(run_flags(*FAST)))
    err = capsys.readouterr().err
    assert ended.value.code == 1 and err.count("error: ") == 1 and str(takeover.output) in err
    assert "--resume --output" in err and "bug" not in err and "Free disk space" not in err
    takeover.check()


@pytest.mark.parametrize(
    "moment", ["an update", pytest.param("saving a checkpoint", marks=pytest.mark.ci), "the status"]
)
def test_the_same_with_a_copy_of_the_runs_folder_and_with_none(run_flags, tmp_path, monkeypatch, capsys, moment):
    """A copy has the same run.json and the same lock file. Another process may have resumed it."""
    for kind in ("copy", "none"):
        takeover = Takeover(tmp_path / kind / "run", None)
        takeover.other = takeover.moved if kind == "copy" else None
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            before_call(patch, *MOMENTS[moment][:2], takeover, MOMENTS[moment][2])
            run_command(lambda output=takeover.output: train_ppo.main(run_flags(*FAST, "--output", output)))
        assert capsys.readouterr().err.count("error: ") == 1
        if kind == "copy":
            takeover.check()
        else:
            assert not any(takeover.output.glob("*")), "it may be on a disk that was unmounted"
    shutil.rmtree(tmp_path / "copy" / "run")
    (tmp_path / "copy" / "moved").rename(tmp_path / "copy" / "run")
    train_ppo.main(["--resume", "--output", str(tmp_path / "copy" / "run")])
    assert RunRecord.read(tmp_path / "copy" / "run").status == "finished"


def test_the_folder_is_checked_once_per_event(run_flags, monkeypatch):
    """Each check reads a file, and the disk may be slow."""
    checks = []
    before = []
    original = RunLock.check
    update_step = OnPolicyLoop.update_step
    monkeypatch.setattr(RunLock, "check", lambda self: checks.append(original(self)))

    def counted(self, update):
        before.append(len(checks))
        return update_step(self, update)

    monkeypatch.setattr(OnPolicyLoop, "update_step", counted)
    train_ppo.main(run_flags("--num-iterations", 3, "--save-every", 3, "--eval-every", 3, "--record-tokens"))
    assert before[2] - before[1] <= 4  # batch, end of the update, end of an epoch, update done


def test_the_error_of_the_run_is_reported_with_that_of_the_folder(run_flags, runs, tmp_path, monkeypatch, capsys):
    """The reward function raises after the folder was moved. Its inputs are not saved in the other run."""
    code = "def broken(completions, **_):\n    return [0.0] * 6 if len(completions) == 6 else ['a wrong value']\n"
    (tmp_path / "mine.py").write_text(code)  # six evaluation prompts
    takeover = Takeover(tmp_path / "run", runs["ppo", 2])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        before_call(patch, RolloutCollector, "sample", takeover)
        flags = run_flags("--rm-model", "none", "--reward-func", f"{tmp_path / 'mine.py'}:broken", *FAST)
        run_command(lambda: train_ppo.main(flags))
    err = capsys.readouterr().err
    assert ended.value.code == 1 and "broken" in err and "OTHER_FOLDER" in err
    takeover.check()


def test_a_run_that_gives_up_renames_no_checkpoint_of_a_copy(run_flags, tmp_path, monkeypatch, capsys):
    """Three skipped updates end a run: it saves an incident, and renames the checkpoints of its last weights."""
    from rlhf.trainer.safety import SkipUpdate

    takeover = Takeover(tmp_path / "run", tmp_path / "moved")

    def skip(self, rollout, scores):
        raise SkipUpdate("a reason", rows=[])

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(OnPolicyLoop, "advantages", skip)
        before_call(patch, incidents.Incidents, "on_update_skipped", takeover, number=2)
        run_command(lambda: train_ppo.main(run_flags(*FAST, "--num-iterations", 4)))
    assert capsys.readouterr().err.count("error: ") == 1
    takeover.check()


def test_a_resumed_run_restores_best_only_in_its_own_folder(run_flags, runs, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        before_call(patch, OnPolicyLoop, "update_step", lambda: (_ for _ in ()).throw(KeyboardInterrupt), 2)
        train_ppo.main(run_flags(*FAST))
    takeover = Takeover(tmp_path / "run", runs["ppo", 2])
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        before_call(patch, resume, "hardlink_dir", takeover)
        run_command(lambda: train_ppo.main(["--resume", "--output", str(takeover.output)]))
    assert capsys.readouterr().err.count("error: ") == 1
    takeover.check()


def test_a_finished_run_is_exported_only_in_its_own_folder(runs, tmp_path, monkeypatch, capsys):
    """Merging takes minutes, and the run is finished already."""
    shutil.copytree(runs["grpo", 1], tmp_path / "run")
    takeover = Takeover(tmp_path / "run", runs["ppo", 2])
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        before_call(patch, export, "untie_adapted_head", takeover)
        run_command(lambda: train_grpo.main(["--resume", "--merge-lora", "--output", str(takeover.output)]))
    assert capsys.readouterr().err.count("error: ") == 1
    takeover.check()


def test_a_run_is_exported_by_one_process_at_a_time(runs, tmp_path, monkeypatch, capsys):
    shutil.copytree(runs["grpo", 1], tmp_path / "run")
    words = ["--resume", "--merge-lora", "--output", str(tmp_path / "run")]

    def second() -> None:
        with pytest.raises(SystemExit):
            run_command(lambda: train_grpo.main(words))

    before_call(monkeypatch, export, "load_adapter", second)
    train_grpo.main(words)
    assert "in use" in capsys.readouterr().err
    assert (tmp_path / "run" / "merged" / "model.safetensors").is_file()


def test_an_error_in_the_final_save_leaves_the_older_final_model(run_flags, tmp_path, monkeypatch, capsys):
    """The run was finished before, and is trained further."""
    from transformers import PreTrainedTokenizerFast

    output = tmp_path / "run"
    train_ppo.main(run_flags(*FAST))
    before = {path.name: path.read_bytes() for path in output.iterdir() if path.is_file() and path.name != "run.json"}
    original = PreTrainedTokenizerFast.save_pretrained

    def save(self, folder, *given, **named):
        if output in (Path(folder), Path(folder).parent) and not Path(folder).name.startswith(("checkpoint", "best")):
            raise OSError(28, "No space left on device", str(folder))
        return original(self, folder, *given, **named)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", save)
        more = ["--resume", "--resume-anyway", "--num-iterations", "3", "--output", str(output)]
        run_command(lambda: train_ppo.main(more))
    assert ended.value.code == 1 and "No space left" in capsys.readouterr().err
    after = {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
    changed = [name for name in before if before[name] != after[name] and name not in ("metrics.jsonl", "run.lock")]
    assert changed == [] and not list(output.rglob(f"*{NEW}*"))
    train_ppo.main(["--resume", "--output", str(output)])
    run = RunRecord.read(output)
    newest = find_checkpoints(output, run.id).newest
    assert run.status == "finished" and newest.name == "checkpoint-3"
    final = (output / "model.safetensors").read_bytes()
    assert final == (newest / "model.safetensors").read_bytes() != before["model.safetensors"]

"""Resuming: bit for bit the run that was not interrupted, whatever ended it, and never another run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import train_grpo
import train_ppo
from rlhf.callbacks import checkpointing, kl, logging
from rlhf.checkpoints.manifest import MANIFEST, find_checkpoints
from rlhf.checkpoints.run_folder import LOCK_FILE
from rlhf.checkpoints.run_record import RunRecord
from rlhf.utils import system
from rlhf.utils.errors import UserError, run_command
from tests.kills import differing, scalars
from tests.scripts.test_scripts import ROOT

SCRIPTS = {"ppo": train_ppo, "grpo": train_grpo}
MORE = {
    "ppo": ["--kl-coef", 0.1, "--normalize-scores"],
    "grpo": ["--batch-size", 2, "--K", 2, "--use-lora"],
}


@pytest.fixture(scope="module")
def words(start_model, reward_folder, pairs_file):
    """A function from an algorithm to the flags of a short run of it."""

    def flags(algorithm: str, *more: object) -> list[str]:
        common = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file,
                  "--allow-weak-reward-model", "--num-iterations", 6, "--save-every", 2, "--eval-every", 3,
                  "--batch-size", 4, "--max-new-tokens", 8, "--prompt-length", 100, "--eval-prompts", 6,
                  "--learning-rate", "1e-3"]  # fmt: skip
        return [str(word) for word in (*common, *MORE[algorithm], *more)]

    return flags


class Killed(BaseException):
    """In place of a signal that nobody can catch."""


def interrupt(monkeypatch, update: int, error: BaseException) -> None:
    """The run ends at the beginning of an update."""
    from rlhf.trainer.loop import OnPolicyLoop

    really = OnPolicyLoop.update_step

    def update_step(self, number):
        if number == update:
            raise error
        return really(self, number)

    monkeypatch.setattr(OnPolicyLoop, "update_step", update_step)


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory):
    """Runs that nobody interrupted, by algorithm."""
    folder = tmp_path_factory.mktemp("whole")
    for algorithm, script in SCRIPTS.items():
        script.main([*words(algorithm), "--output", str(folder / algorithm)])
    return folder


def broken_off(words, output: Path, monkeypatch, algorithm="ppo", update=6, error=None, more=()) -> Path:
    with monkeypatch.context() as patch, pytest.raises(BaseException) as raised:
        interrupt(patch, update, error or Killed())
        SCRIPTS[algorithm].main([*words(algorithm, *more), "--output", str(output)])
    assert isinstance(raised.value, type(error or Killed())), raised.value
    return output


def test_a_resumed_run_has_its_critic(words, tmp_path, monkeypatch):
    critic = ["--critic", "separate", "--use-lora"]
    train_ppo.main([*words("ppo", *critic), "--output", str(tmp_path / "whole")])
    output = broken_off(words, tmp_path / "run", monkeypatch, more=critic)
    train_ppo.main(["--resume", "--output", str(output)])
    assert (output / "critic.safetensors").exists() and differing(tmp_path / "whole", output) == []


@pytest.mark.parametrize("algorithm", SCRIPTS)
@pytest.mark.parametrize("update", [3, 4, 6])
def test_a_resumed_run_is_the_uninterrupted_one(words, whole, tmp_path, monkeypatch, capsys, algorithm, update):
    output = broken_off(words, tmp_path / "run", monkeypatch, algorithm, update)
    SCRIPTS[algorithm].main(["--resume", "--output", str(output)])
    printed = capsys.readouterr().out
    assert f"resuming after update {(update - 1) // 2 * 2} of 6" in printed
    assert differing(whole / algorithm, output) == []
    run, plain = RunRecord.read(output), RunRecord.read(whole / algorithm)
    assert run.status == "finished" and len(run.sessions) == 1 and run.best.update == plain.best.update
    unlike = {"seconds", "peak_memory_gib"}
    same = [{k: v for k, v in record.figures.items() if k not in unlike} for record in (run, plain)]
    assert same[0] == same[1] and run.spent == plain.spent
    samples = [sorted((one / "samples").iterdir()) for one in (output, whole / algorithm)]
    assert [f.read_bytes() for f in samples[0]] == [f.read_bytes() for f in samples[1]]


def test_the_comparison_sees_a_difference(whole, tmp_path):
    other = Path(shutil.copytree(whole / "ppo", tmp_path / "other"))
    shutil.copy(whole / "ppo" / "checkpoint-4" / "value_head.safetensors", other / "value_head.safetensors")
    log = next((other / "logs").iterdir())
    log.write_bytes(log.read_bytes()[:-400])
    found = differing(whole / "ppo", other)
    assert "other/value_head.safetensors differs" in found and len(found) > 1


def test_torn_checkpoints_are_named_and_an_older_one_serves(words, whole, tmp_path, monkeypatch, capsys):
    output = broken_off(words, tmp_path / "run", monkeypatch)
    torn = output / "checkpoint-4" / "training.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    train_ppo.main(["--resume", "--output", str(output)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "skipped an invalid checkpoint: checkpoint-4: training.safetensors has" in printed
    assert "Using checkpoint-2" in printed
    assert differing(whole / "ppo", output) == []


def test_no_valid_checkpoint_says_why_of_each(words, tmp_path, monkeypatch):
    output = broken_off(words, tmp_path / "run", monkeypatch)
    for place in output.glob("checkpoint-*"):
        (place / MANIFEST).unlink()
    with pytest.raises(UserError) as raised:
        train_ppo.main(["--resume", "--output", str(output)])
    assert [fault.split(",")[1].split(":")[0].strip() for fault in raised.value.problems] == [
        "checkpoint-2", "checkpoint-4",
    ]  # fmt: skip
    assert all("no valid checkpoint" in fault and "--overwrite" in fault for fault in raised.value.problems)


def test_a_run_that_had_saved_nothing_is_begun_anew(words, whole, tmp_path, monkeypatch, capsys):
    output = broken_off(words, tmp_path / "run", monkeypatch, update=2)
    (output / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="learning_rate was 0.001 in this run and is 0.5 now"):
        train_ppo.main(["--resume", "--learning-rate", "0.5", "--output", str(output)])
    train_ppo.main(["--resume", "--dry-run", "--output", str(output)])
    assert (output / "notes.txt").exists(), "a plan moves nothing"
    train_ppo.main(["--resume", "--output", str(output)])
    assert "this run stopped before its first checkpoint" in capsys.readouterr().out
    assert (tmp_path / "run_1" / "notes.txt").read_text() == "mine", "what lay there is moved, not removed"
    assert differing(whole / "ppo", output) == []


def test_a_finished_run_has_nothing_to_go_on_with(whole, capsys):
    before = (whole / "ppo" / "run.json").read_bytes()
    train_ppo.main(["--resume", "--output", str(whole / "ppo")])
    assert "this run is already finished" in capsys.readouterr().out
    assert (whole / "ppo" / "run.json").read_bytes() == before


def test_no_run_to_resume_is_a_line(tmp_path):
    with pytest.raises(UserError, match=r"folder not found: --resume, --output .*nowhere"):
        train_ppo.main(["--resume", "--output", str(tmp_path / "nowhere")])


def test_the_other_algorithms_run_is_refused(words, tmp_path, monkeypatch):
    output = broken_off(words, tmp_path / "run", monkeypatch, update=3)
    with pytest.raises(UserError, match=r"this is a run of train_ppo.py: --resume"):
        train_grpo.main(["--resume", "--output", str(output)])


def test_changed_settings_are_listed_and_refused(words, tmp_path, monkeypatch, capsys):
    output = broken_off(words, tmp_path / "run", monkeypatch, update=3)
    with pytest.raises(UserError) as raised:
        train_ppo.main(["--resume", "--output", str(output), "--learning-rate", "0.5", "--seed", "7"])
    assert [fault.split(". ")[0] for fault in raised.value.problems] == [
        "cannot resume: learning_rate was 0.001 in this run and is 0.5 now",
        "cannot resume: seed was 42 in this run and is 7 now",
    ]
    assert all("--resume-anyway" in fault for fault in raised.value.problems)
    train_ppo.main(["--resume", "--output", str(output), "--learning-rate", "0.5", "--resume-anyway"])
    assert "resuming although learning_rate was 0.001 in this run and is 0.5 now" in " ".join(
        capsys.readouterr().out.split()
    )


def test_whoever_goes_on_anyway_gets_what_they_ask_for(words, tmp_path, monkeypatch):
    """The learning rate is the new one, and parts that the run did not have begin now."""
    plain = ["--kl-schedule", "fixed", "--no-normalize-scores", "--lr-schedule", "constant"]
    output = broken_off(words, tmp_path / "run", monkeypatch, update=3, more=plain)
    train_ppo.main(["--resume", "--output", str(output), "--resume-anyway", "--learning-rate", "1e-7",
                    "--kl-schedule", "adaptive", "--normalize-scores"])  # fmt: skip
    rates = scalars(output / "logs")["learning_rate"]
    assert [rate for _, rate in rates] == pytest.approx([1e-3] * 2 + [1e-7] * 4)


def test_best_is_what_the_checkpoint_knew(words, tmp_path, monkeypatch):
    """Kept after the checkpoint that the run goes on from: of a time that is done again, perhaps otherwise."""
    output = broken_off(words, tmp_path / "run", monkeypatch, update=4, more=["--eval-every", 1, "--save-every", 2])
    kept = output / "checkpoint-2" / "best" / "model.safetensors"
    assert RunRecord.read(output).best.update is not None and kept.stat().st_ino != 0
    then = kept.read_bytes()
    (output / "best" / "model.safetensors").unlink()
    (output / "best" / "model.safetensors").write_bytes(b"of another time")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, 3, Killed())
        train_ppo.main(["--resume", "--output", str(output)])
    assert (output / "best" / "model.safetensors").read_bytes() == then
    assert (output / "best" / "model.safetensors").samefile(kept), "the same file twice: it takes no room"


def test_other_models_and_rules_are_refused(words, tmp_path, monkeypatch, reward_folder):
    reward = Path(shutil.copytree(reward_folder, tmp_path / "reward"))
    rule = tmp_path / "rule.py"
    rule.write_text("def words(completions, **_):\n    return [float(len(c.split())) for c in completions]\n")
    code = ["--reward-func", f"{rule}:words"]
    more = ["--rm-model", reward, *code]
    output = broken_off(words, tmp_path / "run", monkeypatch, update=3, more=more)
    rule.write_text(rule.read_text().replace("len", "2 * len"))
    with pytest.raises(UserError, match=r"rules was .* in this run and is .* now\. .*--resume-anyway"):
        train_ppo.main(["--resume", *code, "--output", str(output)])
    rule.write_text(rule.read_text().replace("2 * len", "len"))
    weights = load_file(reward / "model.safetensors")
    save_file({**weights, "score.weight": weights["score.weight"] * 2}, reward / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"reward_model was \w+ in this run and is \w+ now"):
        train_ppo.main(["--resume", *code, "--output", str(output)])


def test_harmless_settings_may_change(words, whole, tmp_path, monkeypatch):
    output = broken_off(words, tmp_path / "run", monkeypatch, update=3)
    train_ppo.main(["--resume", "--output", str(output), "--save-every", "1", "--keep", "5", "--record-tokens"])
    assert differing(whole / "ppo", output) == []
    assert len(find_checkpoints(output, RunRecord.read(output).id).valid) == 5


def test_other_data_and_versions_are_refused(words, tmp_path, monkeypatch, pairs_file):
    output = broken_off(words, tmp_path / "run", monkeypatch, update=3)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(pairs_file.read_text().splitlines(keepends=True)[:100]))
    file = output / "run.json"
    run = json.loads(file.read_text())
    run["settings"]["data"]["prompts"], run["versions"]["trl"] = str(fewer), "0.1"
    file.write_text(json.dumps(run))
    with pytest.raises(UserError, match=r"trl was 0.1 in this run and is 1\.12"):
        train_ppo.main(["--resume", "--output", str(output)])
    run["versions"]["trl"] = "1.12.0"
    file.write_text(json.dumps(run))
    with pytest.raises(UserError, match=r"train_prompts was \d+ in this run and is \d+ now"):
        train_ppo.main(["--resume", "--output", str(output)])


def test_several_seeds_go_on_each_from_where_it_was(words, tmp_path, monkeypatch, capsys):
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    seeds = ["--seeds", "1", "2", "3"]
    train_ppo.main([*words("ppo", *seeds), "--output", str(plain)])
    from rlhf.trainer.loop import OnPolicyLoop

    really = OnPolicyLoop.update_step

    def update_step(self, number):
        if self.config.run.seed == 2 and number == 4:
            raise Killed
        return really(self, number)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(OnPolicyLoop, "update_step", update_step)
        train_ppo.main([*words("ppo", *seeds), "--output", str(broken)])
    train_ppo.main([*seeds, "--resume", "--dry-run", "--output", str(broken)])
    assert "this run is already finished" in capsys.readouterr().out, "seed 1; the plan of the others comes after it"
    train_ppo.main([*seeds, "--resume", "--output", str(broken)])
    output = capsys.readouterr().out
    assert "seed 1: already finished" in output and "resuming after update 2 of 6" in output
    for seed in (1, 2, 3):
        assert differing(Path(f"{plain}_seed{seed}"), Path(f"{broken}_seed{seed}")) == []


# --- stopping --------------------------------------------------------------------------------------------------------


def started(words, output: Path, *more: object) -> subprocess.Popen:
    """A long run in a process of its own, past its second update."""
    flags = words("ppo", "--num-iterations", 100_000, "--eval-every", 100_000, *more)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "train_ppo.py", *flags, "--output", str(output)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (output / "checkpoint-2").exists():
        assert process.poll() is None, process.communicate()[1]
    return process


@pytest.mark.skipif(system.WINDOWS, reason="Windows sends no such signals to a single process")
@pytest.mark.parametrize("which", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.ci)])
def test_asked_to_stop_a_run_saves_and_says_how_to_go_on(words, tmp_path, which):
    output = tmp_path / "run"
    process = started(words, output, "--save-every", 2)
    process.send_signal(which)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + which
    assert "finishing and saving this update" in out
    assert "stopped after update" in err and f"python train_ppo.py --resume --output {output}" in err
    assert "Traceback" not in err
    run = RunRecord.read(output)
    assert run.status == "stopped"
    newest = find_checkpoints(output, run.id).newest
    assert f"stopped after update {newest.name.removeprefix('checkpoint-')} of" in err


@pytest.mark.skipif(system.WINDOWS, reason="Windows sends no such signals to a single process")
def test_a_second_one_stops_at_once(words, tmp_path, monkeypatch):
    from rlhf.utils.signals import GracefulStop

    text, before = [], signal.getsignal(signal.SIGINT)
    with GracefulStop(text.append) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.by == signal.SIGINT and len(text) == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_asked_to_stop_in_the_last_update_a_run_is_finished(words, tmp_path, monkeypatch):
    output = tmp_path / "run"
    really = kl.KLControl.on_update_end

    def late(self, update, metrics):
        really(self, update, metrics)
        if update == 6:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(kl.KLControl, "on_update_end", late)
    train_ppo.main([*words("ppo"), "--output", str(output)])
    assert RunRecord.read(output).status == "finished"


def test_a_second_run_into_the_same_folder_is_refused(words, tmp_path):
    process = started(words, tmp_path / "run")
    try:
        for more in ([], ["--overwrite"]):
            with pytest.raises(
                UserError, match=rf"the folder is in use by a running process \(PID {process.pid}, started 20"
            ):
                train_ppo.main([*words("ppo"), *more, "--output", str(tmp_path / "run")])
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "run" / LOCK_FILE).exists()
    system.lock(tmp_path / "run" / LOCK_FILE).close()  # whoever died has let go of it


# --- the disk --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_every_file_of_a_save_that_does_not_fit(words, whole, tmp_path, monkeypatch, capsys):
    """Each in turn is a link to a device that is always full; safetensors, which puts its file in the link's place,
    may write no more than 100 bytes. So the error is the system's own, in every writer."""
    import resource

    import safetensors.torch

    write_tensors = safetensors.torch.serialize_file
    files = sorted(f.name for f in (whole / "ppo" / "checkpoint-6").iterdir() if f.is_file())
    assert {"model.safetensors", "training.safetensors", "training.json", MANIFEST} <= set(files)
    really, failed = checkpointing.write_checkpoint, []

    for name in files:
        output = tmp_path / name

        def one_full(folder, run, update, keep, write, name=name):
            def fill(beside):
                if update == 6 and not name.endswith(".safetensors"):
                    (beside / name).symlink_to("/dev/full")
                write(beside)

            return really(folder, run, update, keep, fill)

        def one_short(data, filename, *more, name=name, **named):
            short = Path(filename).name == name and "checkpoint-6" in str(filename)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]) if short else limits)
            try:
                write_tensors(data, filename, *more, **named)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(safetensors.torch, "serialize_file", one_short)
            patch.setattr(checkpointing, "write_checkpoint", one_full)
            run_command(lambda output=output: train_ppo.main([*words("ppo"), "--output", str(output)]))
        err = capsys.readouterr().err
        assert ended.value.code == 1 and "Traceback" not in err, name
        assert "of update 6 could not be saved" in err and "the newest checkpoint is checkpoint-4" in err, name
        assert any(said in err for said in ("No space left", "os error 28", "os error 27")), (name, err)
        assert sorted(find_checkpoints(output, RunRecord.read(output).id).valid) == [2, 4]
        failed.append(name)
    assert failed == files
    train_ppo.main(["--resume", "--output", str(tmp_path / files[0])])
    assert differing(whole / "ppo", tmp_path / files[0]) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_elsewhere_is_a_line(words, tmp_path, monkeypatch, capsys):
    from rlhf.trainer.evaluation import Evaluation

    def write(self, folder, prompts):
        with Path("/dev/full").open("w") as file:
            file.write("x")

    monkeypatch.setattr(Evaluation, "write", write)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: train_ppo.main([*words("ppo"), "--output", str(tmp_path / "run")]))
    err = capsys.readouterr().err
    assert ended.value.code == 1 and err.startswith("error: No space left on device") and "--resume" in err


def test_a_folder_that_vanishes_is_a_line_and_is_not_made_anew(words, tmp_path, monkeypatch, capfd):
    """As where a disk is unmounted: what is then written to the same path would be lost below the next mount."""
    from rlhf.trainer.loop import OnPolicyLoop

    output, really = tmp_path / "run", OnPolicyLoop.update_step

    def update_step(self, number):
        if number == 5:
            output.rename(tmp_path / "elsewhere")
        return really(self, number)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(OnPolicyLoop, "update_step", update_step)
        run_command(lambda: train_ppo.main([*words("ppo"), "--output", str(output)]))
    err = capfd.readouterr().err
    assert ended.value.code == 1 and "Traceback" not in err
    assert err.startswith("error: ") and str(output) in err and "--resume" in err
    assert not output.exists()
    (tmp_path / "elsewhere").rename(output)
    train_ppo.main(["--resume", "--output", str(output)])
    assert RunRecord.read(output).status == "finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_disk_too_full_for_curves_is_a_line(words, tmp_path, monkeypatch, capfd):
    """TensorBoard writes in a thread of its own, whose error Python would print as a traceback."""
    output, really = tmp_path / "run", logging.TensorBoardLog.on_train_begin

    def full(self, trainer):
        really(self, trainer)
        self.on_update_end(0, {"x": 1.0})
        self.writer.flush()
        file = next((output / "logs").iterdir())
        file.unlink()
        file.symlink_to("/dev/full")

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(logging.TensorBoardLog, "on_train_begin", full)
        run_command(lambda: train_ppo.main([*words("ppo"), "--output", str(output)]))
    err = capfd.readouterr().err
    assert ended.value.code == 1 and "Traceback" not in err, err
    assert err.startswith(f"error: No space left on device: {output}. ")


# --- kills -----------------------------------------------------------------------------------------------------------


KILLS = [4, pytest.param(10, marks=pytest.mark.ci), pytest.param(25, marks=pytest.mark.proof)]


@pytest.mark.skipif(system.WINDOWS, reason="Windows has no fork")
@pytest.mark.parametrize("count", KILLS)
@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_killed_at_any_instant_a_run_is_not_lost(words, tmp_path, algorithm, count):
    """Set KILLS for more of them in the proof."""
    if count == 25:
        count = int(os.environ.get("KILLS", count))
    flags = [word for word in words(algorithm, "--save-every", 1)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kills", str(count), "1", str(tmp_path), f"train_{algorithm}", *flags],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["problems"] == []
    assert told["killed"] >= count and told["in_a_save"] >= count * 10 // 25
    assert told["resumed"] + told["started_again"] == told["killed"]
    # a run that is killed before its first checkpoint begins anew: of few kills these may be many
    assert told["resumed"] > told["killed"] / 2 if count >= 25 else told["resumed"] >= told["killed"] // 4

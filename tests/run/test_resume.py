"""Tests of --resume: after any interruption the result is bit-identical to the uninterrupted run. A run with changed
settings, data or code is refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_grpo
import train_ppo
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.models import find_models
from rlhf.callbacks import checkpointing, logging
from rlhf.checkpoints.manifest import MANIFEST, find_checkpoints
from rlhf.checkpoints.run_folder import LOCK_FILE
from rlhf.checkpoints.run_record import RunRecord
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.translate import REMOVED
from rlhf.trainer.kl import KLControl
from rlhf.utils import system
from rlhf.utils.console import Screen
from rlhf.utils.errors import run_command
from tests.kills import differing, scalars
from tests.scripts.test_scripts import ROOT
from tests.shapes import with_date

SCRIPTS = {"ppo": train_ppo, "grpo": train_grpo}
ALGORITHM_FLAGS = {
    "ppo": ["--kl-coef", 0.1, "--normalize-scores"],
    "grpo": ["--batch-size", 2, "--K", 2, "--use-lora"],
}


@pytest.fixture(scope="module")
def words(start_model, reward_folder, pairs_file):
    """Return a function that makes the flags of a short run of an algorithm."""

    def flags(algorithm: str, *more: object) -> list[str]:
        common = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file,
                  "--allow-weak-reward-model", "--num-iterations", 6, "--save-every", 2, "--eval-every", 3,
                  "--batch-size", 4, "--max-new-tokens", 8, "--prompt-length", 100, "--eval-prompts", 6,
                  "--learning-rate", "1e-3"]  # fmt: skip
        return [str(word) for word in (*common, *ALGORITHM_FLAGS[algorithm], *more)]

    return flags


class Killed(BaseException):
    """Stands for a signal that a process cannot catch."""


def interrupt(monkeypatch, update: int, error: BaseException) -> None:
    """Makes every run raise `error` at the start of this update."""
    from rlhf.trainer.loop import OnPolicyLoop

    original = OnPolicyLoop.update_step

    def update_step(self, number):
        if number == update:
            raise error
        return original(self, number)

    monkeypatch.setattr(OnPolicyLoop, "update_step", update_step)


@pytest.fixture(scope="module")
def uninterrupted(words, made_once):
    """Return a folder with one uninterrupted run per algorithm."""

    def train(folder: Path) -> None:
        for algorithm, script in SCRIPTS.items():
            script.main([*words(algorithm), "--output", str(folder / algorithm)])

    return made_once("uninterrupted", train)


def interrupted_run(words, output: Path, algorithm="ppo", update=6, more=()) -> Path:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, update, Killed())
        SCRIPTS[algorithm].main([*words(algorithm, *more), "--output", str(output)])
    return output


@pytest.fixture(scope="module")
def interrupted(words, made_once):
    """Return a function that copies a run which was killed at the start of an update. Each one is trained once."""

    def copy(output: Path, algorithm="ppo", update=6) -> Path:
        def train(folder: Path) -> None:
            interrupted_run(words, folder / "run", algorithm, update)

        run = made_once(f"interrupted_{algorithm}_{update}", train) / "run"
        return Path(shutil.copytree(run, output))

    return copy


@pytest.mark.ci
def test_resume_restores_a_separate_critic(words, tmp_path):
    critic = ["--critic", "separate", "--use-lora"]
    train_ppo.main([*words("ppo", *critic), "--output", str(tmp_path / "uninterrupted")])
    output = interrupted_run(words, tmp_path / "run", more=critic)
    train_ppo.main(["--resume", "--output", str(output)])
    assert (output / "critic.safetensors").exists() and differing(tmp_path / "uninterrupted", output) == []


@pytest.mark.ci
def test_resume_with_stop_strings_and_worked_examples(words, tmp_path):
    """The text of --stop is given with a line break; run.json has it on one line."""
    (tmp_path / "shots.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n', encoding="utf-8")
    more = ["--stop", "e", "\n", "--few-shot", tmp_path / "shots.jsonl", "--prompt-length", 200]
    train_ppo.main([*words("ppo", *more), "--output", str(tmp_path / "uninterrupted")])
    output = interrupted_run(words, tmp_path / "run", more=more)
    train_ppo.main(["--resume", "--output", str(output)])
    assert differing(tmp_path / "uninterrupted", output) == []
    assert RunRecord.read(output).flat_settings["stop"] == ["e", r"\n"]


def test_prompts_of_a_run_have_the_date_of_its_start(start_model, words, tmp_path, on_day, capsys):
    """A resumption and an evaluation on later days render the prompts of the first day, also those of the start model
    and of a run that was started later."""
    more = ["--actor-model", with_date(start_model, tmp_path / "start"), "--num-iterations", 4]
    on_day("2026-11-07T23:58:00")
    train_ppo.main([*words("ppo", *more), "--output", str(tmp_path / "uninterrupted")])
    output = interrupted_run(words, tmp_path / "run", update=4, more=more)
    on_day("2026-11-08T00:01:00")
    capsys.readouterr()
    train_ppo.main(["--resume", "--output", str(output)])
    shown = capsys.readouterr().out
    assert "07 Nov 2026" in shown and "date" in shown and "08 Nov" not in shown
    assert differing(tmp_path / "uninterrupted", output) == []
    train_ppo.main([*words("ppo", *more), "--num-iterations", "1", "--output", str(tmp_path / "later")])
    on_day("2027-02-28T10:30:00")
    measure = MeasureSettings(completions=1)
    for names, day in ((("run", "later"), "07 Nov"), (("later", "run"), "08 Nov"), (("run/best",), "07 Nov")):
        models = find_models([str(tmp_path / name) for name in names], measure, "--model-path")
        evaluator = ModelEvaluator(models, measure, torch.device("cpu"), Screen())
        assert len(evaluator.tokenizers) == len(names) + 1, "the start model's and the runs'"
        for tokenizer in evaluator.tokenizers.values():
            assert all(day in tokenizer.decode(list(p.ids)) for p in evaluator.encoded(tokenizer))
        assert "2026-11" in dict(evaluator.facts())["date"]
    assert "prompts have changed" not in capsys.readouterr().out


def test_run_without_a_stored_date_has_that_of_its_start(interrupted, tmp_path):
    """Versions before this one did not store it."""
    output = interrupted(tmp_path / "run")
    content = json.loads((output / "run.json").read_text())
    del content["data"]["date"]
    content["started"] = "2026-11-07T12:00:00.000+00:00"
    (output / "run.json").write_text(json.dumps(content))
    assert RunRecord.read(output).date.startswith("2026-11-07")
    train_ppo.main(["--resume", "--output", str(output)])
    assert RunRecord.read(output).status == "finished"


@pytest.mark.ci
def test_resume_of_ppo_with_shared_prompts_and_greedy_evaluations(words, tmp_path):
    more = ["--batch-size", 2, "--K", 2, "--eval-temperature", 0]
    train_ppo.main([*words("ppo", *more), "--output", str(tmp_path / "uninterrupted")])
    output = interrupted_run(words, tmp_path / "run", update=4, more=more)
    train_ppo.main(["--resume", "--output", str(output)])
    assert differing(tmp_path / "uninterrupted", output) == []


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_resume_restores_eight_bit_adam_in_the_warm_up(words, wide_model, tmp_path, algorithm):
    """The run is killed in update 4 of a warm-up of 5, and resumes from the checkpoint of update 2."""
    more = ["--optim", "adamw_8bit", "--warmup-steps", 5, "--weight-decay", 0.1, "--no-use-lora"]
    more += ["--actor-model", wide_model]
    SCRIPTS[algorithm].main([*words(algorithm, *more), "--output", str(tmp_path / "uninterrupted")])
    output = interrupted_run(words, tmp_path / "run", algorithm, update=4, more=more)
    saved = load_file(output / "checkpoint-2" / "training.safetensors")
    assert {str(t.dtype) for name, t in saved.items() if name.endswith("/state1")} == {"torch.uint8", "torch.float32"}
    SCRIPTS[algorithm].main(["--resume", "--output", str(output)])
    assert differing(tmp_path / "uninterrupted", output) == []
    rates = scalars(output / "logs")["learning_rate"]
    assert [rate for _, rate in rates] == pytest.approx([0, 2e-4, 4e-4, 6e-4, 8e-4, 1e-3])


def test_resume_anyway_refuses_the_state_of_another_optimizer(interrupted, tmp_path, user_error):
    output = interrupted(tmp_path / "run")
    with user_error("adamw_8bit", "--optim"):
        train_ppo.main(["--resume", "--resume-anyway", "--optim", "adamw_8bit", "--output", str(output)])


@pytest.mark.parametrize("algorithm", SCRIPTS)
@pytest.mark.parametrize("update", [pytest.param(3, marks=pytest.mark.ci), pytest.param(4, marks=pytest.mark.ci), 6])
def test_resumed_run_is_identical_to_the_uninterrupted_run(
    interrupted, uninterrupted, tmp_path, capsys, algorithm, update
):
    output = interrupted(tmp_path / "run", algorithm, update)
    SCRIPTS[algorithm].main(["--resume", "--output", str(output)])
    saved = (update - 1) // 2 * 2
    assert f"update {saved} of 6, from {output / f'checkpoint-{saved}'}\n" in capsys.readouterr().out
    assert differing(uninterrupted / algorithm, output) == []
    run = RunRecord.read(output)
    plain = RunRecord.read(uninterrupted / algorithm)
    assert run.status == "finished" and len(run.sessions) == 1 and run.best.update == plain.best.update
    not_reproducible = {"seconds", "cpu_seconds", "peak_memory_gib"}
    same = [{k: v for k, v in record.figures.items() if k not in not_reproducible} for record in (run, plain)]
    assert same[0] == same[1] and run.spent == plain.spent
    samples = [sorted((one / "samples").iterdir()) for one in (output, uninterrupted / algorithm)]
    assert [f.read_bytes() for f in samples[0]] == [f.read_bytes() for f in samples[1]]


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_resumed_control_exchanges_the_scores_as_the_uninterrupted_one(words, tmp_path, algorithm, user_error):
    """Killed in update 4, so that update 3 is repeated from the checkpoint of update 2."""
    control = ["--control", "shuffled"]
    SCRIPTS[algorithm].main([*words(algorithm, *control), "--output", str(tmp_path / "uninterrupted")])
    output = interrupted_run(words, tmp_path / "run", algorithm, update=4, more=control)
    with user_error("control", "shuffled", "none"):
        SCRIPTS[algorithm].main(["--resume", "--control", "none", "--output", str(output)])
    SCRIPTS[algorithm].main(["--resume", "--output", str(output)])
    assert differing(tmp_path / "uninterrupted", output) == []


def test_differing_detects_differences(uninterrupted, tmp_path):
    other = Path(shutil.copytree(uninterrupted / "ppo", tmp_path / "other"))
    shutil.copy(uninterrupted / "ppo" / "checkpoint-4" / "value_head.safetensors", other / "value_head.safetensors")
    log = next((other / "logs").iterdir())
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    metrics = other / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    found = differing(uninterrupted / "ppo", other)
    assert {"other/value_head.safetensors differs", "metrics.jsonl differs"} < set(found)
    assert "loss differs, or has duplicate points" in found


def test_invalid_checkpoint_is_skipped_and_an_older_one_is_used(interrupted, uninterrupted, tmp_path, capsys):
    output = interrupted(tmp_path / "run")
    damaged = output / "checkpoint-4" / "training.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    train_ppo.main(["--resume", "--output", str(output)])
    printed = capsys.readouterr().out.splitlines()
    (line,) = [line for line in printed if "checkpoint-4: training.safetensors" in line]
    assert line.endswith("checkpoint-2")
    assert differing(uninterrupted / "ppo", output) == []


def test_without_a_valid_checkpoint_the_problem_of_each_is_listed(interrupted, tmp_path, user_error):
    output = interrupted(tmp_path / "run")
    for place in output.glob("checkpoint-*"):
        (place / MANIFEST).unlink()
    with user_error("--overwrite") as raised:
        train_ppo.main(["--resume", "--output", str(output)])
    assert [problem.split(",")[1].split(":")[0].strip() for problem in map(str, raised.value.problems)] == [
        "checkpoint-2", "checkpoint-4",
    ]  # fmt: skip
    assert all("--overwrite" in problem for problem in map(str, raised.value.problems))


def test_run_without_a_checkpoint_is_started_again(interrupted, uninterrupted, tmp_path, capsys, user_error):
    output = interrupted(tmp_path / "run", update=2)
    (output / "notes.txt").write_text("mine")
    with user_error("learning_rate", 0.001, 0.5):
        train_ppo.main(["--resume", "--learning-rate", "0.5", "--output", str(output)])
    train_ppo.main(["--resume", "--dry-run", "--output", str(output)])
    assert (output / "notes.txt").exists(), "a dry run must not move the folder"
    capsys.readouterr()
    train_ppo.main(["--resume", "--output", str(output)])
    assert f": {output}. " in capsys.readouterr().out
    assert (tmp_path / "run_1" / "notes.txt").read_text() == "mine", "the old folder must be moved, not removed"
    assert differing(uninterrupted / "ppo", output) == []


def test_resume_of_a_finished_run_changes_nothing(uninterrupted, capsys):
    before = (uninterrupted / "ppo" / "run.json").read_bytes()
    train_ppo.main(["--resume", "--output", str(uninterrupted / "ppo")])
    assert f"finished: {uninterrupted / 'ppo'}. " in capsys.readouterr().out
    assert (uninterrupted / "ppo" / "run.json").read_bytes() == before


def test_resume_without_a_run_is_refused(tmp_path, user_error):
    with user_error("--resume, --output", "nowhere"):
        train_ppo.main(["--resume", "--output", str(tmp_path / "nowhere")])


def test_resume_refuses_a_run_of_another_algorithm(interrupted, tmp_path, user_error):
    output = interrupted(tmp_path / "run", update=3)
    with user_error("train_ppo.py", "--resume"):
        train_grpo.main(["--resume", "--output", str(output)])


def test_resume_refuses_changed_settings_and_lists_them(interrupted, tmp_path, capsys, user_error):
    output = interrupted(tmp_path / "run", update=3)
    with user_error() as raised:
        train_ppo.main(["--resume", "--output", str(output), "--learning-rate", "0.5", "--seed", "7"])
    for problem, parts in zip(
        map(str, raised.value.problems), (("learning_rate", "0.001", "0.5"), ("seed", "42", "7")), strict=True
    ):
        assert all(part in problem for part in (*parts, "--resume-anyway")), problem
    train_ppo.main(["--resume", "--output", str(output), "--learning-rate", "0.5", "--resume-anyway"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "--resume-anyway" in line]
    assert all(part in line for part in ("learning_rate", "0.001", "0.5"))


def test_resume_refuses_a_run_in_which_a_removed_setting_was_in_use(interrupted, tmp_path, capsys, user_error):
    """A finished run is exported. `pass_rates` is a key of older run.json files."""
    output = interrupted(tmp_path / "run", update=3)
    resume = ["--resume", "--output", str(output)]
    file = output / "run.json"

    def write(**changed):
        facts = json.loads(file.read_text())
        facts["settings"]["old"] = {name: one.default for name, one in REMOVED.items()} | changed
        file.write_text(json.dumps(facts | {"pass_rates": {"prompts": 9}}))

    write(kl_boundaries=[0.3, 0.6], fused_head=False)
    with user_error("cannot resume: kl_boundaries was 0.3 0.6 ", "cannot resume: fused_head was false "):
        train_ppo.main(resume)
    train_ppo.main([*resume, "--resume-anyway"])
    assert "warning: resuming although fused_head was false" in capsys.readouterr().out
    write(fused_head=False)
    train_ppo.main(resume)
    assert "already finished" in capsys.readouterr().out, "only exported"
    assert RunRecord.read(output).unknown == {"pass_rates": {"prompts": 9}}


def test_resume_accepts_a_run_in_which_removed_settings_had_their_defaults(interrupted, uninterrupted, tmp_path):
    output = interrupted(tmp_path / "run", update=3)
    facts = json.loads((output / "run.json").read_text())
    facts["settings"]["old"] = {name: one.default for name, one in REMOVED.items()}
    (output / "run.json").write_text(json.dumps(facts))
    train_ppo.main(["--resume", "--output", str(output)])
    assert differing(uninterrupted / "ppo", output) == []


def test_resume_anyway_uses_the_new_settings(words, tmp_path):
    """The new learning rate is used. Adaptive KL and score normalization, which the run did not have, start now."""
    plain = ["--kl-schedule", "fixed", "--no-normalize-scores", "--lr-schedule", "constant"]
    output = interrupted_run(words, tmp_path / "run", update=3, more=plain)
    train_ppo.main(["--resume", "--output", str(output), "--resume-anyway", "--learning-rate", "1e-7",
                    "--kl-schedule", "adaptive", "--normalize-scores"])  # fmt: skip
    rates = scalars(output / "logs")["learning_rate"]
    assert [rate for _, rate in rates] == pytest.approx([1e-3] * 2 + [1e-7] * 4)


def test_resume_restores_best_from_the_checkpoint(words, tmp_path, monkeypatch):
    """A best checkpoint that was saved after the resumed checkpoint is replaced by that of the checkpoint, because the
    updates in between are repeated and may give other weights."""
    output = interrupted_run(words, tmp_path / "run", update=4, more=["--eval-every", 1, "--save-every", 2])
    saved = output / "checkpoint-2" / "best" / "model.safetensors"
    assert RunRecord.read(output).best.update is not None and saved.stat().st_ino != 0
    saved_bytes = saved.read_bytes()
    (output / "best" / "model.safetensors").unlink()
    (output / "best" / "model.safetensors").write_bytes(b"later weights")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, 3, Killed())
        train_ppo.main(["--resume", "--output", str(output)])
    assert (output / "best" / "model.safetensors").read_bytes() == saved_bytes
    assert (output / "best" / "model.safetensors").samefile(saved), "a hard link, which needs no disk space"


def test_resume_refuses_changed_reward_models_and_functions(words, tmp_path, reward_folder, user_error):
    reward = Path(shutil.copytree(reward_folder, tmp_path / "reward"))
    rule = tmp_path / "rule.py"
    rule.write_text("def words(completions, **_):\n    return [float(len(c.split())) for c in completions]\n")
    code = ["--reward-func", f"{rule}:words"]
    more = ["--rm-model", reward, *code]
    output = interrupted_run(words, tmp_path / "run", update=3, more=more)
    rule.write_text(rule.read_text().replace("len", "2 * len"))
    with user_error("rules", "--resume-anyway"):
        train_ppo.main(["--resume", *code, "--output", str(output)])
    rule.write_text(rule.read_text().replace("2 * len", "len"))
    weights = load_file(reward / "model.safetensors")
    save_file({**weights, "score.weight": weights["score.weight"] * 2}, reward / "model.safetensors", {"format": "pt"})
    with user_error("reward_model"):
        train_ppo.main(["--resume", *code, "--output", str(output)])


def test_settings_without_effect_on_training_may_change(interrupted, uninterrupted, tmp_path):
    output = interrupted(tmp_path / "run", update=3)
    train_ppo.main(["--resume", "--output", str(output), "--save-every", "1", "--keep", "5", "--record-tokens"])
    assert differing(uninterrupted / "ppo", output) == []
    assert len(find_checkpoints(output, RunRecord.read(output).id).valid) == 5


def test_resume_refuses_changed_data_and_versions(interrupted, tmp_path, pairs_file, user_error):
    output = interrupted(tmp_path / "run", update=3)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(pairs_file.read_text().splitlines(keepends=True)[:100]))
    file = output / "run.json"
    run = json.loads(file.read_text())
    run["settings"]["data"]["prompts"], run["versions"]["trl"] = str(fewer), "0.1"
    file.write_text(json.dumps(run))
    with user_error("trl", 0.1, "1.12"):
        train_ppo.main(["--resume", "--output", str(output)])
    run["versions"]["trl"] = "1.12.0"
    file.write_text(json.dumps(run))
    with user_error("train_prompts"):
        train_ppo.main(["--resume", "--output", str(output)])


@pytest.mark.ci
def test_resume_of_several_seeds(words, tmp_path, monkeypatch, capsys):
    """The run of seed 2 is killed, and that of seed 3 is not started."""
    plain = tmp_path / "plain"
    broken = tmp_path / "broken"
    seeds = ["--seeds", "1", "2", "3"]
    short = [*words("ppo"), "--num-iterations", "3", "--eval-every", "50"]
    train_ppo.main([*short, "--seeds", "2", "3", "--output", str(plain)])
    from rlhf.trainer.loop import OnPolicyLoop

    original = OnPolicyLoop.update_step

    def update_step(self, number):
        if self.config.run.seed == 2 and number == 3:
            raise Killed
        return original(self, number)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(OnPolicyLoop, "update_step", update_step)
        train_ppo.main([*short, *seeds, "--output", str(broken)])
    train_ppo.main([*seeds, "--resume", "--dry-run", "--output", str(broken)])
    assert f"{broken}_seed1. " in capsys.readouterr().out, "finished: before the plans of the other seeds"
    train_ppo.main([*seeds, "--resume", "--output", str(broken)])
    printed = capsys.readouterr().out
    assert f" {broken}_seed1 " in printed, "skipped"
    assert printed.count("update 2 of 3, ") == 1
    for seed in (2, 3):
        assert differing(Path(f"{plain}_seed{seed}"), Path(f"{broken}_seed{seed}")) == []


# --- stopping --------------------------------------------------------------------------------------------------------


def start_run(words, output: Path, *more: object) -> subprocess.Popen:
    """Return a separate process with a long run that has saved the checkpoint of update 2."""
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
@pytest.mark.ci
@pytest.mark.parametrize("which", system.stop_signals())
def test_signal_stops_the_run_after_saving_and_prints_the_resume_command(words, tmp_path, which, user_error):
    """Until then, another run in the same folder is refused."""
    output = tmp_path / "run"
    process = start_run(words, output, "--save-every", 2)
    for more in ([], ["--overwrite"]):
        with user_error(f"(PID {process.pid}, started 20"):
            train_ppo.main([*words("ppo"), *more, "--output", str(output)])
    process.send_signal(which)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + which
    assert f"{which.name}: " in out
    (stopped,) = [line for line in err.splitlines() if f"python train_ppo.py --resume --output {output}" in line]
    assert "Traceback" not in err
    run = RunRecord.read(output)
    assert run.status == "stopped"
    newest = find_checkpoints(output, run.id).newest
    assert f"update {newest.name.removeprefix('checkpoint-')} of" in stopped
    system.lock(output / LOCK_FILE).close()  # the ended process no longer holds the lock


@pytest.mark.skipif(system.WINDOWS, reason="Windows sends no such signals to a single process")
def test_second_signal_stops_immediately(words, tmp_path, monkeypatch):
    from rlhf.utils.signals import GracefulStop

    text = []
    before = signal.getsignal(signal.SIGINT)
    with GracefulStop(text.append) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.by == signal.SIGINT and len(text) == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_signal_in_the_last_update_does_not_stop_the_run(words, tmp_path, monkeypatch):
    output = tmp_path / "run"
    original = KLControl.after_update

    def with_signal(self, update, metrics, frozen):
        if update == 6:
            signal.raise_signal(signal.SIGINT)
        return original(self, update, metrics, frozen)

    monkeypatch.setattr(KLControl, "after_update", with_signal)
    train_ppo.main([*words("ppo"), "--output", str(output)])
    assert RunRecord.read(output).status == "finished"


# --- the disk --------------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_during_a_save_keeps_the_older_checkpoints(
    interrupted, uninterrupted, tmp_path, monkeypatch, capsys
):
    """One file of each kind in turn is a link to a device that is always full. safetensors replaces a link by a file.
    These files are limited to 100 bytes instead. In both cases the error comes from the operating system."""
    import resource

    import safetensors.torch

    write_tensors = safetensors.torch.serialize_file
    files = ["model.safetensors", "training.safetensors", "training.json", MANIFEST]
    assert all((uninterrupted / "ppo" / "checkpoint-6" / name).is_file() for name in files)
    original = checkpointing.write_checkpoint
    failed = []

    for name in files:
        output = interrupted(tmp_path / name)

        def with_full_file(folder, run, update, keep, write, name=name):
            def fill(temporary):
                if update == 6 and not name.endswith(".safetensors"):
                    (temporary / name).symlink_to("/dev/full")
                write(temporary)

            return original(folder, run, update, keep, fill)

        def with_short_file(data, filename, *more, name=name, **named):
            short = Path(filename).name == name and "checkpoint-6" in str(filename)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]) if short else limits)
            try:
                write_tensors(data, filename, *more, **named)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as raised:
            patch.setattr(safetensors.torch, "serialize_file", with_short_file)
            patch.setattr(checkpointing.BestCheckpoint, "state", lambda _: object())  # not the weights of best/
            patch.setattr(checkpointing, "write_checkpoint", with_full_file)
            run_command(lambda output=output: train_ppo.main(["--resume", "--output", str(output)]))
        err = capsys.readouterr().err
        assert raised.value.code == 1 and "Traceback" not in err, name
        assert "update 6" in err and "checkpoint-4" in err, name
        assert any(text in err for text in ("No space left", "os error 28", "os error 27")), (name, err)
        assert sorted(find_checkpoints(output, RunRecord.read(output).id).valid) == [2, 4]
        failed.append(name)
    assert failed == files
    train_ppo.main(["--resume", "--output", str(tmp_path / files[0])])
    assert differing(uninterrupted / "ppo", tmp_path / files[0]) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_outside_a_save_is_one_error_line(words, tmp_path, monkeypatch, capsys):
    def write(file, rows):
        with Path("/dev/full").open("w") as file:
            file.write("x")

    monkeypatch.setattr("rlhf.callbacks.samples.write_jsonl", write)
    with pytest.raises(SystemExit) as raised:
        run_command(lambda: train_ppo.main([*words("ppo"), "--output", str(tmp_path / "run")]))
    err = capsys.readouterr().err
    assert raised.value.code == 1 and err.startswith("error: No space left on device") and "--resume" in err


@pytest.mark.skipif(system.WINDOWS, reason="Windows does not rename a folder with open files")
def test_removed_run_folder_is_one_error_line_and_is_not_created_again(words, tmp_path, monkeypatch, capfd):
    """This happens if a disk is unmounted. Files that are then written to the same path would be hidden by the next
    mount."""
    from rlhf.trainer.loop import OnPolicyLoop

    output = tmp_path / "run"
    original = OnPolicyLoop.update_step

    def update_step(self, number):
        if number == 5:
            output.rename(tmp_path / "elsewhere")
        return original(self, number)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as raised:
        patch.setattr(OnPolicyLoop, "update_step", update_step)
        run_command(lambda: train_ppo.main([*words("ppo"), "--output", str(output)]))
    err = capfd.readouterr().err
    assert raised.value.code == 1 and "Traceback" not in err
    assert err.startswith("error: ") and str(output) in err and "--resume" in err
    assert not output.exists()
    (tmp_path / "elsewhere").rename(output)
    train_ppo.main(["--resume", "--output", str(output)])
    assert RunRecord.read(output).status == "finished"


def test_newest_checkpoint_of_another_user_is_one_line_before_loading(uninterrupted, tmp_path, monkeypatch, capsys):
    """An older one would train its updates again. Without permission to lock the folder, it is one line, too."""
    from rlhf.checkpoints import run_folder

    output = Path(shutil.copytree(uninterrupted / "ppo", tmp_path / "run"))
    original = Path.read_text
    dataclasses.replace(RunRecord.read(output), status="stopped").write(output)

    def read_text(self, *more, **named):
        if self.parent.name == "checkpoint-6":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return original(self, *more, **named)

    def lock(file, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    (output / LOCK_FILE).touch()
    for where, name, instead, place in ((Path, "read_text", read_text, "checkpoint-6"),
                                        (run_folder.system, "lock", lock, LOCK_FILE)):  # fmt: skip
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as raised:
            patch.setattr(where, name, instead)
            patch.setattr("rlhf.run.train.load_models", None)
            run_command(lambda: train_ppo.main(["--resume", "--output", str(output)]))
        (line,) = capsys.readouterr().err.splitlines()
        assert raised.value.code == 2 and place in line and "permission" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_for_tensorboard_is_one_error_line(words, tmp_path, monkeypatch, capfd):
    output = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as raised:
        patch.setattr(logging, "new_event_file", lambda _: Path("/dev/full"))
        run_command(lambda: train_ppo.main([*words("ppo"), "--output", str(output)]))
    err = capfd.readouterr().err
    assert raised.value.code == 1 and "Traceback" not in err, err
    assert err.startswith(f"error: No space left on device: {output}. ")


# --- kills -----------------------------------------------------------------------------------------------------------


KILLS = [
    *(pytest.param(name, 6, marks=pytest.mark.ci) for name in SCRIPTS),
    *(pytest.param(name, 25, marks=pytest.mark.proof) for name in SCRIPTS),
]


@pytest.mark.skipif(system.WINDOWS, reason="Windows has no fork")
@pytest.mark.parametrize(("algorithm", "count"), KILLS)
def test_run_killed_at_any_time_can_be_resumed(words, tmp_path, algorithm, count):
    """In the proof tests, the environment variable KILLS sets the number of kills."""
    if count == 25:
        count = int(os.environ.get("KILLS", count))
    flags = [word for word in words(algorithm, "--save-every", 1)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kills", str(count), "1", str(tmp_path), f"train_{algorithm}", *flags],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    assert result["problems"] == []
    assert result["killed"] >= count and result["in_a_save"] >= count * 10 // 25 and result["twice"] >= count // 8
    assert result["resumed"] + result["started_again"] == result["killed"]
    # A run that is killed before its first checkpoint starts again. If there are few kills, many may be of this kind.
    assert result["resumed"] > result["killed"] / 2 if count >= 25 else result["resumed"] >= result["killed"] // 4

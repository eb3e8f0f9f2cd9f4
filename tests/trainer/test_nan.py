"""Tests that non-finite weights are never saved, and that the command printed by a failed run works."""

from __future__ import annotations

import errno
import json
import math
import re
import signal

import pytest
import torch
from safetensors.torch import load_file

import train_ppo
from rlhf.callbacks import checkpointing, incidents
from rlhf.checkpoints.manifest import find_checkpoints
from rlhf.checkpoints.run_record import RunRecord
from rlhf.models.load import bad_weights
from rlhf.trainer import collect, evaluator, optimize
from rlhf.trainer.evaluator import FixedText, perplexity
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.safety import SkipUpdate
from rlhf.utils.errors import RunError, run_command
from tests.conftest import attach, typed


@pytest.fixture(autouse=True)
def no_probes_before_the_first_update(monkeypatch):
    """The functions of these tests count their calls."""
    monkeypatch.setattr("rlhf.callbacks.reward_warning.MOST_SECONDS", 0.0)


def run(words, status: int | None = None) -> None:
    """Runs `train_ppo.py` with these arguments. If `status` is given, the script must exit with it."""
    if status is None:
        return run_command(lambda: train_ppo.main([str(word) for word in words]))
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: train_ppo.main([str(word) for word in words]))
    assert ended.value.code == status


def checkpoint_names(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def nan_rule(folder, first: int, last: int | None = None):
    """Writes a reward function that returns NaN from call `first` to call `last`, and returns its name for
    --reward-func. Call 1 is the evaluation of the start model."""
    file = folder / "rules.py"
    file.write_text(
        "calls = 0\n"
        "def sometimes(completions, **_):\n"
        "    global calls\n"
        "    calls += 1\n"
        f"    bad = {first} <= calls <= {last or 10**6}\n"
        "    return [float('nan') if bad else float(len(text) % 5) for text in completions]\n"
    )
    return f"{file}:sometimes"


def test_bad_weights_returns_the_names_of_non_finite_weights():
    module = torch.nn.Linear(2, 2)
    assert bad_weights(module) == []
    module.bias.data[1] = math.inf
    assert bad_weights(module) == ["bias"]
    module.bias.requires_grad_(False)
    module.counts = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)  # as 4-bit weights
    assert bad_weights(module) == [] and bad_weights(module, frozen=True) == ["bias"]
    module.weight.data[0, 0], module.bias.data[1] = torch.finfo(torch.float32).max, math.nan
    assert bad_weights(module, frozen=True) == ["bias"], "the largest float is finite"


@pytest.mark.parametrize("updates", [1, 3])
def test_non_finite_weights_end_the_run_and_are_not_saved(run_flags, tmp_path, capsys, updates):
    words = run_flags("--num-iterations", updates, "--save-every", 1, "--learning-rate", 1e38, "--ppo-epochs", 1)
    run(words, 1)
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "update 1." in error
    assert RunRecord.read(tmp_path / "run").status == "failed"
    assert checkpoint_names(tmp_path / "run") == []
    saved = list((tmp_path / "run").rglob("*.safetensors"))
    assert saved, "best/ must contain the start model"
    for file in saved:
        assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file


@pytest.mark.parametrize("save", ["save_model", "save_trainer_state"])
def test_non_finite_weights_are_rejected_by_both_save_functions(build, tmp_path, save, user_error):
    from rlhf.trainer.state import save_trainer_state

    trainer = build()
    next(trainer.host.model.parameters()).data[0] = math.nan
    with user_error("1 weights", kind=RunError):
        trainer.save_model(tmp_path / "model") if save == "save_model" else save_trainer_state(
            trainer, tmp_path / "model"
        )
    assert not (tmp_path / "model").exists()


def test_advised_command_works(run_flags, tmp_path, capsys):
    """Learning rate 5e6 instead of 5e-6: update 1 leaves finite weights with which every later update is skipped."""
    flags = ["--num-iterations", 5, "--save-every", 1, "--keep", 2, "--ppo-epochs", 1]
    run(run_flags(*flags, "--learning-rate", 5e6), 1)
    output = capsys.readouterr()
    assert "update 4" in output.err and "*.suspect" in output.err and "checkpoint-1" in output.err
    assert checkpoint_names(tmp_path / "run") == ["checkpoint-1.suspect"], (
        "nothing was saved between the skipped updates"
    )
    (command,) = re.findall(r"Resume with a smaller learning rate: (.*)", output.err)
    assert "--learning-rate 5e-06" in command, "a tenth of 5e6 would still be far too large"
    run(typed(command))
    assert RunRecord.read(tmp_path / "run").status == "finished"


def test_advised_command_resumes_from_the_last_good_checkpoint(run_flags, tmp_path, capsys):
    """Two good updates, then a resume with a learning rate that makes the weights of update 3 unusable."""
    flags = run_flags("--num-iterations", 8, "--save-every", 1, "--keep", 3, "--ppo-epochs", 1)
    stop_after(2, lambda: run(flags, 128 + signal.SIGINT))
    capsys.readouterr()
    run(["--resume", "--resume-anyway", "--learning-rate", 5e6, "--output", tmp_path / "run"], 1)
    output = capsys.readouterr().err
    assert checkpoint_names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2", "checkpoint-3.suspect"]
    (command,) = re.findall(r"Resume with a smaller learning rate: (.*)", output)
    run(typed(command))
    assert "after update 2 of 8, from" in capsys.readouterr().out
    assert RunRecord.read(tmp_path / "run").status == "finished"


def stop_after(update: int, call) -> None:
    """Calls `call` and raises SIGINT in this update of every run that it starts."""
    original = optimize.PolicyOptimizer.run

    def stopped(self, experience, number):
        if number == update:
            signal.raise_signal(signal.SIGINT)
        return original(self, experience, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimize.PolicyOptimizer, "run", stopped)
        call()


def test_ctrl_c_in_a_skipped_update_saves_no_new_checkpoint(run_flags, tmp_path, capsys):
    """The scores of update 3 are NaN, and SIGINT arrives in the same update."""
    rule = nan_rule(tmp_path, 4)
    flags = run_flags("--num-iterations", 8, "--save-every", 2, "--rm-model", "none", "--reward-func", rule)
    original = collect.RolloutCollector.score

    def stopped(self, rollout, **more):
        if self.host.state.global_step == 2:
            signal.raise_signal(signal.SIGINT)
        return original(self, rollout, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect.RolloutCollector, "score", stopped)
        run(flags, 128 + signal.SIGINT)
    output = capsys.readouterr().err
    assert "update 3 of 8" in output and "checkpoint-2" in output and "python train_ppo.py --resume" in output
    assert checkpoint_names(tmp_path / "run") == ["checkpoint-2"]


def test_overdue_checkpoint_is_saved_by_the_next_successful_update(build, tmp_path):
    trainer = build("--num-iterations", 9, "--save-every", 2, "--keep", 9)
    log = attach(trainer)
    original = trainer.collector.score

    def score(rollout, **more):
        if trainer.host.state.global_step in (1, 2, 4):  # updates 2, 3 and 5
            raise SkipUpdate("a test", by_score=True)
        return original(rollout, **more)

    trainer.collector.score = score
    trainer.train()
    assert sorted(find_checkpoints(tmp_path / "run", log.record.id).valid) == [4, 6, 8, 9]


@pytest.mark.parametrize("updates", [1, 2])
def test_run_of_one_or_two_skipped_updates_finishes_with_a_warning(run_flags, tmp_path, capsys, updates):
    rule = nan_rule(tmp_path, 2, 1 + updates)
    run(run_flags("--num-iterations", updates, "--rm-model", "none", "--reward-func", rule))
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"warning: [^.]*\({updates}\)", output) and "not measured" in output
    record = RunRecord.read(tmp_path / "run")
    assert record.status == "finished" and record.figures["kl_last_10_updates"] is None
    assert json.loads((tmp_path / "run" / "run.json").read_text())["spent"]["optimizer_steps"] == 0


def test_three_skipped_updates_at_the_end_fail_the_run(run_flags, tmp_path, capsys):
    rule = nan_rule(tmp_path, 2)
    run(run_flags("--num-iterations", 3, "--rm-model", "none", "--reward-func", rule), 1)
    output = capsys.readouterr().err
    assert "update 3 (" in output and "python train_ppo.py --resume" in output
    assert RunRecord.read(tmp_path / "run").status == "failed"
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["kl", "perplexity"])
def test_non_finite_evaluation_ends_the_run(build, monkeypatch, name, user_error):
    """A KL that is NaN is none that was not measured."""
    trainer = build()
    original = ForwardPasses.logprobs

    def logprobs(*given):
        found = original(*given)
        return found._replace(ref_logprobs=found.ref_logprobs * math.nan)

    with torch.no_grad():  # the KL of the start model is not computed
        trainer.actor.policy.get_input_embeddings().weight.mul_(1.1)
    if name == "kl":
        monkeypatch.setattr(ForwardPasses, "logprobs", logprobs)
    else:
        monkeypatch.setattr(evaluator, "perplexity", lambda *_: math.inf)
    found = {"kl": "KL is inf", "perplexity": "perplexity is inf"}[name]
    with user_error(found, "update 0", kind=RunError):
        trainer.train()


def test_perplexity_too_large_for_a_float_is_infinite(build):
    trainer = build()
    with torch.no_grad():
        trainer.actor.policy.get_input_embeddings().weight.mul_(1e5)
    prompt = trainer.train_prompts[0]
    text = FixedText([prompt.ids], [[5, 6, 7]], "three tokens")
    value = perplexity(trainer.collector.sampler, text)
    assert value == math.inf


def test_full_disk_hides_no_reason_why_a_run_gives_up(run_flags, tmp_path, monkeypatch, capsys):
    """Neither the incident can be saved, nor the checkpoints renamed."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def nan_gradients(self, *given):
        stats = original(self, *given)
        next(w for w in self.host.model.parameters() if w.grad is not None).grad.fill_(math.nan)
        return stats

    original = optimize.PolicyOptimizer.gradients
    monkeypatch.setattr(optimize.PolicyOptimizer, "gradients", nan_gradients)
    monkeypatch.setattr(incidents, "save_incident", full)
    monkeypatch.setattr(checkpointing, "set_aside", full)
    run(run_flags("--num-iterations", 9), 1)
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert "updates in a row" in line and "could not be renamed" in line and "--resume-anyway" in line
    assert "could not be saved" in printed.out and RunRecord.read(tmp_path / "run").status == "failed"

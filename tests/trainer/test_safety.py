"""Tests that protect a run: non-finite or out-of-range values never reach the weights, a skipped update can be
saved, a runaway KL is countered, and out-of-memory errors are handled or reported.
"""

from __future__ import annotations

import json
import math
import re
import weakref
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import train_ppo
from rlhf.algorithms.table import ALGORITHMS
from rlhf.callbacks.base import Callback
from rlhf.callbacks.incidents import BATCH_FILE, INCIDENT_FILE, TENSORS_FILE, WEIGHTS, save_incident
from rlhf.checkpoints.run_record import RunRecord
from rlhf.commands.train import train_command
from rlhf.rollout import sampler
from rlhf.rollout.continuous_batching import ContinuousBatcher, OutOfMemoryInCapture
from rlhf.trainer import evaluator, optimize, safety
from rlhf.utils.errors import RLHFWarning, RunError, run_command
from tests.conftest import BY_TIER, LEARN_FROM_ALL, attach
from tests.rollout.test_engine import HeadWithBadLogits


def test_the_reason_of_a_skipped_update_names_the_tensors():
    """Not one row of the update is named: all of them may be the reason."""
    with pytest.raises(safety.SkipUpdate, match=r"ref logprobs \(2 of 3\)") as found:
        safety.check_finite(scores=torch.zeros(2), ref_logprobs=torch.tensor([0.0, math.nan, math.inf]), values=None)
    assert found.value.rows == []


def weights(trainer) -> torch.Tensor:
    return torch.cat([w.detach().flatten().clone() for w in trainer.host.model.parameters() if w.requires_grad])


class UpdateRecorder(Callback):
    """Records finished and skipped updates."""

    def __init__(self):
        self.finished = []
        self.skipped = []
        self.skipped_tokens = 0

    def on_update_end(self, update, metrics):
        self.finished.append(update)

    def on_update_skipped(self, update, rollout, batch, found):
        self.skipped.append((update, str(found)))
        self.skipped_tokens += sum(rollout.completions.completion_lengths)


def corrupt_scores(trainer, value):
    """Sets a reward function that returns `value` for the first completion of every batch."""

    def first_score_is_bad(completions, **_):
        return [value, *[1.0] * (len(completions) - 1)]

    trainer.rewards.functions = [first_score_is_bad]
    trainer.rewards.names = ["first_score_is_bad"]
    trainer.rewards.weights = [1.0]


def corrupt_logits(trainer, value):
    """Replaces a number in the first token's hidden state with `value`, in the training forward pass only."""
    original = trainer.actor.forward_heads

    def heads(hidden, *more):
        changed = hidden.clone()
        changed[0, 0] = value
        return original(changed, *more)

    trainer.actor.forward_heads = heads


def corrupt_gradients(trainer, value):
    """Replaces one element of the gradient of one weight with `value`."""
    weight = next(w for w in trainer.host.model.parameters() if w.requires_grad)
    weight.register_hook(lambda grad: torch.where(torch.arange(grad.numel()).view_as(grad) == 0, value, grad))


def corrupt_loss(trainer, value):
    """Adds `value` to the loss."""
    original = trainer.algorithm.loss

    def losses(*args):
        loss, stats = original(*args)
        return loss + value, {**stats, "loss": stats["loss"] + value}

    trainer.algorithm.loss = losses


CORRUPTIONS = {
    "scores": corrupt_scores,
    "logits": corrupt_logits,
    "gradients": corrupt_gradients,
    "loss": corrupt_loss,
}


@pytest.mark.parametrize("algorithm", BY_TIER)
@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("value", [math.nan, *(pytest.param(x, marks=pytest.mark.ci) for x in (math.inf, -math.inf))])
def test_non_finite_values_never_reach_the_weights(build, algorithm, kind, value):
    trainer = build(algorithm=algorithm)
    recorder = UpdateRecorder()
    trainer.add_callback(recorder)
    before = weights(trainer)
    CORRUPTIONS[kind](trainer, value)
    metrics = trainer.update_step(1)
    assert torch.equal(weights(trainer), before)
    assert metrics["updates/skipped"] == 1 and trainer.progress.optimizer_steps == 0
    assert recorder.finished == [] and [u for u, _ in recorder.skipped] == [1]
    assert trainer.progress.skipped == 1
    assert trainer.progress.completion_tokens == recorder.skipped_tokens > 0, "the tokens are spent"
    assert all(w.grad is None or not w.grad.any() for w in trainer.host.model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("update", [0, 1])
def test_bad_logits_while_sampling_end_the_run_with_its_advice(build, value, update):
    """After the start model's evaluation, the advice is that for a run whose weights diverged."""
    trainer = build("--num-iterations", 3)

    def diverge(*_):
        head = trainer.actor.policy.get_output_embeddings()
        trainer.actor.policy.set_output_embeddings(HeadWithBadLogits(head, value, 7))

    if update:
        recorder = UpdateRecorder()
        recorder.on_update_end = diverge
        trainer.add_callback(recorder)
    else:
        diverge()
    with pytest.raises(RunError) as error:
        trainer.train()
    (line,) = map(str, error.value.problems)
    assert f"update {update}. " in line and ("learning_rate" in line) == bool(update)


def nan_in_call(trainer, number: int) -> None:
    """Let the loss be NaN in one of its calls."""
    original = trainer.algorithm.loss
    calls = []

    def loss_of(*args):
        calls.append(1)
        factor = math.nan if len(calls) == number else 1.0
        loss, stats = original(*args)
        return loss * factor, {**stats, "loss": stats["loss"] * factor}

    trainer.algorithm.loss = loss_of


def test_training_continues_after_a_skipped_update(build):
    trainer = build("--num-iterations", 4)
    nan_in_call(trainer, 3)
    recorder = UpdateRecorder()
    trainer.add_callback(recorder)
    metrics = trainer.train()
    assert recorder.finished == [1, 3, 4] and [u for u, _ in recorder.skipped] == [2]
    assert metrics["updates/skipped"] == 1 and trainer.progress.skipped_in_a_row == 0
    assert trainer.progress.optimizer_steps == 6, "2 in updates 1, 3 and 4, none in the skipped update 2"


@pytest.mark.parametrize("beta", [-1, -1e-9, math.nan, math.inf, "0.1", None])
def test_beta_that_the_flag_refuses_is_refused(build, beta, user_error):
    trainer = build()
    with user_error("set_kl_coef()", 0, kind=RunError):
        trainer.set_kl_coef(beta)
    trainer.set_kl_coef(0)
    assert trainer.kl_coef == 0


def test_earlier_steps_of_a_skipped_update_are_kept(build):
    trainer = build("--ppo-epochs", 2)
    before = weights(trainer)
    nan_in_call(trainer, 2)
    trainer.update_step(1)
    assert trainer.progress.optimizer_steps == 1
    assert not torch.equal(weights(trainer), before) and weights(trainer).isfinite().all()


@pytest.mark.parametrize("shift, ratio", [(-3.0, "20.1"), (3.0, "0.0498")])
def test_ratio_far_out_of_range_skips_the_update(build, monkeypatch, shift, ratio):
    """Shifts the log-probs of the rollout by 3 nats, so the ratio is e^3 or e^-3."""

    def with_shifted_logprobs(trainer):
        original = trainer.passes.logprobs

        def logprobs(*args, **kwargs):
            found = original(*args, **kwargs)
            return found._replace(logprobs=found.logprobs + shift)

        trainer.passes.logprobs = logprobs
        return trainer

    trainer = with_shifted_logprobs(build("--ppo-epochs", 2))
    recorder = UpdateRecorder()
    trainer.add_callback(recorder)
    before = weights(trainer)
    trainer.update_step(1)
    assert f"policy/ratio is {ratio}" in recorder.skipped[0][1] and trainer.progress.optimizer_steps == 0
    assert torch.equal(weights(trainer), before)
    monkeypatch.setattr(safety, "MOST_RATIO", math.inf)
    other = with_shifted_logprobs(build("--ppo-epochs", 2))
    other.update_step(1)
    assert other.progress.optimizer_steps == 2


def test_kl_controller_ignores_a_skipped_update(build):
    trainer = build("--num-iterations", 4)
    corrupt_scores(trainer, math.nan)
    beta = trainer.kl_coef
    trainer.update_step(1)
    assert trainer.kl.controller.done == 1 and trainer.kl_coef == beta


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_three_skipped_updates_in_a_row_stop_the_run_and_are_saved(
    configured, tmp_path, monkeypatch, capsys, algorithm, user_error
):
    train = partial(train_command, algorithm)
    original = optimize.PolicyOptimizer.gradients
    from_update = 1

    def nan_gradients(self, *given):
        stats = original(self, *given)
        if self.host.state.global_step >= from_update:
            next(w for w in self.host.model.parameters() if w.grad is not None).grad.fill_(math.nan)
        return stats

    config = configured(algorithm=algorithm)
    groups = ["--batch-size", "2", "--K", "2"] if ALGORITHMS[algorithm].group_size > 1 else []
    argv = ["--actor-model", config.model.actor_model, "--rm-model", config.model.rm_model, "--prompts",
            config.data.prompts, "--allow-weak-reward-model", "--num-iterations", "9", "--max-new-tokens", "8",
            "--prompt-length", "100", "--eval-prompts", "6", *groups]  # fmt: skip
    output = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(optimize.PolicyOptimizer, "gradients", nan_gradients)
        run_command(lambda: train([*argv, "--output", str(output)]))
    printed = capsys.readouterr()
    assert ended.value.code == 1 and "update 4" in printed.err
    folder = output / "incidents" / "update-000004"
    assert str(folder) in printed.out
    assert RunRecord.read(output).status == "failed"
    incident = json.loads((folder / "incident.json").read_text())
    assert incident["versions"]["trl"] == "1.12.0"
    assert incident["settings"]["model"]["actor_model"] == config.model.actor_model
    rows = [json.loads(line) for line in (folder / "batch.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all(row["completion_ids"] and row["prompt_ids"] for row in rows)


def test_an_incident_has_the_update(build, tmp_path):
    trainer = build("--num-iterations", 3)
    trainer.update_step(1)
    rollout = trainer.collector.collect(trainer.episodes_of(2), 2)
    batch = trainer.advantages(rollout, trainer.collector.score(rollout).shaped)
    save_incident(trainer, tmp_path / "incident", 2, rollout, batch, safety.SkipUpdate("a test", [1, 2]))
    facts = json.loads((tmp_path / "incident" / INCIDENT_FILE).read_text())
    assert (facts["update"], facts["found"], facts["rows"]) == (2, "a test", [1, 2])
    assert facts["kl_coef"] == trainer.kl_coef
    tensors = load_file(tmp_path / "incident" / TENSORS_FILE)
    assert torch.equal(tensors["logprobs"], rollout.logprobs) and torch.equal(tensors["scores"], batch.scores)
    assert torch.equal(tensors["advantages"], batch.advantages) and torch.equal(tensors["returns"], batch.returns)
    saved = load_file(tmp_path / "incident" / WEIGHTS / "model.safetensors")
    assert all(torch.equal(saved[name], w) for name, w in trainer.actor.policy.named_parameters() if name in saved)


def test_incident_stores_completions_with_unusual_line_breaks(build, tmp_path):
    """Python's `str.splitlines` splits at these characters."""
    trainer = build()
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    rollout.texts[0] = "a\u2028b\u0085c\x0bd"
    save_incident(trainer, tmp_path / "incident", 1, rollout, None, safety.SkipUpdate("a test"))
    first = (tmp_path / "incident" / BATCH_FILE).read_text(encoding="utf-8").split("\n")[0]
    assert json.loads(first)["completion"] == rollout.texts[0]


def test_evaluation_with_a_nan_score_ends_the_run(build, user_error):
    trainer = build()
    corrupt_scores(trainer, math.nan)
    with user_error("first_score_is_bad", kind=RunError):
        trainer.evaluate()


# --- runaway KL ------------------------------------------------------------------------------------------------------


def set_kl(trainer, values):
    """Sets the KL of each update."""
    original = trainer.metrics_of
    trainer.metrics_of = lambda begin, *given: {**original(begin, *given), "kl_divergence": values[begin.update - 1]}


def test_runaway_kl_doubles_beta(build, tmp_path):
    trainer = build("--num-iterations", 3, "--kl-schedule", "adaptive", "--kl-target", "6/sequence", "--kl-coef", 0.1,
                    "--kl-horizon", 10_000)  # fmt: skip
    attach(trainer)
    set_kl(trainer, [6.0, 25.0, 6.0])
    trainer.train()
    assert trainer.kl_coef == pytest.approx(0.2, rel=0.01), (
        "the controller itself changes beta little: 4 episodes, horizon 10,000"
    )


def test_rollback_restores_the_checkpoint_before_the_runaway_kl(build, tmp_path):
    """The KL of update 4 is that of the weights after update 3, so the last good weights are those after update 2."""
    flags = ["--num-iterations", 8, "--kl-schedule", "adaptive", "--kl-target", "6/sequence", "--save-every", 1,
             "--keep", 6, "--eval-every", 100, "--learning-rate", "1e-2"]  # fmt: skip
    weights_of = {}
    rates = {}
    for rollback in ((), ("--rollback-on-kl",)):
        trainer = build(*flags, "--output", tmp_path / str(len(rollback)), *rollback)
        seen = {}
        attach(trainer)
        set_kl(trainer, [6.0, 6.0, 6.0, 30.0, 30.0, 30.0, 6.0, 6.0])
        record_weights(trainer, seen)
        trainer.train()
        weights_of[rollback] = seen
        rates[rollback] = [
            entry["learning_rate"] for entry in trainer.host.state.log_history if "learning_rate" in entry
        ]
        assert trainer.host.optimizer.param_groups[0]["lr"] == trainer.host.lr_scheduler.get_last_lr()[0]
    assert rates[()] == rates[("--rollback-on-kl",)], "the learning-rate schedule must continue"
    without_rollback = weights_of[()]
    rolled_back = weights_of[("--rollback-on-kl",)]
    assert all(torch.equal(without_rollback[n], rolled_back[n]) for n in range(1, 6))
    assert torch.equal(rolled_back[6], rolled_back[2]) and not torch.equal(without_rollback[6], without_rollback[2])
    assert not torch.equal(rolled_back[3], rolled_back[2])
    assert not torch.equal(rolled_back[7], rolled_back[6]), "training must continue"


def record_weights(trainer, seen):
    class WeightRecorder(Callback):
        def on_update_done(self, update):
            seen[update] = weights(trainer)

    trainer.add_callback(WeightRecorder())


# --- out of memory ---------------------------------------------------------------------------------------------------


def limit_memory(trainer, most):
    """Simulates memory for at most `most` completions and returns the list of attempted micro-batch sizes."""
    original = trainer.policy_optimizer.gradients
    sizes = []

    def gradients(batch, forward, *more):
        sizes.append(len(forward.micro_batch.rows))
        if sizes[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return original(batch, forward, *more)

    trainer.policy_optimizer.gradients = gradients
    return sizes


@pytest.mark.parametrize("algorithm", LEARN_FROM_ALL)
def test_out_of_memory_halves_the_micro_batch_and_keeps_every_step(build, algorithm):
    unlimited = build(algorithm=algorithm)
    limited = build(algorithm=algorithm)
    unlimited.update_step(1)
    sizes = limit_memory(limited, 1)
    with pytest.warns(RLHFWarning, match="backward pass.* 2 "):
        limited.update_step(1)
    assert sizes == [4, 2, 1, 1, 1, 1, 1, 1, 1, 1], "halved twice, then kept for all later micro-batches"
    assert limited.progress.optimizer_steps == unlimited.progress.optimizer_steps == 2
    assert float((weights(unlimited) - weights(limited)).abs().max()) < 1e-4


@pytest.mark.parametrize("flags", [(), ("--use-lora",)])
def test_out_of_memory_with_one_completion_lists_settings_that_help(build, flags):
    trainer = build(*flags)
    attach(trainer)
    limit_memory(trainer, 0)
    with pytest.warns(RLHFWarning), pytest.raises(RunError) as raised:
        trainer.update_step(1)
    message = str(raised.value)
    assert "the backward pass" in message
    suggestions = re.findall(r"(--[a-z0-9-]+)[ 0-9]* \(about ([0-9.]+) GiB less\)", message)
    assert len(suggestions) == 3 and not {"--use-lora"} & set(flags) & set(dict(suggestions))
    sizes = [float(size) for _, size in suggestions]
    assert sizes == sorted(sizes, reverse=True)


def test_out_of_memory_while_computing_logprobs_halves_the_batch(build, monkeypatch):
    trainer = build()
    sizes = []
    original = trainer.reference.logprobs

    def logprobs(micro_batch, *more):
        sizes.append(len(micro_batch.rows))
        if sizes[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(micro_batch, *more)

    monkeypatch.setattr(trainer.reference, "logprobs", logprobs)
    with pytest.warns(RLHFWarning, match="log-probabilities"):
        trainer.update_step(1)
    assert sizes == [4, 2, 1, 1, 1, 1]


def limit_slots(monkeypatch, most, in_capture=False):
    """Simulates memory for sampling at most `most` completions at a time: the third step of more runs out of it.
    Returns a list that receives the number of slots of each step."""
    decode = ContinuousBatcher._decode
    steps = []

    def limited(batcher, span):
        steps.append(len(batcher.used))
        if len(batcher.used) > most and len(steps) > 2:
            kind = OutOfMemoryInCapture if in_capture else torch.OutOfMemoryError
            raise kind("CUDA out of memory. Tried to allocate 1.00 GiB")
        return decode(batcher, span)

    monkeypatch.setattr(ContinuousBatcher, "_decode", limited)
    return steps


def test_out_of_memory_in_sampling_halves_the_slots_and_changes_no_token(build, monkeypatch):
    expected = build()
    expected = [expected.collector.collect(expected.episodes_of(update), update).completions for update in (1, 2)]
    limited = build()
    steps = limit_slots(monkeypatch, most=2)
    with pytest.warns(RLHFWarning, match="rollout slots to 2"):
        found = limited.collector.collect(limited.episodes_of(1), 1).completions
    assert found.rows() == expected[0].rows() and torch.equal(found.ended, expected[0].ended)
    assert steps[:3] == [4, 4, 4] and max(steps[3:]) == 2
    steps.clear()
    assert limited.collector.collect(limited.episodes_of(2), 2).completions.rows() == expected[1].rows()
    assert max(steps) == 2, "halved for the rest of the run"


def test_out_of_memory_in_the_capture_of_a_graph_is_not_retried(build, monkeypatch, user_error):
    trainer = build()
    steps = limit_slots(monkeypatch, most=2, in_capture=True)
    with user_error("the rollout", "--", kind=RunError):
        trainer.update_step(1)
    assert steps == [4, 4, 4]


def test_kept_pass_is_freed_if_computing_logprobs_needs_its_memory(build, monkeypatch):
    """Simulates memory for the kept pass or for computing log-probs, but not for both."""
    trainer = build()
    passes = []
    kept = []
    run = trainer.passes.run
    heads = trainer.actor.forward_heads

    def recorded(completions, rows):
        found = run(completions, rows)
        passes.append(weakref.ref(found.hidden))
        return found

    def limited(*args):
        kept.append(passes[0]() is not None)
        if kept[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return heads(*args)

    monkeypatch.setattr(trainer.passes, "run", recorded)
    monkeypatch.setattr(trainer.actor, "forward_heads", limited)
    trainer.update_step(1)
    assert kept[0] and not any(kept[1:]) and trainer.progress.optimizer_steps == 2


PHASES = {
    "the rollout": (sampler, "sample_completions"),
    "an evaluation": (evaluator, "perplexity"),
}


@pytest.mark.parametrize("phase", [*PHASES, "scoring", "the optimizer step"])
def test_out_of_memory_error_reports_the_phase_and_settings_that_help(build, monkeypatch, phase, user_error):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    trainer = build()
    attach(trainer)
    if phase in PHASES:
        monkeypatch.setattr(*PHASES[phase], full)
    elif phase == "scoring":
        trainer.rewards.functions[0] = full
    else:
        trainer.host.optimizer.step = full
    with user_error(phase, "--", kind=RunError):
        trainer.evaluate() if phase == "an evaluation" else trainer.update_step(1)


def test_out_of_memory_before_the_run_is_a_one_line_error(monkeypatch, capsys):
    def main():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    output = capsys.readouterr().err
    assert ended.value.code == 1 and output.startswith("error: ") and "--use-lora" in output


def test_out_of_memory_on_the_cpu_is_a_one_line_error(capsys, tmp_path, monkeypatch):
    """PyTorch's allocator raises a RuntimeError. Python and NumPy raise a MemoryError."""
    monkeypatch.chdir(tmp_path)
    for call in (lambda: torch.empty(2**60), lambda: bytearray(2**62)):
        with pytest.raises(SystemExit) as ended:
            run_command(call)
        output = capsys.readouterr().err
        assert ended.value.code == 1 and output.startswith("error: ") and output.count("\n") == 1
        assert "CPU" in output and "--lora-r" in output
    assert not list(tmp_path.iterdir())


def test_unexpected_error_prints_one_line_and_writes_a_traceback_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: [1][2])
    output = capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    assert ended.value.code == 1 and output.count("\n") == 1
    assert output.startswith("error: ") and "IndexError" in output and str(file) in output
    assert "Traceback" in file.read_text() and "list index out of range" in file.read_text()


def test_adapters_larger_than_the_memory_are_a_one_line_error(run_flags, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: train_ppo.main(run_flags("--use-lora", "--lora-r", "1e9")))
    output = capsys.readouterr().err
    assert ended.value.code == 1 and output.startswith("error: ") and output.count("\n") == 1
    assert "CPU" in output and "--lora-r" in output

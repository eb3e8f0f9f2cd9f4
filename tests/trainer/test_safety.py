"""What is not finite, or far out of range, never reaches the weights; and the update can be done again."""

from __future__ import annotations

import json
import math
import re
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

import train_ppo
from rlhf.algorithms.table import ALGORITHMS
from rlhf.callbacks.base import Callback
from rlhf.callbacks.incidents import Incident, save_incident
from rlhf.checkpoints.run_record import RunRecord
from rlhf.run.command import train_command
from rlhf.run.replay import replay
from rlhf.trainer import collect, evaluation, optimize, safety
from rlhf.utils.errors import RLHFWarning, RunError, UserError, run_command
from tests.conftest import attach


def weights(trainer) -> torch.Tensor:
    return torch.cat([w.detach().flatten().clone() for w in trainer.model.parameters() if w.requires_grad])


class Heard(Callback):
    def __init__(self):
        self.ends, self.drops = [], []

    def on_update_end(self, update, metrics):
        self.ends.append(update)

    def on_update_skipped(self, update, rollout, batch, found):
        self.drops.append((update, str(found)))


def spoil_scores(trainer, value):
    """A reward function that gives one bad number in every batch."""

    def spoilt(completions, **_):
        return [value, *[1.0] * (len(completions) - 1)]

    trainer.rewards.functions, trainer.rewards.names = [spoilt], ["spoilt"]
    trainer.rewards.weights = [1.0]


def spoil_logits(trainer, value):
    """The first token's logit: of the training forward alone, so that sampling goes on."""
    really = trainer.actor.forward_heads

    def heads(hidden, *more):
        spoilt = hidden.clone()
        spoilt[0, 0] = value
        return really(spoilt, *more)

    trainer.actor.forward_heads = heads


def spoil_gradients(trainer, value):
    """One number of one weight's gradient."""
    weight = next(w for w in trainer.model.parameters() if w.requires_grad)
    weight.register_hook(lambda grad: torch.where(torch.arange(grad.numel()).view_as(grad) == 0, value, grad))


def spoil_loss(trainer, value):
    really = trainer.algorithm.loss

    def losses(*given):
        loss, stats = really(*given)
        return loss + value, {**stats, "loss": stats["loss"] + value}

    trainer.algorithm.loss = losses


WAYS = {"scores": spoil_scores, "logits": spoil_logits, "gradients": spoil_gradients, "loss": spoil_loss}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_bad_reaches_the_weights(build, algorithm, way, value):
    trainer, heard = build(algorithm=algorithm), Heard()
    trainer.add_callback(heard)
    before = weights(trainer)
    WAYS[way](trainer, value)
    metrics = trainer.update_step(1)
    assert torch.equal(weights(trainer), before)
    assert metrics["updates/dropped"] == 1 and trainer.progress.optimizer_steps == 0
    assert heard.ends == [] and [u for u, _ in heard.drops] == [1]
    assert all(w.grad is None or not w.grad.any() for w in trainer.model.parameters())


def test_the_run_goes_on_after_a_drop(build):
    trainer = build("--num-iterations", 4)
    really, calls = trainer.algorithm.loss, []

    def once(*given):
        calls.append(1)
        loss, stats = really(*given)
        return (loss * math.nan, {**stats, "loss": stats["loss"] * math.nan}) if len(calls) == 3 else (loss, stats)

    trainer.algorithm.loss = once
    heard = Heard()
    trainer.add_callback(heard)
    metrics = trainer.train()
    assert heard.ends == [1, 3, 4] and [u for u, _ in heard.drops] == [2]
    assert metrics["updates/dropped"] == 1 and trainer.progress.skipped_in_a_row == 0
    assert trainer.progress.optimizer_steps == 6, "2 in each update, none in the second"


def test_earlier_steps_of_the_update_stay(build):
    trainer = build("--ppo-epochs", 2)
    before, really, calls = weights(trainer), trainer.algorithm.loss, []

    def second(*given):
        calls.append(1)
        loss, stats = really(*given)
        return (loss * math.nan, {**stats, "loss": stats["loss"] * math.nan}) if len(calls) == 2 else (loss, stats)

    trainer.algorithm.loss = second
    trainer.update_step(1)
    assert trainer.progress.optimizer_steps == 1
    assert not torch.equal(weights(trainer), before) and weights(trainer).isfinite().all()


@pytest.mark.parametrize("shift, seen", [(-3.0, "20.1"), (3.0, "0.0498")])
def test_a_ratio_far_out_of_range_skips_the_update(build, monkeypatch, shift, seen):
    """As if the replies had been sampled from another policy, e^3 times less or more likely to say them."""

    def from_another(trainer):
        really = trainer.collector.logprobs

        def logprobs(*given, **more):
            logprobs, *rest = really(*given, **more)
            return (logprobs + shift, *rest)

        trainer.collector.logprobs = logprobs
        return trainer

    trainer, heard = from_another(build("--ppo-epochs", 2)), Heard()
    trainer.add_callback(heard)
    before = weights(trainer)
    trainer.update_step(1)
    assert f"policy/ratio is {seen}" in heard.drops[0][1] and trainer.progress.optimizer_steps == 0
    assert torch.equal(weights(trainer), before)
    monkeypatch.setattr(safety, "MOST_RATIO", math.inf)
    other = from_another(build("--ppo-epochs", 2))
    other.update_step(1)
    assert other.progress.optimizer_steps == 2


def test_a_controller_does_not_steer_by_a_skipped_update(build):
    from rlhf.algorithms.kl_control import kl_controller
    from rlhf.callbacks.kl import KLControl

    trainer = build("--num-iterations", 4)
    control = KLControl(kl_controller(trainer.config, 4), trainer.set_kl_coef, 4)
    trainer.add_callback(control)
    spoil_scores(trainer, math.nan)
    beta = trainer.kl_coef
    trainer.update_step(1)
    assert control.controller.done == 1 and trainer.kl_coef == control.controller.beta == beta


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_few_in_a_row_stop_the_run_with_an_incident_that_can_be_done_again(
    configured, tmp_path, monkeypatch, capsys, algorithm
):
    train, others = partial(train_command, algorithm), [name for name in ALGORITHMS if name != algorithm]
    plain, from_update = optimize.PolicyOptimizer.gradients, 1

    def spoilt(self, batch, micro_batch, tokens, hidden=None):
        stats = plain(self, batch, micro_batch, tokens, hidden)
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
        patch.setattr(optimize.PolicyOptimizer, "gradients", spoilt)
        run_command(lambda: train([*argv, "--output", str(output)]))
    printed = capsys.readouterr()
    assert ended.value.code == 1 and "3 updates in a row were skipped: update 4" in printed.err
    folder = output / "incidents" / "update-000004"
    assert f"python train_{algorithm}.py --replay {folder}" in printed.out
    assert RunRecord.read(output).status == "failed"
    incident = json.loads((folder / "incident.json").read_text())
    assert incident["versions"]["trl"] == "1.12.0"
    assert incident["settings"]["model"]["actor_model"] == config.model.actor_model
    rows = [json.loads(line) for line in (folder / "batch.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all(row["reply_ids"] and row["prompt_ids"] for row in rows)

    for other in others:
        with pytest.raises(UserError, match=f"an incident of train_{algorithm}.py: --replay"):
            train_command(other, ["--replay", str(folder)])
    before = sorted(Path().iterdir())
    train(["--replay", str(folder)])
    assert sorted(Path().iterdir()) == before, "a replay leaves nothing"
    printed = capsys.readouterr().out
    assert "policy/grad_norm" in printed and "gradient of" not in printed, (
        "here the fault was in the code, not in the files"
    )
    from_update = 0
    monkeypatch.setattr(optimize.PolicyOptimizer, "gradients", spoilt)
    train(["--replay", str(folder)])
    assert "gradient of" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [
    (), ("--use-lora",), ("--missing-eos-penalty", 2.5, "--normalize-scores"),
    ("--reward-func", "length_penalty", "--reward-weights", 1, 0.01),
])  # fmt: skip
def test_a_replay_gives_the_numbers_that_were_recorded(build, tmp_path, flags):
    """Weights, batch and beta are all that an update's first step depends on."""
    trainer = build("--num-iterations", 3, *flags)
    trainer.update_step(1)
    rollout = trainer.collector.collect(trainer.prompts_of(2), 2)
    batch = trainer.advantages(rollout, trainer.collector.score(rollout).shaped)
    save_incident(trainer, tmp_path / "incident", 2, rollout, batch, safety.SkipUpdate("a test", [0, 1, 2, 3]))
    stats = trainer.learner.minibatch_gradients(batch, [0, 1, 2, 3])
    trainer.optimizer.zero_grad()
    incident = Incident.read(str(tmp_path / "incident"))
    again = dict(replay(build("--num-iterations", 3, *flags), incident))
    for name in ("loss", "policy/grad_norm", "policy/ratio", "policy/entropy"):
        assert again[name] == f"{float(stats[name]):.6g}", name
    assert again["found"] == "a test"
    assert again["logprobs, as recorded"] == again["logprobs, done again"]
    held = incident.tensors
    assert torch.equal(held["scores"], rollout.scores)
    # the file keeps the names of earlier versions
    assert torch.equal(held["advantages"], batch.raw_advantages) and torch.equal(held["weights"], batch.advantages)
    assert incident.config("elsewhere").batch == trainer.config.batch


def test_a_reply_may_hold_any_character(build, tmp_path):
    """Some of which Python takes for the end of a line."""
    trainer = build()
    rollout = trainer.collector.collect(trainer.prompts_of(1), 1)
    rollout.texts[0] = "a\u2028b\u0085c\x0bd"
    save_incident(trainer, tmp_path / "incident", 1, rollout, None, safety.SkipUpdate("a test"))
    assert Incident.read(str(tmp_path / "incident")).rows[0]["reply"] == rollout.texts[0]


def test_what_is_no_incident_is_a_line(tmp_path):
    with pytest.raises(UserError, match="no whole incident: --replay"):
        train_ppo.main(["--replay", str(tmp_path)])


def test_an_evaluation_with_a_bad_score_ends_the_run(build):
    trainer = build()
    spoil_scores(trainer, math.nan)
    with pytest.raises(RunError, match="not a finite number: reward function spoilt"):
        trainer.evaluate()


# --- KL that runs away -----------------------------------------------------------------------------------------------


def kl_is(trainer, values):
    """What the controllers hear of the KL, update by update."""
    really = trainer.events.call

    def call(event, *details):
        if event == "on_update_end":
            update, metrics = details
            metrics["kl_divergence"] = values[update - 1]
        really(event, *details)

    trainer.events.call = call


def test_a_kl_that_runs_away_doubles_beta(build, tmp_path):
    trainer = build("--num-iterations", 3, "--kl-schedule", "adaptive", "--kl-target", "6/sequence", "--kl-coef", 0.1,
                    "--kl-horizon", 10_000)  # fmt: skip
    attach(trainer)
    kl_is(trainer, [6.0, 25.0, 6.0])
    trainer.train()
    assert trainer.kl_coef == pytest.approx(0.2, rel=0.01), (
        "4 episodes of a horizon of 10,000 move it by next to nothing"
    )


def test_rollback_takes_the_weights_to_the_last_checkpoint_from_before(build, tmp_path):
    """Update 4's KL is of the weights after update 3, so these had run away: those after 2 are the last good ones."""
    flags = ["--num-iterations", 8, "--kl-schedule", "adaptive", "--kl-target", "6/sequence", "--save-every", 1,
             "--keep", 6, "--eval-every", 100, "--learning-rate", "1e-2"]  # fmt: skip
    ends, rates = {}, {}
    for more in ((), ("--rollback-on-kl",)):
        trainer, seen = build(*flags, "--output", tmp_path / str(len(more)), *more), {}
        attach(trainer)
        kl_is(trainer, [6.0, 6.0, 6.0, 30.0, 30.0, 30.0, 6.0, 6.0])
        watch(trainer, seen)
        trainer.train()
        ends[more] = seen
        rates[more] = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        assert trainer.optimizer.param_groups[0]["lr"] == trainer.lr_scheduler.get_last_lr()[0]
    assert rates[()] == rates[("--rollback-on-kl",)], "the schedule goes on"
    plain, back = ends[()], ends[("--rollback-on-kl",)]
    assert all(torch.equal(plain[n], back[n]) for n in range(1, 6))
    assert torch.equal(back[6], back[2]) and not torch.equal(plain[6], plain[2])
    assert not torch.equal(back[3], back[2])
    assert not torch.equal(back[7], back[6]), "and training goes on"


def watch(trainer, seen):
    class Watch(Callback):
        def on_update_done(self, update):
            seen[update] = weights(trainer)

    trainer.add_callback(Watch())


# --- out of memory ---------------------------------------------------------------------------------------------------


def short_of_memory(trainer, most):
    """A device that holds the graph of at most so many replies."""
    really, sizes = trainer.learner.gradients, []

    def gradients(batch, micro_batch, tokens, hidden=None):
        sizes.append(len(micro_batch.rows))
        if len(micro_batch.rows) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return really(batch, micro_batch, tokens, hidden)

    trainer.learner.gradients = gradients
    return sizes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_out_of_memory_halves_the_micro_batch_and_changes_no_step(build, algorithm):
    plain, short = build(algorithm=algorithm), build(algorithm=algorithm)
    plain.update_step(1)
    sizes = short_of_memory(short, 1)
    with pytest.warns(RLHFWarning, match="out of memory in the backward pass: reduced the micro-batch size to 2 for"):
        short.update_step(1)
    assert sizes == [4, 2, 1, 1, 1, 1, 1, 1, 1, 1], "halved twice, and then for good"
    assert short.progress.optimizer_steps == plain.progress.optimizer_steps == 2
    assert float((weights(plain) - weights(short)).abs().max()) < 1e-4


@pytest.mark.parametrize("flags", [(), ("--use-lora",)])
def test_out_of_memory_with_one_reply_names_what_helps(build, flags):
    trainer = build(*flags)
    attach(trainer)
    short_of_memory(trainer, 0)
    with pytest.warns(RLHFWarning), pytest.raises(RunError) as raised:
        trainer.update_step(1)
    message = str(raised.value)
    assert "out of memory with one completion at a time: the backward pass" in message
    named = re.findall(r"(--[a-z0-9-]+)[ 0-9]* \(about ([0-9.]+) GiB less\)", message)
    assert len(named) == 3 and ("--use-lora" in dict(named)) == (not flags)
    sizes = [float(size) for _, size in named]
    assert sizes == sorted(sizes, reverse=True)


def test_computing_logprobs_is_halved_too(build, monkeypatch):
    trainer = build()
    really, calls = collect.compute_logprobs_and_values, []

    def measure(actor, reference, completions, temperature, rows, *more):
        calls.append(rows)
        if rows != 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return really(actor, reference, completions, temperature, rows, *more)

    monkeypatch.setattr(collect, "compute_logprobs_and_values", measure)
    with pytest.warns(RLHFWarning, match="in computing log-probabilities"):
        trainer.update_step(1)
    assert calls == [0, 0, 2, 1], "first from the pass that has begun, then alone, then in parts"


def test_a_cached_forward_makes_room_for_computing_logprobs(build, monkeypatch):
    """The device has memory for the graph of the first step's pass or for computing log-probs, not for both."""
    trainer, really, begun, tried = build(), collect.compute_logprobs_and_values, [], []

    def start(completions):
        forward = plain(completions)
        begun.append(weakref.ref(forward[1]))
        return forward

    def measure(*given):
        tried.append(begun[0]() is not None)
        if tried[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return really(*given)

    plain = trainer.collector.precompute_first_forward
    monkeypatch.setattr(trainer.collector, "precompute_first_forward", start)
    monkeypatch.setattr(collect, "compute_logprobs_and_values", measure)
    trainer.update_step(1)
    assert tried == [True, False] and trainer.progress.optimizer_steps == 2


PHASES = {
    "the rollout": (collect, "sample_completions"),
    "an evaluation": (evaluation, "evaluate"),
}


@pytest.mark.parametrize("phase", [*PHASES, "scoring", "the optimizer step"])
def test_out_of_memory_elsewhere_names_the_phase_and_what_helps(build, monkeypatch, phase):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    trainer = build()
    attach(trainer)
    if phase in PHASES:
        monkeypatch.setattr(*PHASES[phase], full)
    elif phase == "scoring":
        trainer.rewards.functions[0] = full
    else:
        trainer.optimizer.step = full
    with pytest.raises(RunError, match=rf"out of memory: {phase} \(CUDA .*\)\. What would help most: --"):
        trainer.evaluate() if phase == "an evaluation" else trainer.update_step(1)


def test_out_of_memory_before_the_run_is_a_line(monkeypatch, capsys):
    def main():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 1
    assert re.match(r"error: out of memory: CUDA .*\. Try --use-lora", capsys.readouterr().err)


def test_out_of_memory_on_a_cpu_is_a_line(capsys, tmp_path, monkeypatch):
    """torch's allocator raises a RuntimeError, Python and numpy a MemoryError."""
    monkeypatch.chdir(tmp_path)
    for call in (lambda: torch.empty(2**60), lambda: bytearray(2**62)):
        with pytest.raises(SystemExit) as ended:
            run_command(call)
        output = capsys.readouterr().err
        assert ended.value.code == 1 and re.fullmatch(
            r"error: out of memory on the CPU: .*\. Try a smaller .*\n", output
        )
    assert not list(tmp_path.iterdir())


def test_an_unexpected_error_is_a_line_and_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: [1][2])
    output = capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    assert ended.value.code == 1 and output.count("\n") == 1
    assert output.startswith("error: unexpected IndexError (list index out of range)") and str(file) in output
    assert "Traceback" in file.read_text() and "list index out of range" in file.read_text()


def test_adapters_larger_than_the_memory_are_a_line(run_flags, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: train_ppo.main(run_flags("--use-lora", "--lora-r", "1e9")))
    output = capsys.readouterr().err
    assert ended.value.code == 1 and output.startswith("error: out of memory on the CPU: ") and output.count("\n") == 1

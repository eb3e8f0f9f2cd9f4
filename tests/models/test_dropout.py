"""The adapters' dropout: in optimizer steps and nowhere else, from the seed, and the same after a resume."""

from __future__ import annotations

import functools

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from rlhf.algorithms.table import ALGORITHMS
from rlhf.models import actor_critic
from rlhf.run.command import train_command
from rlhf.setup import trial
from tests.kills import differing
from tests.run.test_resume import Killed, interrupt

DROPOUT = ("--use-lora", "--lora-dropout", "0.3")


@pytest.fixture(params=list(ALGORITHMS))
def make(build, request):
    """`build` for each algorithm."""
    return functools.partial(build, algorithm=request.param)


def weights(trainer) -> torch.Tensor:
    return torch.cat([w.detach().flatten() for w in trainer.model.parameters() if w.requires_grad])


def shares(trainer) -> set[float]:
    """Of all dropout modules of the adapters."""
    layers = [m for m in trainer.actor.policy.modules() if isinstance(m, LoraLayer)]
    return {d.p for m in layers for d in m.lora_dropout.values() if isinstance(d, nn.Dropout)}


def test_trl_turns_it_off_and_it_is_turned_on_again(make, monkeypatch):
    assert shares(make(*DROPOUT)) == {0.3} and shares(make("--use-lora")) == set()
    monkeypatch.setattr("rlhf.trainer.loop.set_adapter_dropout", lambda *_: None)
    assert shares(make(*DROPOUT)) == {0}, "else this line of ours is no longer needed"


def test_it_acts_in_optimizer_steps_and_never_in_computing_logprobs(make):
    """An adapter that is zero hides what is dropped before it: one that was trained shows it."""
    trainer = make(*DROPOUT, "--learning-rate", "1e-1", "--ppo-epochs", 1)
    with torch.no_grad():
        for name, weight in trainer.actor.policy.named_parameters():
            if "lora_B" in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    rollout = trainer.collector.collect(trainer.prompts_of(1), 1)
    assert not trainer.collector.cached_forward, "the first step's pass has dropout"
    again = trainer.collector.collect(trainer.prompts_of(1), 1)
    assert torch.equal(rollout.logprobs, again.logprobs)
    trainer.model.train()
    assert torch.equal(trainer.collector.logprobs(rollout.completions)[0], rollout.logprobs), (
        "in whatever mode it is asked"
    )
    logged = trainer.update_step(1)
    assert abs(logged["policy/ratio"] - 1) > 1e-4 or logged["policy/approx_kl"] > 1e-6
    found = trial.first_ratio_is_one(trainer, trainer.collector.collect(trainer.prompts_of(2), 2))
    assert found.ok and " without dropout; " in found.found and found.found.endswith("with --lora-dropout 0.3")
    assert shares(trainer) == {0.3}, "the check leaves it as it was"


def test_it_draws_from_the_seed_and_leaves_the_global_stream_alone(make):
    ends = []
    for seed, stream in ((7, 1), (7, 2), (8, 1)):
        trainer = make(*DROPOUT, "--learning-rate", "1e-2", "--seed", seed)
        torch.manual_seed(stream)
        before = torch.get_rng_state()
        trainer.update_step(1)
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(weights(trainer))
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


def test_two_updates_drop_not_the_same(make):
    trainer = make(*DROPOUT)
    drawn = []
    for update in (1, 2, 1):
        with trainer.learner.dropout_stream(update):
            drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_is_the_uninterrupted_one(configured, tmp_path, monkeypatch, algorithm):
    config = configured()
    more = ["--batch-size", 2, "--K", 2] if ALGORITHMS[algorithm].group_size > 1 else []
    words = [*DROPOUT, *more, "--actor-model", config.model.actor_model, "--rm-model", config.model.rm_model,
             "--prompts", config.data.prompts, "--allow-weak-reward-model", "--num-iterations", 5, "--save-every", 2,
             "--eval-every", 3, "--max-new-tokens", 8, "--eval-prompts", 6, "--learning-rate", "1e-2"]  # fmt: skip

    def train(output):
        train_command(algorithm, [str(word) for word in (*words, "--output", tmp_path / output)])

    train("whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, 4, Killed())
        train("broken")
    torch.manual_seed(99)  # as a new process has another stream
    train_command(algorithm, ["--resume", "--output", str(tmp_path / "broken")])
    assert differing(tmp_path / "whole", tmp_path / "broken") == []


def test_only_adapters_are_touched():
    layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    actor_critic.set_adapter_dropout(layer, 0.1)
    assert layer[1].p == 0.5

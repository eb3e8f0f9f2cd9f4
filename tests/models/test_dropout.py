"""Tests LoRA dropout: active only in optimizer steps, seeded, and identical after a resume."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.testing import assert_close

from rlhf.algorithms.table import ALGORITHMS
from rlhf.commands.train import train_command
from rlhf.models import actor_critic
from rlhf.models.actor_critic import TokenDropout
from rlhf.setup import trial
from tests.conftest import BY_TIER
from tests.kills import differing
from tests.run.test_resume import Killed, interrupt

DROPOUT = ("--use-lora", "--lora-dropout", "0.3")


@pytest.fixture(params=BY_TIER)
def make(build, request):
    """The `build` fixture, for each algorithm."""
    return functools.partial(build, algorithm=request.param)


def weights(trainer) -> torch.Tensor:
    return torch.cat([w.detach().flatten() for w in trainer.host.model.parameters() if w.requires_grad])


def dropout_probabilities(trainer) -> set[float]:
    """Return the dropout probabilities of the adapters."""
    layers = [m for m in trainer.actor.policy.modules() if isinstance(m, LoraLayer)]
    return {d.p for m in layers for d in m.lora_dropout.values() if isinstance(d, nn.Dropout)}


def test_dropout_that_trl_disables_is_enabled_again(make, monkeypatch):
    assert dropout_probabilities(make(*DROPOUT)) == {0.3} and dropout_probabilities(make("--use-lora")) == set()
    monkeypatch.setattr("rlhf.trainer.loop.set_adapter_dropout", lambda *_: None)
    assert dropout_probabilities(make(*DROPOUT)) == {0}, "TRL keeps dropout now: remove set_adapter_dropout"


def test_dropout_acts_in_optimizer_steps_and_not_in_logprobs(make):
    """The adapters get non-zero weights first, because dropout has no effect on a zero adapter."""
    trainer = make(*DROPOUT, "--learning-rate", "1e-1", "--ppo-epochs", 1)
    with torch.no_grad():
        for name, weight in trainer.actor.policy.named_parameters():
            if "lora_B" in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    assert trainer.passes._kept is None, "the forward pass of the first step has dropout"
    again = trainer.collector.collect(trainer.episodes_of(1), 1)
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}  # greedy completions have no log-probs
    assert_close(rollout.logprobs, again.logprobs, **exactly)
    trainer.host.model.train()
    # dropout is not in log-probs
    assert_close(trainer.passes.logprobs(rollout.completions)[0], rollout.logprobs, **exactly)
    logged = trainer.update_step(1)
    assert abs(logged["policy/ratio"] - 1) > 1e-4 or logged["policy/approx_kl"] > 1e-6
    found = trial.first_ratio_is_one(trainer, trainer.collector.collect(trainer.episodes_of(2), 2))
    assert found.ok
    assert dropout_probabilities(trainer) == {0.3}, "the check must not change the dropout"


def test_dropout_uses_the_seed_and_not_the_global_random_state(make):
    final_weights = []
    for seed, global_seed in ((7, 1), (7, 2), (8, 1)):
        trainer = make(*DROPOUT, "--learning-rate", "1e-2", "--seed", seed)
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        trainer.update_step(1)
        assert torch.equal(torch.get_rng_state(), before)
        final_weights.append(weights(trainer))
    assert torch.equal(final_weights[0], final_weights[1]) and not torch.equal(final_weights[0], final_weights[2])


def masks_of(trainer, rows) -> dict[str, torch.Tensor]:
    """Return the inputs that one layer keeps, by the number of the token, in a forward pass over `rows`."""
    completions = trainer.rollout.completions
    micro_batch = trainer.passes.run(completions, rows).micro_batch
    layer = next(m for m in trainer.actor.policy.modules() if isinstance(m, TokenDropout))
    trainer.host.model.train()
    trainer.actor.dropout.set_tokens(micro_batch)
    kept = layer(torch.ones(len(micro_batch.places), 16)) > 0
    return {str(number): row for number, row in zip(micro_batch.token_numbers().tolist(), kept, strict=True)}


def test_masks_depend_on_the_step_and_the_token_and_not_on_the_micro_batch(make):
    trainer = make(*DROPOUT, "--max-new-tokens", 30)
    trainer.rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    trainer.policy_optimizer.seed_dropout(1, 0)
    whole = masks_of(trainer, [0, 1, 2, 3])
    for rows in ([0], [3, 1], [2]):
        assert all(torch.equal(whole[number], mask) for number, mask in masks_of(trainer, rows).items())
    together = torch.stack(list(whole.values()))
    assert abs(float(together.float().mean()) - 0.7) < 0.06 and len({tuple(m.tolist()) for m in together}) > 50
    by_step = []
    for update, step in ((2, 0), (1, 1), (1, 0)):
        trainer.policy_optimizer.seed_dropout(update, step)
        by_step.append(torch.stack(list(masks_of(trainer, [0, 1, 2, 3]).values())))
    assert torch.equal(by_step[2], together)
    assert not torch.equal(by_step[0], together) and not torch.equal(by_step[1], together)


def test_mask_has_the_probability_and_no_pattern_between_tokens_features_and_layers():
    keys = actor_critic.DropoutKeys()
    keys.tokens = torch.from_numpy(actor_critic._mixed(np.arange(2000, dtype=np.uint64)).view(np.int32))
    kept = [TokenDropout(0.2, layer, keys)(torch.ones(2000, 500)) for layer in (0, 1)]
    assert all(set(layer.unique().tolist()) == {0.0, 1.25} for layer in kept)
    bits = [(layer > 0).double() for layer in kept]
    for one in bits:  # 5 standard deviations of means over 1,000,000, 2,000 and 500 draws
        assert abs(float(one.mean()) - 0.8) < 5 * 0.4 / 1000
        assert float((one.mean(0) - 0.8).abs().max()) < 5 * 0.4 / 2000**0.5
        assert float((one.mean(1) - 0.8).abs().max()) < 5 * 0.4 / 500**0.5
    pairs = [(bits[0], bits[1]), (bits[0][1:], bits[0][:-1]), (bits[0][:, 1:], bits[0][:, :-1])]
    for a, b in pairs:  # correlations between layers, neighbouring tokens and neighbouring features
        assert abs(float(((a - 0.8) * (b - 0.8)).mean())) < 5 * 0.16 / 999


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_resumed_run_equals_the_uninterrupted_run(configured, tmp_path, monkeypatch, algorithm):
    config = configured()
    more = ["--batch-size", 2, "--K", 2] if ALGORITHMS[algorithm].group_size > 1 else []
    flags = [*DROPOUT, *more, "--actor-model", config.model.actor_model, "--rm-model", config.model.rm_model,
             "--prompts", config.data.prompts, "--allow-weak-reward-model", "--num-iterations", 5, "--save-every", 2,
             "--eval-every", 3, "--max-new-tokens", 8, "--eval-prompts", 6, "--learning-rate", "1e-2"]  # fmt: skip

    def train(output):
        train_command(algorithm, [str(word) for word in (*flags, "--output", tmp_path / output)])

    train("whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, 4, Killed())
        train("broken")
    torch.manual_seed(99)  # a new process starts with a different global random state
    train_command(algorithm, ["--resume", "--output", str(tmp_path / "broken")])
    assert differing(tmp_path / "whole", tmp_path / "broken") == []


def test_only_adapter_dropout_is_changed():
    layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    actor_critic.set_adapter_dropout(layer, 0.1, actor_critic.DropoutKeys())
    assert layer[1].p == 0.5

"""Tests of the copies of the weights: converted once per optimizer step, never older than the weights, and without any
effect on what is learned."""

from __future__ import annotations

import copy
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rlhf.models import llama, logprobs
from rlhf.models.actor_critic import Actor
from rlhf.models.cast_weights import CastWeights, product, stored
from rlhf.models.packing import PackedMicroBatch, TokenBatch
from rlhf.models.reference import Reference
from tests.conftest import whole_gradient
from tests.models.test_packing import CONFIGS, episodes


@pytest.fixture
def weight():
    return nn.Parameter(torch.tensor([[1.0, 1 / 3]]))


def test_copies_are_used_inside_the_context_only(weight):
    copies = CastWeights([weight], torch.bfloat16)
    assert stored(weight) is weight and not copies.copies, "an evaluation of models, which uses none, needs no memory"
    with copies.in_use():
        assert stored(weight).dtype == torch.bfloat16 and stored(weight).tolist() == [[1.0, 0.333984375]]
    assert stored(weight) is weight


def test_a_changed_weight_has_no_copy_until_the_next_conversion(weight):
    copies = CastWeights([weight], torch.bfloat16)
    with copies.in_use(), torch.no_grad():
        weight.add_(1)
        assert stored(weight) is weight
        copies.refresh()
        assert stored(weight).tolist() == [[2.0, 1.3359375]]


def test_a_change_through_data_is_in_the_copies_of_the_next_context(weight):
    copies = CastWeights([weight], torch.bfloat16)
    with copies.in_use():
        pass
    weight.data[0, 0] = 5
    with copies.in_use():
        assert stored(weight)[0, 0] == 5


def test_a_second_context_of_the_same_copies_leaves_a_stored_graph_valid(weight):
    """As an evaluation in a callback between the forward pass of the rollout and its backward pass."""
    copies = CastWeights([weight], torch.bfloat16)
    with copies.in_use():
        found = llama._Product.apply(torch.ones(1, 2, dtype=torch.bfloat16), weight)
        with copies.in_use():
            pass
        found.sum().backward()
    assert weight.grad.tolist() == [[1.0, 1.0]] and weight.grad.dtype == torch.float32


def test_a_graph_from_before_an_optimizer_step_is_refused(weight):
    copies = CastWeights([weight], torch.bfloat16)
    with copies.in_use():
        found = llama._Product.apply(torch.ones(1, 2, dtype=torch.bfloat16).requires_grad_(), weight)
        copies.refresh()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            found.sum().backward()


def test_weights_that_need_no_conversion_have_no_copy():
    weights = [nn.Parameter(torch.ones(2, 2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)]
    assert CastWeights(weights, torch.bfloat16).weights == CastWeights(weights, None).weights == []


class Conversions(TorchDispatchMode):
    """Counts how often each of some weights is converted alone."""

    def __init__(self, weights):
        super().__init__()
        self.places = {w.data_ptr() for w in weights}
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._to_copy.default and "dtype" in (kwargs or {}):
            self.count += args[0].data_ptr() in self.places
        return operator(*args, **(kwargs or {}))


def test_an_update_converts_the_weights_before_the_rollout_and_after_each_optimizer_step(build, monkeypatch):
    trainer = build("--bf16", "--ppo-epochs", 2, "--minibatches", 2)
    calls = []
    refresh = CastWeights.refresh
    monkeypatch.setattr(CastWeights, "refresh", lambda copies: (calls.append(1), refresh(copies)))
    run = trainer.policy_optimizer.run
    weights = trainer.passes.weights.weights
    watched = Conversions(weights)

    def optimize(*arguments):
        with watched:
            return run(*arguments)

    monkeypatch.setattr(trainer.policy_optimizer, "run", optimize)
    trainer.update_step(1)
    assert len(weights) == 1 + 7 * 2, "the head, and seven matrices in each of two layers"
    assert len(calls) == 1 + 2 * 2 and watched.count == 0


@pytest.mark.parametrize(
    "flags",
    [(), ("--gradient-checkpointing",), ("--critic", "separate"), ("--use-lora",), ("--no-packed",)],
    ids=" ".join,
)
def test_copies_change_no_weight_of_an_update(build, monkeypatch, flags):
    """Two updates in bfloat16 with and without copies end with the same bits."""
    found = []
    for _ in range(2):
        trainer = build("--bf16", "--ppo-epochs", 2, "--learning-rate", 1e-3, *flags)
        trainer.update_step(1)
        trainer.update_step(2)
        found.append({name: weight.detach() for name, weight in trainer.host.model.named_parameters()})
        for module in (llama, logprobs):
            monkeypatch.setattr(module, "stored", lambda weight: weight)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


def test_gradients_in_bfloat16_are_near_those_in_float32(build):
    """Of a batch with the same completions. A number in bfloat16 has a relative error of up to 2^-9 = 0.002."""
    exact = build("--no-bf16")
    rounded = build("--bf16")
    rollout = exact.collector.collect(exact.episodes_of(1), 1)
    batch = exact.advantages(rollout, torch.arange(4.0))
    with rounded.passes.weights.in_use():
        (_, expected), (_, found) = whole_gradient(exact, batch), whole_gradient(rounded, batch)
    assert 0 < (found - expected).norm() / expected.norm() < 0.03


def test_entropy_is_that_of_the_first_epoch(build):
    """The first optimizer step is the same in both runs, so its entropy is. A mean over both epochs would differ."""
    flags = "--learning-rate", 1e-2, "--minibatches", 1
    one, two = (build(*flags, "--ppo-epochs", epochs).update_step(1) for epochs in (1, 2))
    assert one["policy/entropy"] == two["policy/entropy"] > 0
    assert one["policy/approx_kl"] != two["policy/approx_kl"]


# --- the same bits, and what only a GPU shows ------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_product_in_bfloat16_is_written_in_float32_without_rounding():
    torch.manual_seed(0)
    a = torch.randn(300, 576).bfloat16()
    b = torch.randn(576, 192).bfloat16()
    found = product(a.cuda(), b.cuda(), torch.float32).cpu()
    expected = a.double() @ b.double()
    assert found.dtype == torch.float32 and (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_log_probs_have_the_same_bits_with_and_without_gradients_and_in_the_reference(kind, temperature):
    """In bfloat16: so the first ratio is exactly 1, and the KL at the start exactly 0. The gradients are near those of
    a CPU in float32."""
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    exact = Actor(copy.deepcopy(policy))
    device = torch.device(kind)
    policy = policy.to(device)
    reference = Reference.before_training(policy, torch.bfloat16)
    actor = Actor(policy)
    copies = CastWeights([policy.lm_head.weight, *llama.plain_weights(policy)], torch.bfloat16)
    batch = PackedMicroBatch(on_device(episodes((0, 1, 0, 0)), device), range(4))
    with copies.in_use(), torch.autocast(kind, torch.bfloat16):
        with torch.no_grad():
            sampled = actor(batch, temperature)[0]
            of_reference = reference.logprobs(batch, temperature, None)
        trained = actor(batch, temperature)[0]
    assert torch.equal(trained, sampled) and torch.equal(of_reference, sampled)
    trained.sum().backward()
    exact(PackedMicroBatch(episodes((0, 1, 0, 0)), range(4)), temperature)[0].sum().backward()
    for (name, weight), expected in zip(policy.named_parameters(), exact.policy.parameters(), strict=True):
        assert (weight.grad.cpu() - expected.grad).norm() < 0.05 * expected.grad.norm(), name


def on_device(batch: TokenBatch, device: torch.device) -> TokenBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(TokenBatch)}
    return TokenBatch(**{n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in values.items()})

"""Compares the forward pass of rlhf.models.llama, and its gradients, with transformers' own layers."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from rlhf.data.prompts import Prompt, ids_alone
from rlhf.models import llama
from rlhf.models.logprobs import backbone_of
from rlhf.models.packing import PackedMicroBatch, PaddedMicroBatch
from rlhf.models.self_test import check_forward_matches
from rlhf.rollout.cpu_weights import copied_product
from rlhf.rollout.decoder import FusedDecoder, ModelDecoder, _Product, can_fuse, decoding_weight, make_decoder
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.kv_cache import SlotKVCache
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import RLHFWarning
from tests.models.test_packing import CPU, GROUPED, SIZES, episodes, with_exact_norms

CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "llama with rope scaling": LlamaConfig(
        **SIZES, num_key_value_heads=2,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
    ),
    "mistral": MistralConfig(**SIZES, **GROUPED, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen2 with a window": Qwen2Config(
        **SIZES, num_key_value_heads=2, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, **GROUPED),
}  # fmt: skip

COS_SIN = torch.tensor([[[0.6, 0.8]], [[0.3, -0.9]]], dtype=torch.float64)  # cosines and signed sines


@pytest.fixture(params=CONFIGS)
def model(request):
    """A float64 model with random gains, so that a gain that is left out shows."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[request.param])).eval().double()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name or "bias" in name:
                weight.uniform_(0.5, 1.5)
    return with_exact_norms(made)


def hidden_and_gradients(model, form, groups=(0, 1, 0, 0)):
    model.zero_grad()
    hidden = form(episodes(groups), range(4)).forward(backbone_of(model))
    (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)).sum().backward()
    return hidden.detach(), {n: w.grad for n, w in model.named_parameters() if w.grad is not None}


def test_every_gradient_equals_the_one_of_transformers(model):
    assert llama.supports(backbone_of(model))
    expected, by_weight = hidden_and_gradients(model, PaddedMicroBatch)
    found, by_weight_here = hidden_and_gradients(model, PackedMicroBatch)
    assert_close(found, expected, rtol=0, atol=1e-10)
    assert by_weight_here.keys() == by_weight.keys() and len(by_weight) > 20
    for name, gradient in by_weight.items():
        assert_close(by_weight_here[name], gradient, rtol=0, atol=1e-10 * float(gradient.abs().max()), msg=name)


def test_frozen_matrices_cost_no_products_for_their_gradients():
    """As under LoRA of the attention: the feed-forward layers are frozen. The other gradients stay the same. The
    gradients of gate and up are one product."""

    def products(frozen: bool) -> tuple[int, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"])).eval().double()
        for name, weight in made.named_parameters():
            weight.requires_grad = not (frozen and "mlp" in name)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            _, gradients = hidden_and_gradients(made, PackedMicroBatch)
        counts = {event.key: event.count for event in profiled.key_averages()}
        return counts["aten::mm"], gradients

    (all_products, every), (fewer, rest) = products(False), products(True)
    assert all_products - fewer == 2 * CONFIGS["llama"].num_hidden_layers
    assert rest.keys() == {name for name in every if "mlp" not in name}
    assert all(torch.equal(rest[name], every[name]) for name in rest)


def test_adapters_give_the_gradients_of_transformers(model):
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj", "up_proj"])).double()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    expected, by_weight = hidden_and_gradients(adapted, PaddedMicroBatch)
    found, by_weight_here = hidden_and_gradients(adapted, PackedMicroBatch)
    assert_close(found, expected, rtol=0, atol=1e-9)
    assert by_weight_here.keys() == by_weight.keys() and all("lora" in name for name in by_weight)
    for name, gradient in by_weight.items():
        assert_close(by_weight_here[name], gradient, rtol=0, atol=1e-9 * float(gradient.abs().max()), msg=name)


def test_checkpointing_changes_no_gradient(model):
    _, plain = hidden_and_gradients(model, PackedMicroBatch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    calls = []
    hook = backbone_of(model).layers[0].self_attn.o_proj.register_forward_hook(lambda *_: calls.append(1))
    _, again = hidden_and_gradients(model, PackedMicroBatch)
    hook.remove()
    assert len(calls) == 2, "the layer is computed again in the backward pass"
    for name, gradient in plain.items():
        assert_close(again[name], gradient, rtol=1e-9, atol=1e-12)


def test_under_bfloat16_the_difference_is_rounding():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    exact, _ = hidden_and_gradients(model, PaddedMicroBatch)
    found = {}
    for form in (PaddedMicroBatch, PackedMicroBatch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found[form] = hidden_and_gradients(model, form)
    theirs, ours = (float((found[form][0] - exact).abs().mean()) for form in (PaddedMicroBatch, PackedMicroBatch))
    assert 0 < ours < 1.5 * theirs
    for name, gradient in found[PaddedMicroBatch][1].items():
        apart = (found[PackedMicroBatch][1][name] - gradient).norm() / gradient.norm()
        assert apart < 0.05, name


@pytest.mark.parametrize(
    "function",
    [
        lambda x, g, w, v: llama._Norm.apply(x, g, 1e-5, torch.float64),
        lambda x, g, w, v: torch.cat(llama._AttentionInput.apply(x, g, 1e-5, 2, None, None, w, v, w * v), 1),
        lambda x, g, w, v: torch.cat(llama._AttentionInput.apply(x, g, 1e-5, 2, *COS_SIN, w, v, w * v), 1),
        lambda x, g, w, v: llama._Product.apply(x, w),
        lambda x, g, w, v: llama._FeedForward.apply(x, g, 1e-5, w, v, (w * v).t()),
        lambda x, g, w, v: llama._SwiGLU.apply(x @ w.t(), x @ v.t()),
        lambda x, g, w, v: llama._Rotary.apply(x.unflatten(-1, (2, 2)), *COS_SIN),
    ],
    ids=["norm", "attention input", "attention input with rotary", "product", "feed-forward", "swiglu", "rotary"],
)  # fmt: skip
def test_gradients_by_finite_differences(function):
    torch.manual_seed(0)
    shapes = (5, 4), (4,), (6, 4), (6, 4)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(function, inputs)


def test_the_table_of_rotary_embeddings_has_the_values_of_the_model(model):
    """Also after more positions, in another precision, and with positions in any order."""
    backbone = backbone_of(model)
    for positions, dtype in (([2, 0, 1], torch.float64), ([8, 8, 0, 5, 1, 7, 2, 0, 3], torch.float64), ([0, 1], None)):
        like = torch.zeros(1, dtype=dtype or torch.float32)
        at = torch.tensor(positions)
        for _ in range(2):
            known = llama.known_rotary(backbone, like, at)
            for found, expected in zip(known, llama.rotary(backbone, like, at), strict=True):
                assert found.dtype == like.dtype and torch.equal(found, expected)


def test_fewer_tensors_are_saved_for_the_backward_pass():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    weights = {id(w) for w in model.parameters()}
    saved = {}
    for form in (PaddedMicroBatch, PackedMicroBatch):
        found = {}

        def save(tensor, found=found):
            if id(tensor) not in weights:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        micro_batch = form(episodes(), range(4))
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            micro_batch.forward(backbone_of(model))
        saved[form] = sum(found.values()) / micro_batch.ids.numel()
    assert saved[PackedMicroBatch] < 0.7 * saved[PaddedMicroBatch]


def test_other_backbones_are_not_supported():
    gemma = AutoModelForCausalLM.from_config(Gemma3TextConfig(**SIZES, **GROUPED))
    assert not llama.supports(backbone_of(gemma)) and isinstance(make_decoder(gemma, 2, 8), ModelDecoder)
    gelu = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, hidden_act="gelu"))
    assert not llama.supports(backbone_of(gelu))
    dynamic = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert not llama.supports(backbone_of(AutoModelForCausalLM.from_config(dynamic)))


def test_a_model_that_fails_the_self_test_runs_its_own_layers(monkeypatch):
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    monkeypatch.setattr(llama, "_rotated", lambda x, cos, sin: x * cos)
    with pytest.warns(RLHFWarning, match="LlamaForCausalLM .* training is slower"):
        check_forward_matches(model, "a model")
    assert not llama.supports(backbone_of(model))
    expected, _ = hidden_and_gradients(model, PaddedMicroBatch)
    assert_close(hidden_and_gradients(model, PackedMicroBatch)[0], expected, rtol=0, atol=1e-5)


# --- decoding --------------------------------------------------------------------------------------------------------


def sampled(model, engine="slots", slots=3):
    prompts = [ids_alone(ids) for ids in ([5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [3], [20, 21], [5, 6, 7])]
    uniform = torch.rand(5, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return sample_completions(
        model, prompts, uniform, SamplingSettings(max_new_tokens=12, temperature=0.8), eos=1, pad=0, device=CPU,
        engine=engine, slots=slots,
    ).rows()  # fmt: skip


def test_fused_decoder_samples_the_tokens_of_transformers(model):
    assert can_fuse(model)
    assert sampled(model) == sampled(model, "plain") == sampled(model, slots=1)


def adapted(model, **more):
    """Return the model with adapters of some layers, which change its logits."""
    lora = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"], **more)
    found = get_peft_model(model, lora).eval().to(model.dtype)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=draw, dtype=weight.dtype))
    return found


@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_fused_decoder_merges_adapters(model, rank_stabilized):
    policy = adapted(model, use_rslora=rank_stabilized)
    expected = sampled(policy, "plain")
    assert can_fuse(policy) and sampled(policy) == expected
    with policy.disable_adapter():
        assert sampled(policy) == sampled(policy, "plain") != expected


def test_adapters_of_another_kind_are_not_fused(model):
    policy = adapted(model, use_dora=True)
    assert not can_fuse(policy) and sampled(policy) == sampled(policy, "plain")


def decoded(policy, static=False):
    """Return the logits (3, V) after a first token in three slots."""
    tokens = torch.tensor([5, 9, 20])
    with torch.no_grad():
        decoder = make_decoder(policy, 3, 8, static)
        assert isinstance(decoder, FusedDecoder)
        cache = SlotKVCache(3, 8)
        return decoder.logits(decoder.hidden(tokens, torch.zeros_like(tokens), 4, cache), 0.8)


@pytest.mark.parametrize("static", [False, True], ids=["slots", "graph"])
@pytest.mark.parametrize("lora", [None, False, True], ids=["all weights", "lora", "rslora"])
def test_decoder_logits_in_bfloat16_are_near_those_of_the_training_forward(model, lora, static):
    """Both are rounded at other places. The bound is 1.5 times the training forward's own distance to float32."""
    policy = (model if lora is None else adapted(model, use_rslora=lora)).float()
    ids = torch.tensor([[5], [9], [20]])
    with torch.no_grad():
        exact = policy(ids).logits[:, 0] / 0.8
        with torch.autocast("cpu", dtype=torch.bfloat16):
            training = policy(ids).logits[:, 0].float() / 0.8
            found = decoded(policy, static)
    assert 0 < (found - exact).abs().mean() < 1.5 * (training - exact).abs().mean()


def test_small_updates_of_adapters_are_not_lost_in_bfloat16():
    """At a weight of 0.05 bfloat16 has steps of 2.4e-4, so the sum with an update of 4e-5 is the weight itself. The
    products with the weights are 0, those with the update 4e-5 for each input."""
    linear = nn.Linear(64, 3, bias=False)
    dtype = torch.bfloat16
    states = torch.tensor([1.0, -1.0]).repeat(2, 32)
    with torch.no_grad():
        linear.weight.fill_(0.05).copy_(linear.weight.to(dtype))  # born in bfloat16
        lora = LoraConfig(r=1, lora_alpha=1, target_modules=["0"])
        layer = get_peft_model(nn.Sequential(linear), lora).get_base_model()[0]
        layer.lora_A["default"].weight.copy_(states[:1])
        layer.lora_B["default"].weight.fill_(4e-5)
        found = _Product([layer], dtype, 2, False)(states.to(dtype))
        merged = decoding_weight(layer, merge=True).to(dtype)
    assert torch.equal(merged.float(), layer.get_base_layer().weight)
    assert_close(found.float(), torch.full((2, 3), 64 * 4e-5), rtol=0.01, atol=0)


def test_decoder_of_the_models_layers_samples_the_same(model, monkeypatch):
    expected = sampled(model)
    monkeypatch.setattr("rlhf.rollout.decoder.can_fuse", lambda _: False)
    assert isinstance(make_decoder(model, 3, 20), ModelDecoder) and sampled(model) == expected


def test_fused_decoder_copies_the_weights(model):
    decoder = make_decoder(model, 2, 16)
    assert isinstance(decoder, FusedDecoder)
    states = torch.randn(2, model.config.hidden_size, dtype=torch.float64)
    before = decoder.logits(states.clone(), 1.0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert_close(decoder.logits(states, 1.0), before)


@pytest.mark.parametrize("size", [8, 600])
def test_a_copied_product_equals_the_linear_layer(size):
    layer = nn.Linear(size, size)
    states = torch.randn(4, size)
    with torch.no_grad():
        assert_close(copied_product(layer.weight, layer.bias, 4)(states), layer(states), rtol=1e-5, atol=1e-5)


def test_prompts_are_given_as_ids():
    assert isinstance(ids_alone([3]), Prompt)

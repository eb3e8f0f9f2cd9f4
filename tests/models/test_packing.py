"""Compares packed with padded micro-batches for several architectures, and the fused head with autograd."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from rlhf.data.prompts import Prompt
from rlhf.models import packing
from rlhf.models.actor_critic import Actor, places_of, scatter_to_padded
from rlhf.models.attention import packable
from rlhf.models.logprobs import backbone_of, token_logprobs
from rlhf.models.packing import PackedMicroBatch, PaddedMicroBatch
from rlhf.models.reference import Reference
from rlhf.rollout.completions import Completions, token_batch
from rlhf.trainer.passes import ForwardPasses

CPU = torch.device("cpu")
SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "pad_token_id": 0}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, **GROUPED),
    "mistral, a window of 5": MistralConfig(**SIZES, **GROUPED, sliding_window=5),
    "gemma 2, soft-capped, every other layer a window of 6": Gemma2Config(**SIZES, **GROUPED, sliding_window=6),
    "gemma 3, two layers of three a window of 6": Gemma3TextConfig(
        **SIZES, **GROUPED, sliding_window=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    ),
    "gpt-neox": GPTNeoXConfig(**SIZES),
}


@pytest.fixture(params=CONFIGS, ids=lambda name: name.split(",")[0])
def model(request):
    return make_model(request.param, seed=0)


def make_model(name, seed):
    """Makes a float64 model. Gemma 2 is float32: transformers' eager attention gives NaN for float64 padding rows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    return model if name.startswith("gemma 2") else with_exact_norms(model.double())


def with_exact_norms(model):
    """Makes the model's own norms compute in the model's dtype. transformers computes them in float32."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(exact_norm, module)
    return model


def exact_norm(module, x):
    return module.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon))


def episodes(groups=(0, 1, 2, 3), device=CPU):
    """Return four episodes of different lengths. Episodes of one group share a prompt."""
    draw = torch.Generator().manual_seed(1)

    def text(size):
        return torch.randint(3, 60, (size,), generator=draw).tolist()

    prompts = {g: text(size) for g, size in zip(range(4), (7, 3, 11, 1), strict=True)}
    made = token_batch([prompts[g] for g in groups], [text(n) for n in (4, 9, 1, 6)], 0, device)
    made.groups = list(groups)
    return made


@pytest.mark.parametrize("groups", [(0, 1, 2, 3), (0, 1, 0, 0), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2, 0, 3]], ids=str)
def test_packed_equals_padded(model, groups, rows):
    """Compares hidden states and the gradients of all weights, with shared prompts and rows in any order.

    Gradients have a larger tolerance: transformers' norms compute in float32 for every model dtype, and a shared
    prompt's gradient is summed there.
    """
    found = []
    for form in (PaddedMicroBatch, PackedMicroBatch):
        micro_batch = form(episodes(groups), rows)
        model.zero_grad()
        hidden = micro_batch.forward(backbone_of(model))
        weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
        (hidden * weights).sum().backward()
        grads = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])
        found.append((hidden.detach(), grads, micro_batch.tokens))
    exact = found[0][0].dtype == torch.float64
    for (padded, packed), tolerance in zip(zip(*found, strict=True), (1e-10 if exact else 1e-5, 1e-5, 0), strict=True):
        assert_close(packed, padded, rtol=0, atol=tolerance * float(padded.abs().max()))
    assert float(found[0][1].abs().max()) > 1e-3


@pytest.mark.parametrize("groups", [(0, 1, 2, 3), (0, 1, 0, 0)], ids=str)
def test_states_of_turns_are_those_of_the_whole_completion(model, groups):
    """With an environment's tokens between the turns, before the first and after the last one."""
    whole = episodes(groups)
    turns = [[range(0, 1), range(3, 4)], [range(2, 5), range(6, 8)], [range(0, 1)], [range(1, 6)]]
    made = replace(whole, turns=turns, action_mask=None)
    for form in (PaddedMicroBatch, PackedMicroBatch):
        every = form(whole, range(4)).forward(backbone_of(model))
        chosen = form(made, range(4)).forward(backbone_of(model))
        assert torch.equal(chosen, every[made.action_mask[whole.mask]])


@pytest.mark.parametrize("groups", [(0, 1, 2, 3), (0, 1, 0, 0)], ids=str)
def test_padding_of_rectangles_changes_no_result(model, groups, monkeypatch):
    """Hidden states and gradients are bit-identical to those with another index in the padding: the row's first."""

    def results():
        model.zero_grad()
        hidden = PackedMicroBatch(episodes(groups), range(4)).forward(backbone_of(model))
        hidden.square().sum().backward()
        return [hidden.detach(), *(w.grad.clone() for w in model.parameters() if w.grad is not None)]

    def with_first(rows):
        filled, starts = rectangle(rows)
        for into, row in zip(filled, rows, strict=True):
            into[len(row) :] = row[0]
        return filled, starts

    last = results()
    rectangle = packing._rectangle
    monkeypatch.setattr(packing, "_rectangle", with_first)
    for found, expected in zip(last, results(), strict=True):
        assert torch.equal(found, expected)


def test_rows_of_a_rectangle_are_padded_with_their_own_last_index():
    filled, starts = packing._rectangle([np.array([4, 5]), np.array([0, 1, 2, 3]), np.array([6])])
    assert filled.tolist() == [[4, 5, 5, 5], [0, 1, 2, 3], [6, 6, 6, 6]] and starts.tolist() == [0, 4, 8]


def test_packed_row_has_no_padding_and_each_prompt_once():
    made = episodes((0, 1, 0, 0))
    packed = PackedMicroBatch(made, [0, 1, 2, 3])
    assert packed.ids.shape[1] == 7 + 3 + (4 - 1) + (9 - 1) + (1 - 1) + (6 - 1)
    alone = [*made.prompt_ids[1, -3:].tolist(), *made.completion_ids[1, :8].tolist()]
    assert PackedMicroBatch(made, [1]).ids.tolist() == [alone]


def test_packed_episodes_do_not_attend_to_each_other(model):
    made = episodes()
    before = PackedMicroBatch(made, [0, 1, 2, 3]).forward(backbone_of(model))
    made.prompt_ids[1, -1] += 1
    after = PackedMicroBatch(made, [0, 1, 2, 3]).forward(backbone_of(model))
    changed = (before != after).any(1)
    assert changed[4:13].all() and not changed[:4].any() and not changed[13:].any()


def test_every_tested_architecture_can_be_packed(model):
    assert packable(model)


def test_gradient_checkpointing_keeps_the_packed_layout(model):
    """Layers that are recomputed in the backward pass must use the same packed layout."""
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train(checkpointing)
        model.zero_grad()
        PackedMicroBatch(episodes((0, 1, 0, 0)), range(4)).forward(backbone_of(model)).square().sum().backward()
        grads.append(torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None]))
    assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-11)


# --- the head --------------------------------------------------------------------------------------------------------


def by_autograd(model, hidden, tokens, temperature, allowed, entropy):
    """Return log-probs and entropies as `token_logprobs` does, from logits that autograd differentiates."""
    logits = model.lm_head(hidden).float() / temperature
    logits = logits if allowed is None else logits.masked_fill(~allowed, -1e9)
    every = logits.log_softmax(-1)
    return every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(every.exp() * every).sum(-1).detach()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_fused_head_matches_autograd(dtype, tolerance, filtered, frozen):
    """Compares log-probs, entropy, and the gradients of hidden states and head: to 1e-5 (relative) in float32, to 2e-2
    in bfloat16, which autocast rounds."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    model.lm_head.weight.requires_grad_(not frozen)
    states = torch.randn(50, 32)
    tokens = torch.randint(0, 60, (50,))
    allowed = torch.rand(50, 60) < 0.7
    allowed[torch.arange(50), tokens] = True
    found = []
    for measure in (by_autograd, token_logprobs):
        model.zero_grad()
        hidden = states.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logprobs, entropy = measure(model, hidden, tokens, 0.7, allowed if filtered else None, "value")
        (logprobs * torch.linspace(-1, 2, 50)).sum().backward()
        found.append([logprobs.detach(), entropy, hidden.grad, *([] if frozen else [model.lm_head.weight.grad])])
    for plain, ours in zip(*found, strict=True):
        assert_close(ours, plain, rtol=tolerance, atol=tolerance * float(plain.abs().max()))
    assert (model.lm_head.weight.grad is None) == frozen


def test_fused_head_keeps_the_gradient_of_a_nearly_certain_token():
    """In bfloat16 p = 0.9995 rounds to 1, so 1 - p would be 0."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[7, 0] = 11.7
    hidden = torch.zeros(1, 32)
    hidden[0, 0] = 1.0
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = token_logprobs(model, hidden, torch.tensor([7]), 1.0)
    logprobs.sum().backward()
    probability = float(logprobs.detach().exp())
    assert probability > 0.999
    assert float(hidden.grad[0, 0]) == pytest.approx(11.7 * (1 - probability), rel=2e-2)


def test_values_of_the_masked_tokens_get_their_places_and_gradients():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    flat = torch.tensor([5.0, 6.0, 7.0], requires_grad=True)
    padded = scatter_to_padded(flat, mask)
    assert padded.tolist() == [[5, 6, 0], [7, 0, 0]] and places_of(mask, 3).tolist() == [0, 1, 3]
    (gradient,) = torch.autograd.grad((padded * torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).sum(), flat)
    assert gradient.tolist() == [1, 2, 4]


def test_actor_accepts_padded_and_packed_micro_batches(model):
    padded, packed = (
        Actor(model)(form(episodes(), range(4)), 0.7)[0] for form in (PaddedMicroBatch, PackedMicroBatch)
    )
    assert_close(packed, padded, rtol=0, atol=1e-9 if padded.dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize(("packed", "expected"), [(True, [[0, 1, 2, 3]]), (False, [[0, 1], [2, 3]])])
def test_shared_prompt_counts_once_in_a_packed_micro_batch(model, packed, expected):
    """One prompt of 40 tokens with four completions of 10 tokens, and at most 100 tokens per forward pass."""
    prompts = [Prompt(tuple([5] * 40), None)] * 4
    ids = torch.full((4, 10), 7)
    completions = Completions.of(prompts, ids, eos=2, pad=0, vocabulary=64)
    passes = ForwardPasses(Actor(model), Reference(None, model), 1.0, packed=packed)
    passes.max_tokens = 100
    assert passes.split(completions, range(4)) == expected
    passes.max_rows = 1
    assert passes.split(completions, range(4)) == [[0], [1], [2], [3]]
    passes.max_tokens = 79
    passes.max_rows = 0
    passes.packed = True
    assert passes.split(completions, range(4)) == [[0, 1, 2], [3]] and passes.split(completions, []) == []

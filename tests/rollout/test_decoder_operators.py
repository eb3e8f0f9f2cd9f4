"""Counts the operators of a decoding step on a GPU, without a GPU: on fake tensors, with the branches for CUDA.

SmolLM2-135M's shape in bfloat16. A norm or an attention counts as the kernel that it is on CUDA, and views count
nothing.
"""

from __future__ import annotations

from collections import Counter

import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.data.prompts import ids_alone
from rlhf.models import llama
from rlhf.models.attention import Kernel
from rlhf.rollout.continuous_batching import ContinuousBatcher
from rlhf.rollout.stopping import StoppingCriterion
from rlhf.settings.training import SamplingSettings

LAYERS = 30
SLOTS = 64
COLUMNS = 256
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
           "num_hidden_layers": LAYERS, "vocab_size": 49_152, "tie_word_embeddings": True}  # fmt: skip
# operators of a layer. There were 21; without graphs' static weights there are as many as here, and `roll`
LAYER = {
    "attention": 1,
    "norm": 2,
    "_to_copy": 2,  # the norms' results; before, also: heads to float32, keys and values, and queries, to bfloat16
    "mm": 4,
    "mul": 1,  # by the cosines
    "addcmul": 1,  # the sines; before, also `roll`: its result is now a part of the product with q and k
    "index_put_": 1,  # keys and values
    "add": 2,  # to the hidden states
    "silu": 1,
    "mul_": 1,  # silu(gate) * up
}  # before, also `clone`: the heads in the order of the weights; now the weights have the order of the attention


class Counting(TorchDispatchMode):
    """Counts operators by name, in `found`."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if not operator.is_view and operator.namespace == "aten":
            self.found[operator.__name__.split(".")[0]] += 1
        return operator(*args, **(kwargs or {}))


def on_cuda(monkeypatch, counting):
    """Select the branches for CUDA, and count kernels that torch has on CUDA only as one operator. The result of the
    attention has the order in memory of CUDA's kernels for attention with a mask."""

    def alone(name, result, like):
        before = counting.found.copy()
        found = result(like)
        counting.found = before + Counter([name])
        return found

    def attention(_, query, *__):
        return alone("attention", lambda x: torch.empty(x.shape, dtype=x.dtype), query.transpose(1, 2)).transpose(1, 2)

    monkeypatch.setattr(FakeTensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(llama, "_normed", lambda x, gain, eps: (alone("norm", torch.empty_like, x), None))
    monkeypatch.setattr(Kernel, "as_given", attention)


def step(monkeypatch, lora=None, **limits) -> Counter:
    """Return the operators of a decoding step with sampling."""
    counting = Counting()
    sampling = SamplingSettings(max_new_tokens=64, **limits)
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        policy = LlamaForCausalLM(LlamaConfig(**SMOLLM2))
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)  # not possible for fake tensors
        policy = policy if lora is None else get_peft_model(policy, lora)
        on_cuda(monkeypatch, counting)
        batcher = ContinuousBatcher(policy, torch.device("cpu"), SLOTS, COLUMNS, 65 * 64, graph=False)
        prompts = [ids_alone([5, 6, 7])] * SLOTS
        batcher._start(prompts, torch.zeros(SLOTS, 64), sampling, StoppingCriterion([2]), SLOTS)
        batcher._decode(128)
        counting.found = Counter()
        with counting:
            batcher._decode(128)
    return counting.found


def test_operators_of_a_decoding_step(monkeypatch):
    """There were 677: five more per layer, and one more for the logits."""
    found = step(monkeypatch)
    outside = Counter(found)
    outside.subtract({name: LAYERS * count for name, count in LAYER.items()})
    assert min(outside.values()) >= 0
    assert found.total() == 525, outside


def test_adapters_add_eight_operators_per_layer(monkeypatch):
    """Two for each of the four inputs of a layer: all A in one product, all B in one."""
    plain = step(monkeypatch)
    lora = step(monkeypatch, LoraConfig(r=16, lora_alpha=32, use_rslora=True, target_modules="all-linear"))
    assert lora - plain == Counter({"mm": 4 * LAYERS, "addmm_": 4 * LAYERS}) and not plain - lora

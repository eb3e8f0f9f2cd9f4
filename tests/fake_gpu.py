"""Counts the operators of an optimizer step on a GPU, without a GPU: on fake tensors, which have shapes and no data.

The branches for GPUs are forced. The norm and attention are one stand-in operator each, forward and backward, because
a CPU has no such kernel. A stand-in counts as the kernel that it replaces.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import LlamaForCausalLM

from benchmarks.operators import counting
from rlhf.algorithms.classes import CLASSES
from rlhf.algorithms.experience import Experience
from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import make_config
from rlhf.data.prompts import Prompt
from rlhf.models import attention, budget
from rlhf.models.actor_critic import Actor, ActorCritic, with_value_head
from rlhf.models.reference import Reference
from rlhf.rollout.completions import Completions
from rlhf.trainer.optimize import PolicyOptimizer
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.progress import Progress
from tests.shapes import llama_config

ATEN = torch.ops.aten


@torch.library.custom_op("stand_in::norm", mutates_args=())
def norm(x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@norm.register_fake
def _(x, gain):
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))


@torch.library.custom_op("stand_in::norm_backward", mutates_args=())
def norm_backward(by_output: Tensor, x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@norm_backward.register_fake
def _(by_output, x, gain):
    return torch.empty_like(x), torch.empty_like(gain)


@torch.library.custom_op("stand_in::attention", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    raise NotImplementedError


@torch.library.custom_op("stand_in::attention_backward", mutates_args=())
def attend_backward(by_output: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


@attend.register_fake
def _(query, key, value):  # flash attention writes (R, Q, heads, D)
    return torch.empty_like(query.transpose(1, 2).contiguous()).transpose(1, 2)


@attend_backward.register_fake
def _(by_output, query, key, value):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return attend(query, key, value)

    @staticmethod
    def backward(ctx, by_output):
        return attend_backward(by_output, *ctx.saved_tensors)


def fused_attention(query, key, value, **_) -> Tensor:
    return Attention.apply(query, key, value)


@contextlib.contextmanager
def gpu_branches():
    """Context manager: fake tensors on the CPU take the branches for GPUs."""
    with (
        patch.object(FakeTensor, "is_cuda", True, create=True),
        patch.object(attention, "scaled_dot_product_attention", fused_attention),
        patch.object(attention.Kernel, "__call__", attention.Kernel.as_given),
        patch.object(ATEN, "_fused_rms_norm", lambda x, shape, gain, eps: norm(x, gain)),
        patch.object(
            ATEN,
            "_fused_rms_norm_backward",
            lambda by_output, x, shape, inverse, gain, mask: norm_backward(by_output, x, gain),
        ),
        patch.dict(budget.BUDGETS, cpu=budget.BUDGETS["cuda"]),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def experience_of(episodes: int, length: int, vocabulary: int) -> Experience:
    prompts = [Prompt(tuple(range(3 + r, 3 + r + length)), None) for r in range(episodes)]
    completions = Completions(
        prompt_ids=torch.zeros(episodes, length, dtype=torch.long),
        prompt_mask=torch.ones(episodes, length, dtype=torch.bool),
        completion_ids=torch.zeros(episodes, length, dtype=torch.long),
        mask=torch.ones(episodes, length, dtype=torch.bool),
        prompt_lengths=[length] * episodes,
        completion_lengths=[length] * episodes,
        groups=list(range(episodes)),
        ended=torch.ones(episodes, dtype=torch.bool),
        allowed_tokens=None,
        vocabulary=vocabulary,
    )
    zeros = torch.zeros(episodes, length)
    mask = completions.mask
    return Experience(
        prompts=prompts, completions=completions, scores=zeros[:, 0], mask=mask, loss_mask=mask, scored_mask=mask,
        logprobs=zeros, ref_logprobs=zeros, kl_coef=0.1, raw_advantages=zeros, advantages=zeros,
        values=zeros, returns=zeros, rewards=zeros,
    )  # fmt: skip


def optimizer_step(layers: int = 30, algorithm: str = "ppo", episodes: int = 4, length: int = 128) -> Counter:
    """Return the kernels of one optimizer step over one micro-batch in bfloat16, by operator. The shape is that of
    SmolLM2-135M, with this number of layers."""
    with gpu_branches():
        config = make_config(algorithm=algorithm, batch_size=episodes, bf16=True)
        shape = llama_config("smollm2", 0)
        shape.num_hidden_layers = layers
        policy = LlamaForCausalLM(shape).train()
        actor = ActorCritic(with_value_head(policy)) if ALGORITHMS[algorithm].has_critic else Actor(policy)
        host = SimpleNamespace(
            model=actor,
            actor=actor,
            optimizer=torch.optim.AdamW(actor.parameters(), fused=True),
            accelerator=SimpleNamespace(
                backward=Tensor.backward,
                clip_grad_norm_=lambda weights, norm: torch.nn.utils.clip_grad_norm_(weights, norm, foreach=True),
            ),
        )
        passes = ForwardPasses(actor, Reference(None, policy), 0.7, torch.bfloat16)
        optimizer = PolicyOptimizer(config, host, CLASSES[algorithm](config), passes, Progress())
        experience = experience_of(episodes, length, 49_152)
        # check_step reads values, which fake tensors do not have
        with passes.weights.in_use(), patch("rlhf.trainer.optimize.check_step"):
            optimizer.step(experience, range(episodes), 1)  # allocates the optimizer's state
            counter = Counter()
            with counting(counter):
                optimizer.step(experience, range(episodes), 1, entropy=False)
    kernels = {name: n for (kind, name), n in counter.items() if kind == "operator" and "empty" not in name}
    return Counter({name: n for name, n in kernels.items() if name.startswith(("aten.", "stand_in."))})


if __name__ == "__main__":
    found = optimizer_step()
    print(found.total())
    for name, n in found.most_common():
        print(f"{n:6} {name}")

"""Prints what each GPU can reach by arithmetic: bytes and FLOPs of a decoding step and of an update, divided by the
GPU's memory bandwidth and peak. Needs no GPU, no weights and no data.

python benchmarks/gpu_limits.py                     SmolLM2-135M's shape
python benchmarks/gpu_limits.py --model FOLDER      the shape of another config.json

"limit" assumes the whole bandwidth and the whole peak. "expected" assumes the shares that good kernels reach, and for
a decoding step the time that a GPU needs to start each kernel of a CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from rlhf.setup.shape import Shape
from rlhf.utils.console import Screen


class GPU(NamedTuple):
    """Figures of NVIDIA's architecture papers and data sheets: dense bfloat16 products, summed up in float32."""

    bandwidth: float  # bytes per second
    peak: float  # FLOP per second


GPUS = {
    "RTX 3090": GPU(936e9, 71e12),
    "RTX 4090": GPU(1_008e9, 165.2e12),
    "RTX 5090": GPU(1_792e9, 209.5e12),
    "H100": GPU(3_350e9, 989.4e12),  # SXM
    "H200": GPU(4_800e9, 989.4e12),
}
# shares that good kernels reach
OF_BANDWIDTH = 0.82
OF_PEAK = 0.5
PER_KERNEL = 2e-6  # seconds to start a kernel of a CUDA graph (1.5 to 2.5 us)
KERNELS = 525  # of a decoding step of SmolLM2-135M in bfloat16 (tests/rollout/test_decoder_operators.py)
# bytes of a number
BF16 = 2
FLOAT = 4
LOGIT_PASSES = 5  # float32 tensors of slots x vocabulary that sampling reads or writes
# bytes of element-wise work per token, layer and hidden feature in a forward and backward pass, without the head
ELEMENTWISE = 225_000 / 576
HEAD_PASSES = 43  # the same of the head: tensors of completion tokens x vocabulary, in bfloat16
SLOTS = (64, 256, 1_024)


def gpu_named(name: str) -> GPU | None:
    """Return the figures of a GPU by the name that its driver reports; None for an unknown one."""
    return next((gpu for known, gpu in GPUS.items() if known in name and f"{known} Laptop" not in name), None)


def decoding_bytes(shape: Shape, slots: int, columns: float, element: int = BF16) -> float:
    """Return the bytes that one decoding step reads and writes: weights once, keys and values of `columns` tokens per
    slot, and the logits."""
    weights = element * (shape.matrices + shape.vocabulary * shape.hidden)
    cache = element * slots * columns * shape.layers * 2 * shape.kv
    return weights + cache + LOGIT_PASSES * FLOAT * slots * shape.vocabulary


def decoding_flops(shape: Shape, slots: int, columns: float) -> float:
    """Return the FLOPs of one decoding step."""
    products = 2 * (shape.matrices + shape.vocabulary * shape.hidden)
    return slots * (products + 4 * shape.layers * shape.q * columns)


def forward_flops(shape: Shape, episodes: int, prompt: float, completion: float, head: bool = True) -> float:
    """Return the FLOPs of a forward pass over episodes of these tokens. The logits are those of completions. A
    backward pass takes twice as many."""
    length = prompt + completion
    attention = 2 * shape.layers * shape.q * length * length  # half of the pairs, two products, 2 FLOPs each
    logits = 2 * shape.vocabulary * shape.hidden * completion if head else 0
    return episodes * (2 * shape.matrices * length + attention + logits)


def update_flops(shape: Shape, episodes: int, prompt: float, completion: float, passes: int, reward: bool) -> float:
    """Return the FLOPs of one update: prefill and decoding, log-probs of policy and reference, `reward`: scores of a
    reward model of the same shape, and `passes` forward and backward passes."""
    once = forward_flops(shape, episodes, prompt, completion)
    scored = forward_flops(shape, episodes, prompt, completion, head=False) if reward else 0
    decoding = completion * decoding_flops(shape, episodes, prompt + completion / 2)
    return forward_flops(shape, episodes, prompt, 0) + decoding + 2 * once + scored + 3 * passes * once


def pass_bytes(shape: Shape, episodes: int, prompt: float, completion: float) -> float:
    """Return the bytes of the element-wise work of one forward and backward pass."""
    layers = ELEMENTWISE * shape.hidden * shape.layers * episodes * (prompt + completion)
    return layers + HEAD_PASSES * BF16 * episodes * completion * shape.vocabulary


def decoding_seconds(shape: Shape, gpu: GPU, slots: int, columns: float) -> tuple[float, float]:
    """Return the limit and the expected time of one decoding step."""
    moved = decoding_bytes(shape, slots, columns)
    computed = decoding_flops(shape, slots, columns)
    limit = max(moved / gpu.bandwidth, computed / gpu.peak)
    kernels = KERNELS * shape.layers / 30 * PER_KERNEL
    return limit, max(kernels, moved / gpu.bandwidth / OF_BANDWIDTH + computed / gpu.peak / OF_PEAK)


def pass_seconds(shape: Shape, gpu: GPU, episodes: int, prompt: float, completion: float) -> tuple[float, float]:
    """Return the limit and the expected time of one forward and backward pass over the episodes of an update."""
    computed = 3 * forward_flops(shape, episodes, prompt, completion) / gpu.peak
    moved = pass_bytes(shape, episodes, prompt, completion) / gpu.bandwidth
    return computed, computed / OF_PEAK + moved / OF_BANDWIDTH


# --- the table -------------------------------------------------------------------------------------------------------


def rows(shape: Shape, episodes: int, prompt: int, completion: int, passes: int) -> list[list[str]]:
    """Return a row per quantity: its name, and the limit and the expected value of each GPU."""
    found = []
    columns = prompt + completion / 2
    for slots in SLOTS:
        steps = [decoding_seconds(shape, gpu, slots, columns) for gpu in GPUS.values()]
        found.append([f"decoding, {slots:,} slots, ms per step", *(_two(1e3 * a, 1e3 * b) for a, b in steps)])
        found.append(["  1,000 tokens/s", *(_two(slots / a / 1e3, slots / b / 1e3) for a, b in steps)])
    once = [pass_seconds(shape, gpu, episodes, prompt, completion) for gpu in GPUS.values()]
    found.append([f"{passes} passes over {episodes} episodes, s", *(_two(passes * a, passes * b) for a, b in once)])
    updates = [
        [
            completion * decoding_seconds(shape, gpu, episodes, columns)[which] + (passes + 1) * both[which]
            for which in (0, 1)
        ]  # prefill, log-probs of policy and reference, and scores take about as long as one pass
        for gpu, both in zip(GPUS.values(), once, strict=True)
    ]
    found.append(["one update, s", *(_two(*both) for both in updates)])
    return found


def _two(limit: float, expected: float) -> str:
    return f"{limit:.2g} / {expected:.2g}" if max(limit, expected) < 99.5 else f"{limit:,.0f} / {expected:,.0f}"


def shape_named(model: str | None) -> Shape:
    """Return the shape in the config of a folder or a hub name; None: SmolLM2-135M's."""
    from transformers import AutoConfig

    from tests.shapes import llama_config

    return shape_of_config(AutoConfig.from_pretrained(model) if model is not None else llama_config("smollm2", 0))


def shape_of_config(values) -> Shape:
    """Return the shape of a transformers config."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return Shape.of(values, AutoModelForCausalLM.from_config(values).num_parameters())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder with a config.json, or a hub name (SmolLM2-135M's shape)")
    parser.add_argument("--episodes", type=int, default=64, help="completions per update (64)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of every prompt (128)")
    parser.add_argument("--completion-tokens", type=int, default=128, help="length of every completion (128)")
    parser.add_argument("--passes", type=int, default=4, help="passes over the completions of an update (4)")
    given = parser.parse_args(argv)
    shape = shape_named(given.model)
    work = given.episodes, given.prompt_tokens, given.completion_tokens
    print(f"limit / expected, {shape.parameters:,} parameters, {work[1]} + {work[2]} tokens, bfloat16")
    Screen().columns([["", *GPUS], *rows(shape, *work, given.passes)])


if __name__ == "__main__":
    main()

"""Prints the predicted peak memory of a recipe for GPUs of given sizes. Needs no GPU, no weights and no data.

python benchmarks/gpu_plan.py --recipe qwen3-gsm8k --sizes 12GB 24GB 32GB

Only the config of the start model is read, from the hub or with --model from a folder that may lack the weights. All
prompts have --prompt-tokens tokens and all completions --max-new-tokens, so the prediction is an upper limit. The
settings of each size are those that --fit chooses: docs/performance.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before importing torch, so that --help and errors are fast
    import torch

    from rlhf.config import make_config
    from rlhf.settings.types import MemorySize
    from rlhf.setup import memory
    from rlhf.setup.fit import CONTEXT, MARGIN, changed_flags, choose
    from rlhf.utils.console import gib

    torch.cuda.is_bf16_supported = lambda *_, **__: True  # the prediction is for a GPU that computes in bfloat16
    config = make_config(arguments.recipe, arguments.algorithm)
    estimate = estimator(config, arguments.model or config.model.actor_model, arguments.prompt_tokens)
    sizes = [MemorySize.parse(size) for size in arguments.sizes]
    memory.installed = lambda _: max(size.bytes for size in sizes)  # of the GPU, which this machine may not have
    forecast = estimate(config)
    print(f"{arguments.recipe}, {arguments.algorithm}: {estimate.policy.parameters:,} parameters")
    print(f"without --fit: predicted peak {gib(forecast.peak)} GiB ({forecast.largest.name})")
    for size in sizes:
        memory.installed = lambda _, size=size: size.bytes
        room = int(size.bytes / MARGIN) - CONTEXT["cuda"]
        chosen = choose(config, estimate, room)
        forecast, flags = estimate(chosen), changed_flags(config, chosen) or "nothing is changed"
        fits = "" if forecast.peak <= room else "does not fit: "
        print(f"{size}: {fits}predicted peak {gib(forecast.peak)} GiB ({forecast.largest.name}), with {flags}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predict the peak memory of a recipe on GPUs of given sizes.")
    parser.add_argument("--recipe", default="qwen3-gsm8k")
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--model", help="folder with a config.json, or a hub name (the recipe's start model)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="length of every prompt (256)")
    parser.add_argument("--sizes", nargs="+", default=["12GB", "24GB", "32GB"], help="memory of the GPUs")
    return parser.parse_args(argv)


def estimator(config, model: str, length: int):
    """Return the estimator of a run on a GPU from the config of its start model, without a reward model."""
    import torch

    from benchmarks.gpu_limits import shape_named
    from rlhf.data.prompts import ids_alone
    from rlhf.setup.memory import Estimator

    prompts = [ids_alone([0] * length)] * config.batch.batch_size
    return Estimator(shape_named(model), None, torch.device("cuda"), prompts, [length] * config.data.eval_prompts, 1)


if __name__ == "__main__":
    main()

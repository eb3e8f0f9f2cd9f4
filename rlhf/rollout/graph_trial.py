"""Samples with a CUDA graph in a separate process, because a graph that hangs can only be ended with its process.

As a program (`python -m rlhf.rollout.graph_trial`) it samples from a small random model with the engines `graph` and
`slots`, and exits with status 1 and a line of text if their completions differ.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TRIAL = (sys.executable, "-m", "rlhf.rollout.graph_trial")
TIME_LIMIT_S = 120.0  # the imports take most of the time, on a slow disk a minute
ROUNDS, ROWS, LENGTH = 4, 64, 96  # calls of each engine, completions per call, tokens per completion
ALMOST_ALL = 0.9  # share of completions that must be equal


def try_graphs(trial: Sequence[str] = TRIAL, limit_s: float = TIME_LIMIT_S) -> str | None:
    """Run `trial` in a separate process. Returns None if it succeeds, else the problem in words."""
    process = subprocess.Popen(
        trial,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # without waiting: a process that waits for its GPU may not end
        return f"sampling with CUDA graphs did not end within {limit_s:g} s, so it probably hangs"
    if process.returncode == 0:
        return None
    lines = printed.strip().splitlines() or [f"exit status {process.returncode}"]
    return f"sampling with CUDA graphs failed ({lines[-1]:.200})"


def main(device: str = "cuda", engines: tuple[str, str] = ("graph", "slots")) -> str | None:
    """Sample with two engines. Returns None, or the problem in words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf.data.prompts import ids_alone
    from rlhf.rollout.engine import sample_completions
    from rlhf.settings.training import SamplingSettings

    where = torch.device(device)
    shape = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)  # fmt: skip
    torch.manual_seed(0)
    policy = LlamaForCausalLM(shape).eval().to(where)
    prompts, equal = [ids_alone(range(3, 7 + row % 5)) for row in range(ROWS)], 0
    for _ in range(ROUNDS):
        noise, sampling = torch.rand(ROWS, LENGTH), SamplingSettings(max_new_tokens=LENGTH)
        found, expected = (
            sample_completions(policy, prompts, noise, sampling, eos=1, pad=0, device=where, engine=engine).rows()
            for engine in engines
        )
        equal += sum(a == b for a, b in zip(found, expected, strict=True))
    if equal < ALMOST_ALL * ROUNDS * ROWS:  # rounding can change a token whose probabilities are at its random number
        return f"only {equal} of {ROUNDS * ROWS} completions are those of sampling without CUDA graphs"
    return None


if __name__ == "__main__":
    sys.exit(main())

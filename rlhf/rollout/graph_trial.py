"""Samples with a CUDA graph in a separate process, because a graph that hangs can only be ended with its process.

As a program (`python -m rlhf.rollout.graph_trial llama bfloat16`) it samples from a small random model with the
engines `graph` and `slots`, and exits with status 1 and a line of text if their completions differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.checkpoints.gguf import cache_folder
from rlhf.checkpoints.run_record import environment
from rlhf.utils.files import write_json
from rlhf.utils.libraries import version_of
from rlhf.utils.system import gpu_driver, waiting_lock

TRIAL = (sys.executable, "-m", "rlhf.rollout.graph_trial")
TIME_LIMIT_S = 120.0  # the imports take most of the time, on a slow disk a minute
# calls of each engine, completions per call, tokens per completion
ROUNDS = 4
ROWS = 64
LENGTH = 96
# share of completions that must be equal: rounding can change a token whose probabilities are at its random number
ALMOST_ALL = {"float32": 0.9, "bfloat16": 0.5}


def graph_problem(model_type: str, dtype: str, again: bool = False) -> str | None:
    """Return the problem of sampling with CUDA graphs on this GPU, or None, from a trial in a separate process.

    A trial that succeeded is remembered in the user's cache folder, for this type of model, precision, GPU, driver and
    code. One that failed is repeated. `again`: repeat it in any case.
    """
    import torch

    now = environment()
    code = version_of("rlhf-workstation"), now["commit"], now["versions"]
    key = [model_type, dtype, torch.cuda.get_device_name(), gpu_driver(), *code]
    file = cache_folder() / "cuda_graphs.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with waiting_lock(file.with_name(file.name + ".lock")):  # several processes of a run start at the same time
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        problem = None if key in known and not again else try_graphs([*TRIAL, model_type, dtype])
        write_json(file, [*(one for one in known if one != key), *([] if problem else [key])])
    return problem


def try_graphs(trial: Sequence[str] = TRIAL, limit_s: float = TIME_LIMIT_S) -> str | None:
    """Run `trial` in a separate process. Returns None if it succeeds, else the problem in words."""
    process = subprocess.Popen(
        trial,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONSAFEPATH": ""},  # with it, Python would not search this folder
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


def main(
    model_type: str = "llama",
    dtype: str = "float32",
    device: str = "cuda",
    engines: tuple[str, str] = ("graph", "slots"),
) -> str | None:
    """Sample with two engines. Returns None, or the problem in words."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhf.data.prompts import ids_alone
    from rlhf.rollout.sampler import Sampler
    from rlhf.settings.training import SamplingSettings

    where = torch.device(device)
    shape = AutoConfig.for_model(model_type, vocab_size=512, hidden_size=128, intermediate_size=256,
                                 num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                                 max_position_embeddings=256)  # fmt: skip
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(shape, trust_remote_code=False).eval().to(where)
    prompts = [ids_alone(range(3, 7 + row % 5)) for row in range(ROWS)]
    sampling = SamplingSettings(max_new_tokens=LENGTH)
    precision = torch.bfloat16 if dtype == "bfloat16" else None
    samplers = [Sampler(policy, sampling, 1, 0, where, precision, engine) for engine in engines]
    equal = 0
    for update in range(ROUNDS):
        found, expected = (one.sample(prompts, 0, update, "graph trial") for one in samplers)
        equal += sum(a == b for a, b in zip(found.rows(), expected.rows(), strict=True))
        with torch.no_grad():
            for weight in policy.parameters():  # a graph must use the new weights
                weight.mul_(1.05)
    if equal < ALMOST_ALL[dtype] * ROUNDS * ROWS:
        return f"only {equal} of {ROUNDS * ROWS} completions are those of sampling without CUDA graphs"
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Runs the training scripts on the GPU, one after another in one process, so that libraries are imported once.

python -m tests.gpu_runs FOLDER START_MODEL REWARD_MODEL PAIRS   writes FOLDER/results/NAME.json when a run ends.

All other tests run on the CPU. `tests/scripts/test_gpu.py` starts this module in a separate process.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import traceback
from pathlib import Path

GROUPS = {"ppo": ["--batch-size", "4"], "grpo": ["--batch-size", "2", "--K", "2"]}
KINDS = {"full": [], "lora": ["--use-lora"], "4-bit": ["--use-lora", "--load-in-4bit"],
         "8-bit-adam": ["--optim", "adamw_8bit"],
         "knobs": ["--epsilon-high", "0.3", "--delta", "3", "--mask-truncated-completions", "--warmup-steps", "1",
                   "--weight-decay", "0.1"]}  # fmt: skip
ONLY = {"ppo_knobs": ["--critic", "reward-model", "--critic-warmup", "1"], "grpo_knobs": ["--dynamic-sampling", "2"]}
RUNS = [f"{algorithm}_{kind}" for kind in KINDS for algorithm in GROUPS]
LOOKS = {"evaluate": "evaluate_generations", "compare": "compare_runs"}


def runs(folder: Path, start: str, reward: str, pairs: str) -> list[tuple[str, str, list[str]]]:
    """Return (name, module, flags) of every run. The deterministic runs come last: they change the whole process."""
    flags = ["--actor-model", start, "--rm-model", reward, "--prompts", pairs, "--allow-weak-reward-model",
             "--max-new-tokens", "8", "--prompt-length", "100", "--eval-prompts", "6"]  # fmt: skip
    found = []
    for name in RUNS:
        algorithm, kind = name.split("_")
        more = [
            *GROUPS[algorithm],
            *KINDS[kind],
            *ONLY.get(name, []),
            "--num-iterations",
            "2",
            "--output",
            str(folder / name),
        ]
        found.append((name, f"train_{algorithm}", [*flags, *more]))
    for name in RUNS:
        for look, module in LOOKS.items():
            model = [*(["--model-path"] if look == "evaluate" else []), str(folder / name)]
            found.append((f"{look}_{name}", module, [*model, "--num-prompts", "3", "--output", str(folder / look)]))
    for algorithm in GROUPS:
        longer = ["--resume", "--resume-anyway", "--num-iterations", "3"]
        run = str(folder / f"{algorithm}_8-bit-adam")
        found.append((f"{algorithm}_resumed", f"train_{algorithm}", [*longer, "--output", run]))
    for algorithm, group in GROUPS.items():
        for number in (1, 2):
            name = f"{algorithm}_same_{number}"
            same = [*flags, *group, "--num-iterations", "4", "--learning-rate", "1e-3", "--deterministic"]
            found.append((name, f"train_{algorithm}", [*same, "--output", str(folder / name)]))
    return found


def finish(module: str, flags: list[str]) -> tuple[int, str]:
    """Return the exit status and everything printed."""
    from rlhf.utils.errors import run_command

    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        try:
            run_command(lambda: importlib.import_module(module).main(flags))
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        except Exception:  # the caller's test prints it; the next run still runs
            status = 1
            traceback.print_exc()
    return status, printed.getvalue()


def main(folder: str, *inputs: str) -> None:
    from rlhf.models.determinism import CUBLAS, REPRODUCIBLE_CUBLAS
    from rlhf.utils.files import write_json

    os.environ[CUBLAS] = REPRODUCIBLE_CUBLAS[0]  # torch reads it once, at the process's first matrix product
    for name, module, flags in runs(Path(folder), *inputs):
        status, output = finish(module, flags)
        write_json(Path(folder, "results", f"{name}.json"), {"status": status, "output": output})
        print(json.dumps({"name": name, "status": status}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

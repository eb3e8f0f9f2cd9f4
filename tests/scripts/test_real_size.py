"""A slow test: a model with SmolLM2-135M's shape and random weights, in reward model training, PPO and GRPO.

PPO and GRPO run with all weights and with LoRA.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.test_scripts import copy_project, run

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = copy_project(tmp_path_factory.mktemp("real"))
    assert run(["-m", "tests.shapes", "smollm2", "start"], folder).returncode == 0
    return folder


def test_reward_model_weak_model_error_and_two_updates(project, pairs_file):
    trained = run(
        ["-m", "reward_model.train", "--pairs", str(pairs_file), "--base-model", "./start", "--actor-model", "./start",
         "--rm-output", "./rm", "--rm-batch-size", "4", "--max-new-tokens", "8", "--calibration-prompts", "8"],
        project, OMP_NUM_THREADS="2",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    flags = ["--actor-model", "./start", "--rm-model", "./rm", "--prompts", str(pairs_file),
             "--num-iterations", "2", "--max-new-tokens", "16", "--eval-prompts", "4"]  # fmt: skip
    refused = run(["train_ppo.py", *flags, "--output", "refused"], project)
    assert refused.returncode == 2 and "weak reward model" in refused.stderr, "its pairs are random"
    for script, algorithm in (("train_ppo.py", []), ("train_grpo.py", ["--K", "2", "--batch-size", "2"])):
        for file, more in (("model.safetensors", []), ("adapter_model.safetensors", ["--use-lora"])):
            output = f"{script[:-3]}{''.join(more)}"
            words = [script, *flags, *algorithm, *more, "--output", output, "--allow-weak-reward-model"]
            done = run(words, project, OMP_NUM_THREADS="2")
            assert done.returncode == 0, done.stderr
            assert "update 2/2" in done.stdout
            assert (project / output / file).is_file() and (project / output / "best" / file).is_file()

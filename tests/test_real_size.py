"""A slow proof: SmolLM2-135M's exact shape, random weights, through reward model and PPO, with and without LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_scripts import copy_project, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = copy_project(tmp_path_factory.mktemp("real"))
    assert run(["-m", "tests.shapes", "smollm2", "start"], folder).returncode == 0
    return folder


def test_reward_model_refusal_and_two_updates(project, pairs_file):
    trained = run(
        ["-m", "reward_model.train", "--pairs", str(pairs_file), "--base-model", "./start", "--actor-model", "./start",
         "--rm-output", "./rm", "--rm-batch-size", "4", "--reply-length", "8", "--calibration-prompts", "8"],
        project, OMP_NUM_THREADS="2",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    flags = ["train_ppo.py", "--actor-model", "./start", "--rm-model", "./rm", "--prompts", str(pairs_file),
             "--num-iterations", "2", "--reply-length", "16", "--eval-prompts", "4"]  # fmt: skip
    refused = run([*flags, "--output", "full"], project)
    assert refused.returncode == 2 and "a weak reward model" in refused.stderr, "its pairs are drawn at random"
    for output, more in (("full", []), ("lora", ["--use-lora"])):
        done = run([*flags, "--output", output, "--allow-weak-reward-model", *more], project, OMP_NUM_THREADS="2")
        assert done.returncode == 0, done.stderr
        assert "update 2/2" in done.stdout
    assert (project / "full" / "model.safetensors").is_file()
    assert (project / "lora" / "adapter_model.safetensors").is_file()

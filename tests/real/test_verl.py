"""Reads exports of runs with verl 0.9.1: its configuration, its dataset, and the reward functions.

VERL_PYTHON is the Python of an environment that has torch, verl and, for its configuration and dataset, hydra-core,
omegaconf, tensordict, datasets, transformers, ray, torchdata, codetiming, pillow, accelerate and peft, but no vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from rlhf.algorithms.classes import CLASSES
from rlhf.data.prompts import load_prompts
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.actor_critic import PolicyOutputs
from rlhf.rewards.find import find_rewards
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.completions import Rollout
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

    def make(*flags: object, algorithm: str, **more: object):
        config = configured(*flags, algorithm=algorithm)
        options = options_in(export(record_run(config)) / "run.sh", tmp_path)
        given = {"options": [f"{name}={value}" for name, value in options.items()], "completions": COMPLETIONS, **more}
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


def test_verl_reads_the_prompts_of_smollm2(exported, smollm2):
    config, found = exported("--actor-model", smollm2, algorithm="ppo")
    sets = load_prompts(config.data, load_tokenizer(str(smollm2)), say=lambda _: None)
    assert found["train"] == [list(prompt.ids) for prompt in sets.train]


# two prompts with 2 completions each, of ReMax with a greedy one each
LENGTHS = [5, 3, 4, 2]
KINDS = {
    "ppo": "--gamma 0.95 --lam 0.9 --value-coef 0 --critic separate --kl-coef 0.3 --epsilon-high 0.1",
    "grpo": "--kl-placement loss --kl-coef 0.3 --scale-rewards group",
    "grpo of whole completions": "--loss-type gspo --clip-range 0.05",
    "grpo with weights": "--loss-type cispo --epsilon-high 0.1",
    "grpo with a constant length": "--loss-type dr_grpo --kl-placement loss --delta 1.3",
    "grpo by completion": "--loss-type grpo --kl-placement none",
    "rloo": "--kl-coef 0.3",
    "reinforce_pp": "--gamma 0.9 --kl-coef 0.3",
    "remax": "--kl-coef 0.3",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_options_give_the_gradients_of_the_run(exported, kind):
    """From scores and log-probabilities on. The policies differ, except where the ratio is another one (RLOO: of whole
    completions here) or absent (the KL loss)."""
    algorithm = kind.partition(" ")[0]
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5).expand(4, 5) < torch.tensor(LENGTHS).unsqueeze(1)
    old, reference, values, noise = (torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(4))
    scores = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    baselines = torch.tensor([0.25, 1.5], dtype=torch.float64).repeat_interleave(2)
    new = old if algorithm == "rloo" or "--kl-placement loss" in KINDS[kind] else old + 0.1 * noise
    batch = {"old": old, "new": new, "reference": reference, "values": values, "mask": mask.double(),
             "scores": scores, "baselines": baselines, "groups": torch.tensor([0, 0, 1, 1])}  # fmt: skip
    flags = ("--batch-size", 2, "--K", {"remax": 3}.get(algorithm, 2), "--rm-model", "none", *KINDS[kind].split())
    given = {name: tensor.tolist() for name, tensor in batch.items()}
    config, found = exported(*flags, "--reward-func", "word_penalty", algorithm=algorithm, batch=given)
    if algorithm == "remax":  # here the greedy completion follows those of its prompt, without tokens in a mask
        rows = torch.tensor([0, 1, 4, 2, 3, 4])
        old, new, reference, values, mask = (
            torch.cat([t, torch.zeros_like(t[:1])])[rows] for t in (old, new, reference, values, mask)
        )
        scores = torch.tensor([1.0, -2.0, 0.25, 0.5, 3.0, 1.5], dtype=torch.float64)
    completions = SimpleNamespace(action_mask=mask, ended=torch.ones(len(mask), dtype=bool), sampled_logprobs=None)
    rollout = Rollout(completions, [], old, reference, values)
    ours = CLASSES[algorithm](config)
    experience = ours.advantages(rollout, scores, config.kl.kl_coef)
    logprobs = new.clone().requires_grad_()
    outputs = PolicyOutputs(logprobs, torch.zeros_like(logprobs), values)
    loss, _ = ours.loss(experience, torch.arange(len(mask)), outputs, mask.sum())
    loss.backward()
    expected = torch.tensor(found["gradient"], dtype=torch.float64)
    assert expected.abs().sum() > 0.01
    # verl adds 1e-6 to a standard deviation, and 1e-4 is added here
    assert_close(logprobs.grad[mask.any(1)], expected, rtol=1e-3 if "group" in KINDS[kind] else 1e-6, atol=1e-9)

"""Compares examples/tiny_ppo.py with the library: the same completions, scores and minibatches give the same weights.

The library trains with its own loop, and a callback records the completions and scores. The example's functions then
take the same updates.
"""

from __future__ import annotations

import ast
import copy
import random

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from examples import tiny_ppo
from rlhf.api import make_trainer
from rlhf.config import make_config
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.rng import rng_for
from tests.documents import ROOT

# the KL is 0 in the first update
UPDATES = 2
COMPLETIONS = 16
# the example's constant -> the library's setting, and another value than that of the recipe `demo`
CHANGED = {
    "EPOCHS": ("ppo_epochs", 3), "MINIBATCHES": ("minibatches", 2), "TEMPERATURE": ("temperature", 1.3),
    "LEARNING_RATE": ("learning_rate", 1e-3), "MAX_GRAD_NORM": ("max_grad_norm", 0.1), "CLIP": ("clip_range", 0.02),
    "BETA": ("kl_coef", 0.3),
}  # fmt: skip
CHANGED_BY_ALGORITHM = {
    "ppo": {
        "GAMMA": ("gamma", 0.97), "LAMBDA": ("lam", 0.9), "VALUE_COEF": ("value_coef", 0.5),
        "VALUE_CLIP": ("value_clip_range", 0.002),
    },
    "grpo": {"GROUP": ("K", {"grpo": 2})},
}  # fmt: skip


class Recorder:
    """Records the completions and the scores of each update."""

    def __init__(self):
        self.updates: list[tuple[tiny_ppo.Rollout, Tensor]] = []

    def on_batch(self, update, batch, scores):
        found = batch.completions
        rollout = tiny_ppo.Rollout(found.prompt_ids, found.prompt_mask.long(), found.completion_ids, found.mask)
        self.updates.append((rollout, scores.shaped))


def rule(completions: list[str], noun: list[str], kind: list[str], **_) -> list[float]:
    return [tiny_ppo.score(*row) for row in zip(completions, noun, kind, strict=True)]


def trained_by_the_library(algorithm: str, dtype: torch.dtype, **changed) -> tuple[OnPolicyLoop, Recorder]:
    """Return the trainer after UPDATES updates with the settings of the example's docstring, but fewer completions,
    and what it sampled."""
    prompts = tiny_ppo.COMPLETIONS // tiny_ppo.GROUP[algorithm]
    config = make_config(
        "demo", algorithm=algorithm, actor_model=str(tiny_ppo.START_MODEL), kl_schedule="fixed",
        lr_schedule="constant", num_iterations=UPDATES, eval_prompts=2, batch_size=prompts, **changed,
    )  # fmt: skip
    rng = random.Random(7)
    rows = []
    for number in range(80):
        question, noun, kind = tiny_ppo.ask(rng)
        prompt = question if number % 2 else f"{question} Write one sentence."  # of different lengths: padding
        rows.append({"prompt": prompt, "noun": noun, "kind": kind})
    recorder = Recorder()
    trainer = make_trainer(config, rows, rewards=[rule], callbacks=[recorder], progress=False)
    trainer.host.model.to(dtype)
    trainer.reference.copy.to(dtype)
    trainer.train()
    return trainer, recorder


def trained_by_the_example(algorithm: str, dtype: torch.dtype, recorder: Recorder) -> tuple[tiny_ppo.Policy, float]:
    """Return the policy after the recorded updates, and the KL of the last one."""
    policy = tiny_ppo.Policy(tiny_ppo.START_MODEL).to(dtype).eval()
    kl = 0.0
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = tiny_ppo.make_optimizer(policy)
    for number, (rollout, scores) in enumerate(recorder.updates, 1):
        drawn = [rng_for(42, number, "minibatches", epoch) for epoch in range(tiny_ppo.EPOCHS)]
        orders = [torch.from_numpy(rng.permutation(tiny_ppo.COMPLETIONS)) for rng in drawn]
        kl = tiny_ppo.update(algorithm, policy, reference, optimizer, rollout, scores, orders)
    return policy, kl


def flat(*modules: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for module in modules for weight in module.parameters()])


def differences(algorithm: str, dtype: torch.dtype, **changed) -> Tensor:
    """Return the absolute difference of each weight between the library and the example after UPDATES updates."""
    trainer, recorder = trained_by_the_library(algorithm, dtype, **changed)
    policy, kl = trained_by_the_example(algorithm, dtype, recorder)
    (rollout, scores), start = recorder.updates[0], tiny_ppo.Policy(tiny_ppo.START_MODEL)
    assert len(recorder.updates) == UPDATES and len(rollout.mask.sum(1).unique()) > 1 and len(scores.unique()) > 1
    assert abs(kl) > 1e-3 and float((flat(policy.model) - flat(start.model)).abs().max()) > 1e-3
    if algorithm == "grpo":
        return (flat(trainer.actor.policy) - flat(policy.model)).abs()
    return (flat(trainer.actor.policy, trainer.actor.value_head) - flat(policy.model, policy.value_head)).abs()


@pytest.fixture
def norm_in_float64(monkeypatch):
    """Llama's norm converts its input to float32. Without this, the rounding errors would be those of float32."""

    def forward(self, states):
        return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.fixture
def few_completions(monkeypatch):
    monkeypatch.setattr(tiny_ppo, "COMPLETIONS", COMPLETIONS)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_an_update_has_as_many_completions_as_in_the_recipe(algorithm):
    config = make_config("demo", algorithm=algorithm)
    assert (config.episodes_per_update, config.group_size) == (tiny_ppo.COMPLETIONS, tiny_ppo.GROUP[algorithm])


@pytest.mark.usefixtures("few_completions")
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_weights_equal_the_librarys(algorithm, norm_in_float64):
    assert float(differences(algorithm, torch.float64).max()) < 1e-7


@pytest.mark.ci
@pytest.mark.usefixtures("few_completions")
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_weights_equal_the_librarys_with_other_values_of_the_constants(algorithm, norm_in_float64, monkeypatch):
    changed = CHANGED | CHANGED_BY_ALGORITHM[algorithm]
    for constant, (_, value) in changed.items():
        monkeypatch.setattr(tiny_ppo, constant, value)
    settings = dict(changed.values()) | ({"K": 2} if algorithm == "grpo" else {})
    assert float(differences(algorithm, torch.float64, **settings).max()) < 1e-7


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_in_float32_few_weights_differ_by_more_than_1e_6(algorithm):
    """AdamW divides by the size of the gradient, so a gradient of about eps amplifies its rounding error."""
    found = differences(algorithm, torch.float32)
    assert float((found > 1e-6).double().mean()) < 1e-4 and float(found.max()) < 3e-4


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_score_rises(algorithm, capsys):
    scores = tiny_ppo.main(["--algorithm", algorithm, "--updates", "12"])
    assert capsys.readouterr().out.count("| KL ") == 12
    assert sum(scores[-3:]) / 3 > sum(scores[:2]) / 2 + 0.15


def test_sampled_completions_end_with_eos():
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_ppo.START_MODEL)
    questions = [tiny_ppo.ask(random.Random(seed))[0] for seed in range(16)]
    rollout = tiny_ppo.sample(tiny_ppo.Policy(tiny_ppo.START_MODEL).eval(), tokenizer, questions)
    rows = [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.mask, strict=True)]
    assert len({len(row) for row in rows}) > 1
    assert all(row.index(tokenizer.eos_token_id) == len(row) - 1 for row in rows if len(row) < tiny_ppo.LENGTH)
    assert set(rollout.completion_ids[~rollout.mask].tolist()) == {tokenizer.pad_token_id}


def test_the_command_prints_the_score_of_each_update(monkeypatch, capsys):
    monkeypatch.setattr(tiny_ppo, "COMPLETIONS", 8)
    scores = tiny_ppo.main(["--algorithm", "grpo", "--updates", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [f"score {score:.2f}" in line for score, line in zip(scores, lines, strict=True)] == [True, True]


def test_the_file_is_short_and_independent_of_the_library():
    text = (ROOT / "examples" / "tiny_ppo.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    nodes = list(ast.walk(ast.parse(text)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported} & {"rlhf", "trl"}

"""Tests that one row in the table of algorithms is enough to add an algorithm, which only this file defines."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import compare_runs
import evaluate_generations
import plot_training_progress
from rlhf.algorithms import objectives
from rlhf.algorithms.classes import CLASSES
from rlhf.algorithms.experience import Experience
from rlhf.algorithms.policy_gradient import PolicyGradient, policy_stats
from rlhf.algorithms.table import ALGORITHMS, Algorithm
from rlhf.api import make_trainer
from rlhf.commands.train import train_command
from rlhf.config import make_config, parse_cli
from rlhf.models.actor_critic import PolicyOutputs
from rlhf.rollout.completions import Rollout
from rlhf.settings.training import Config
from rlhf.utils.signals import TrainingInterrupted
from tests.test_structure import ROOT


class Toy(PolicyGradient):
    """REINFORCE (Williams 1992) with the batch's mean score as the baseline, without clipping or groups."""

    stop_in_update: ClassVar[int | None] = None  # raise SIGINT in this update

    def __init__(self, config: Config):
        super().__init__(config)
        self.updates = 0

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        self.updates += 1
        if self.updates == self.stop_in_update:
            signal.raise_signal(signal.SIGINT)
        kl, loss_mask = self.kl_and_loss_mask(rollout)
        rewards = objectives.completion_rewards(kl, scores, loss_mask, self.beta_in_reward(kl_coef))
        groups = rewards.view(-1, self.config.group_size) if self.config.group_size > 1 else rewards.view(1, -1)
        baselines = groups.mean(1, keepdim=True).expand_as(groups).flatten()
        advantages = torch.where(rollout.mask, (rewards - baselines).unsqueeze(1), 0.0)
        critic = {"returns": rollout.values, "rewards": rollout.values} if rollout.values is not None else {}
        return Experience.of(
            rollout, scores, kl_coef=kl_coef, loss_mask=loss_mask, raw_advantages=advantages, **critic
        )

    def loss(
        self, experience: Experience, rows: Tensor, outputs: PolicyOutputs, total_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask = experience.mask[rows]
        loss = -objectives.masked_mean(experience.advantages[rows] * outputs.logprobs, mask, total_tokens)
        if outputs.values is not None:
            loss = loss + objectives.masked_mean(outputs.values.square(), mask, total_tokens)
        nothing_clipped = torch.zeros_like(loss)
        losses = {"loss": loss, "policy_loss": loss, "clipfrac": nothing_clipped}
        return loss, policy_stats(experience, rows, outputs, total_tokens, **losses)


@pytest.fixture
def toy(monkeypatch):
    row = Algorithm(
        name="toy",
        label="TOY",
        title="Toy REINFORCE",
    )
    monkeypatch.setitem(ALGORITHMS, "toy", row)
    monkeypatch.setitem(CLASSES, "toy", Toy)
    return row


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model.safetensors")


@pytest.mark.ci
def test_toy_algorithm_trains_resumes_and_is_evaluated_plotted_and_compared(
    toy, run_flags, runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    flags = ("--num-iterations", 4, "--eval-every", 2, "--save-every", 1, "--seed", 1, "--record-tokens")
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    train_command("toy", run_flags(*flags, "--output", whole))
    assert f"python {ROOT}/compare_runs.py" in capsys.readouterr().out

    monkeypatch.setattr(Toy, "stop_in_update", 2)
    with pytest.raises(TrainingInterrupted):
        train_command("toy", run_flags(*flags, "--output", stopped))
    monkeypatch.setattr(Toy, "stop_in_update", None)
    train_command("toy", ["--resume", "--output", str(stopped)])
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(stopped)[name]), name
    assert not torch.equal(weight, load_file(runs["ppo", 1] / "model.safetensors")[name])

    record = json.loads((whole / "run.json").read_text())
    assert (record["algorithm"], record["status"], record["spent"]["episodes"]) == ("toy", "finished", 16)
    model_card = (whole / "README.md").read_text(encoding="utf-8")
    assert "TOY (Toy REINFORCE)" in model_card and "| `gamma` |" not in model_card

    evaluate_generations.main(["--model-path", str(whole), "--num-prompts", "4"])
    (model,) = json.loads(Path("evaluation_output/evaluation.json").read_text())["models"]
    assert whole.name in model["label"]
    evaluate_generations.main(["--tokens", str(whole)])
    compared = [str(folder) for folder in (runs["ppo", 1], runs["grpo", 1], whole)]
    plot_training_progress.main(compared)
    with Path("training_progress.csv").open(encoding="utf-8") as table:
        assert {row["algorithm"] for row in csv.DictReader(table)} == {"ppo", "grpo", "toy"}
    compare_runs.main([*compared, "--limit-minutes", "0", "--num-prompts", "4"])
    report = json.loads(Path("comparison_output/comparison.json").read_text())
    pairs = {contrast["name"] for contrast in report["contrasts"]}
    assert pairs >= {"PPO - GRPO", "PPO - TOY", "GRPO - TOY", "TOY - start model"}
    page = Path("comparison_output/comparison.html").read_text(encoding="utf-8")
    assert "TOY" in page


@pytest.mark.parametrize(
    ("changed", "flags", "episodes"),
    [({"group_size": 3}, ("--K", 2), 16), ({"has_critic": True}, ("--gamma", 0.9, "--critic", "separate"), 8)],
    ids=["with groups", "with a critic"],
)
def test_toy_algorithm_works_with_groups_or_with_a_critic(
    toy, run_flags, tmp_path, monkeypatch, changed, flags, episodes
):
    """Flags, trainer, plan, token records and resuming follow the fields of the row."""
    row = replace(toy, **changed)
    monkeypatch.setitem(ALGORITHMS, "toy", row)
    monkeypatch.setitem(CLASSES, "toy", Toy)
    assert parse_cli([], "toy").group_size == row.group_size
    train_command("toy", run_flags("--num-iterations", 2, "--save-every", 1, "--record-tokens", *flags))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["spent"]["episodes"]) == ("finished", episodes)
    assert (tmp_path / "run" / "value_head.safetensors").exists() == row.has_critic
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    train_command("toy", ["--resume", "--num-iterations", "3", "--resume-anyway", "--output", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["spent"]["updates"] == 3


def test_toy_algorithm_trains_from_python(toy, start_model, tmp_path):
    config = make_config(
        algorithm="toy", actor_model=str(start_model), rm_model=None, reward_func=["length_penalty"], batch_size=4,
        num_iterations=2, max_new_tokens=6, ppo_epochs=1, output=str(tmp_path),
    )  # fmt: skip
    trainer = make_trainer(config, [f"What is number {i}?" for i in range(8)])
    assert trainer.train()["optimizer_steps"] == 2


def test_script_rejects_flags_of_other_algorithms(toy, run_flags, user_error):

    with user_error("--dynamic-sampling", "train_grpo.py", "train_rloo.py"):
        train_command("toy", run_flags("--dynamic-sampling", 4))
    with user_error("--gamma", "train_ppo.py"):
        train_command("toy", run_flags("--gamma", 0.9))

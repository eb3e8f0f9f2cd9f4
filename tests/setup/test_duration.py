"""Tests of the time in the plan: hand-worked seconds, and when a plan has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf.data.prompts import ids_alone
from rlhf.setup import plan
from rlhf.setup.duration import predicted_seconds
from rlhf.setup.load_inputs import load_inputs
from rlhf.setup.memory import Estimator
from rlhf.setup.plan import show_plan
from rlhf.setup.precision import product_seconds
from rlhf.setup.shape import Shape
from rlhf.utils.console import Screen

CPU = torch.device("cpu")
POLICY = Shape(1, 8, 16, 8, 8, 1, 10, True, parameters=1_000)
PROMPTS = [ids_alone([5] * 4), ids_alone([5] * 6)]
FLAGS = ("--batch-size", 4, "--ppo-epochs", 2, "--max-new-tokens", 3, "--eval-samples", 2)


@pytest.mark.parametrize(
    ("flags", "algorithm", "reward_model", "prompts", "update", "evaluation"),
    [
        # 4 completions x (5 + 3) tokens = 32; sampling, policy and reference 3,000, two optimizer passes 6,000
        ((), "ppo", None, 2, 32 * 9_000, 36 * 3_000),  # 2 samples x (5 + 3 + 7 + 3) tokens = 36
        ((), "ppo", 100, 2, 32 * 9_100, 36 * 3_100),
        (("--critic", "separate"), "ppo", 100, 2, 32 * (4_100 + 12_000), 36 * 3_100),  # without values
        (("--K", 2), "grpo", 100, 2, 64 * 9_100, 36 * 3_100),
        ((), "ppo", 100, 128, 32 * 9_100, 64 * 36 * 2_100),  # the KL of 64 of 128 prompts
    ],
)
def test_the_products_are_those_of_paper(configured, flags, algorithm, reward_model, prompts, update, evaluation):
    scorer = None if reward_model is None else replace(POLICY, parameters=reward_model)
    given = Estimator(POLICY, scorer, CPU, PROMPTS, [5, 7] * (prompts // 2), 10)
    found = predicted_seconds(configured(*FLAGS, *flags, algorithm=algorithm), given, 0.001)
    assert found == {"updates": [pytest.approx(update / 1_000)], "evaluations": [pytest.approx(evaluation / 1_000)]}


def test_a_teacher_takes_a_pass_of_each_completion(configured):
    """Beside the 9,000 and 3,000 of above. The KL of all of 128 prompts is measured."""
    given = Estimator(POLICY, None, CPU, PROMPTS, [5, 7] * 64, 10, teacher=replace(POLICY, parameters=5_000))
    found = predicted_seconds(configured(*FLAGS), given, 0.001)
    assert found == {"updates": [pytest.approx(32 * 14)], "evaluations": [pytest.approx(64 * 36 * 8)]}


def test_a_product_is_a_sixth_of_a_pass_of_two_matrices(monkeypatch):
    """Two products forward and four backward: 6 x 128 x 8 x 16 tokens x weights."""
    asked = []

    class Timed:
        mean = 6 * 128 * 8 * 16 * 0.25

    monkeypatch.setattr("rlhf.setup.precision._timed", lambda *sizes: asked.append(sizes) or Timed)
    assert product_seconds(replace(POLICY, layers=77), torch.bfloat16) == 0.25
    ((*sizes, threads, _, dtype),) = asked
    assert sizes == [128, 8, 16] and threads == torch.get_num_threads() and dtype == torch.bfloat16


def test_the_measurement_changes_no_state():
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    assert 0 < product_seconds(replace(POLICY, layers=78), None) < 1
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads


@pytest.fixture
def planned(configured, monkeypatch, capsys):
    """Return a function that makes a plan of 10 updates in which an update takes 30 seconds and an evaluation 60.
    Returns what it returns, and its line of the time."""
    monkeypatch.setattr(plan, "product_seconds", lambda *_: 1.0)
    monkeypatch.setattr(plan, "predicted_seconds", lambda *_: {"updates": [30.0], "evaluations": [60.0]})

    def make(device: torch.device = CPU, resume: bool = False) -> tuple[dict, str]:
        config = configured("--num-iterations", 10, "--eval-every", 4, "--memory", "24GB", "--dry-run")
        inputs = load_inputs(config, Screen())
        config = replace(config, run=replace(config.run, resume=resume))
        capsys.readouterr()
        found = show_plan(config, inputs, device, Screen())
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  time ")]
        return found, line

    return make


def test_the_plan_has_the_time_of_the_run_with_its_parts(planned):
    """Evaluations of the start model and after updates 4, 8 and 10."""
    found, line = planned()
    (parts,) = found.values()
    assert parts == {"updates": 300, "evaluations": 240}
    assert "9:00 (updates 5:00, evaluations 4:00)" in line and "8 tokens" in line


def test_a_gpu_several_processes_and_a_resumed_run_have_measured_times_only(planned, monkeypatch):
    monkeypatch.setattr(plan, "predicted_seconds", None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    found, line = planned(torch.device("cuda"))
    assert found == {} and "measured updates" in line
    assert planned(resume=True)[0] == {}
    monkeypatch.setattr(plan, "process_rows", lambda: [("processes", "2")])
    assert planned()[0] == {}

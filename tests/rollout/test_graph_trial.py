"""Tests of the trial of CUDA graphs in a separate process: success, failure and a graph that hangs (simulated)."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from rlhf.rollout import graph_trial, sampler
from rlhf.rollout.graph_trial import graph_problem, main, try_graphs


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_trial_that_succeeds_has_no_problem():
    assert try_graphs(program("pass"), 60) is None


def test_a_trial_finds_the_project_also_with_a_safe_path(monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert try_graphs(program("import rlhf"), 60) is None


def test_a_trial_that_hangs_is_ended_at_the_time_limit():
    began = time.monotonic()
    problem = try_graphs(program("import time; time.sleep(600)"), 1)
    assert " 1 s," in problem and time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; print('loading'); sys.exit('CUDA error: launch failure')", "CUDA error: launch failure"),
        ("import sys; sys.exit(3)", "exit status 3"),
    ],
)
def test_a_trial_that_fails_has_its_last_line_as_the_reason(code, reason):
    problem = try_graphs(program(code), 60)
    assert problem.endswith(f"({reason})")


def test_the_trial_compares_the_completions_of_two_engines(monkeypatch):
    """On a CPU with the two engines that it has."""
    monkeypatch.setattr(graph_trial, "ROUNDS", 1)
    monkeypatch.setattr(graph_trial, "ROWS", 4)
    monkeypatch.setattr(graph_trial, "LENGTH", 8)
    assert main(device="cpu", engines=("slots", "plain")) is None
    noise = iter([torch.zeros(4, 8), torch.ones(4, 8) * 0.99])
    monkeypatch.setattr(sampler, "uniform_noise", lambda *_: next(noise))
    problem = main(device="cpu", engines=("slots", "plain"))
    assert "0 of 4" in problem


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulates a GPU. Returns the numbers of trials, and what can be changed."""
    found = {"GPU": "a GPU", "driver": "550.1", "problem": None, "trials": []}
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: found["GPU"])
    monkeypatch.setattr(graph_trial, "gpu_driver", lambda: found["driver"])
    monkeypatch.setattr(
        graph_trial, "try_graphs", lambda program: found["trials"].append(program[-2:]) or found["problem"]
    )
    return found


def test_a_successful_trial_is_remembered_for_model_precision_gpu_driver_and_versions(machine, monkeypatch):
    for _ in range(2):
        assert graph_problem("llama", "bfloat16") is None
    graph_problem("qwen2", "bfloat16")
    graph_problem("qwen2", "float32")
    machine["GPU"] = "another GPU"
    graph_problem("llama", "bfloat16")
    machine["driver"] = "560.2"
    graph_problem("llama", "bfloat16")
    machine["GPU"], machine["driver"] = "a GPU", "550.1"
    graph_problem("llama", "bfloat16")
    expected = [["llama", "bfloat16"], ["qwen2", "bfloat16"], ["qwen2", "float32"], *[["llama", "bfloat16"]] * 2]
    assert machine["trials"] == expected
    now = graph_trial.environment()
    versions = {**now["versions"], "transformers": "another"}  # whose model the engine runs
    monkeypatch.setattr(graph_trial, "environment", lambda: {**now, "versions": versions})
    graph_problem("llama", "bfloat16")
    expected.append(["llama", "bfloat16"])
    assert machine["trials"] == expected


def test_a_failed_trial_is_repeated(machine):
    machine["problem"] = "it hangs"
    assert graph_problem("llama", "float32") == graph_problem("llama", "float32") == "it hangs"
    machine["problem"] = None
    assert graph_problem("llama", "float32") is None
    machine["problem"] = "it hangs after all"
    assert graph_problem("llama", "float32") is None
    assert graph_problem("llama", "float32", again=True) == graph_problem("llama", "float32") == "it hangs after all"
    assert len(machine["trials"]) == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_graphs_work_on_this_gpu(dtype):
    assert try_graphs([*graph_trial.TRIAL, "llama", dtype]) is None

"""Tests of the trial of CUDA graphs in a separate process: success, failure and a graph that hangs (simulated)."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from rlhf.rollout import graph_trial
from rlhf.rollout.graph_trial import main, try_graphs


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_trial_that_succeeds_has_no_problem():
    assert try_graphs(program("pass"), 60) is None


def test_a_trial_that_hangs_is_ended_at_the_time_limit(snapshot):
    began = time.monotonic()
    problem = try_graphs(program("import time; time.sleep(600)"), 1)
    assert " 1 s," in problem and time.monotonic() - began < 60
    snapshot(problem)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; print('loading'); sys.exit('CUDA error: launch failure')", "CUDA error: launch failure"),
        ("import sys; sys.exit(3)", "exit status 3"),
    ],
)
def test_a_trial_that_fails_has_its_last_line_as_the_reason(code, reason, snapshot):
    problem = try_graphs(program(code), 60)
    assert problem.endswith(f"({reason})")
    snapshot(problem)


def test_the_trial_compares_the_completions_of_two_engines(monkeypatch, snapshot):
    """On a CPU with the two engines that it has."""
    monkeypatch.setattr(graph_trial, "ROUNDS", 1)
    monkeypatch.setattr(graph_trial, "ROWS", 4)
    monkeypatch.setattr(graph_trial, "LENGTH", 8)
    assert main("cpu", ("slots", "plain")) is None
    noise = iter([torch.zeros(4, 8), torch.ones(4, 8) * 0.99])
    from rlhf.rollout import engine

    sample = engine.sample_completions
    monkeypatch.setattr(
        engine, "sample_completions", lambda p, r, _, *more, **k: sample(p, r, next(noise), *more, **k)
    )
    problem = main("cpu", ("slots", "plain"))
    assert "0 of 4" in problem
    snapshot(problem)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_graphs_work_on_this_gpu():
    assert try_graphs() is None

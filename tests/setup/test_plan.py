"""What the plan prints before a run."""

from __future__ import annotations

import time

import pytest
import torch

import train_ppo
from rlhf.checkpoints.run_record import RunRecord
from rlhf.setup.build import load_components
from rlhf.setup.plan import base_parameters, kl_line, show_plan
from rlhf.utils.console import Screen

CPU = torch.device("cpu")


@pytest.mark.parametrize("flags", [(), ("--use-lora",), ("--use-lora", "--load-in-4bit")])
def test_the_start_models_parameters_are_its_own(configured, flags):
    """Neither the adapters' nor the bytes of packed weights are counted."""
    plain = load_components(configured(), CPU, Screen()).policy
    expected = sum(weight.numel() for weight in plain.parameters())
    assert base_parameters(load_components(configured(*flags), CPU, Screen()).policy) == expected


def test_a_phase_without_updates_is_not_listed(configured):
    """Two updates for three targets: no `updates 2 to 1`."""
    line = kl_line(configured("--kl-schedule", "phased"), 2)
    assert line.count("(updates") == 2 and "0.05/token (updates 1 to 1), 0.01/token (updates 2 to 2)" in line


def test_the_plan_prints_the_reach_of_beta_and_the_hint(configured, capsys):
    config = configured("--kl-schedule", "phased", "--num-iterations", 800, "--kl-horizon", 2000)
    show_plan(config, load_components(config, CPU, Screen()), 800, CPU, Screen())
    output = capsys.readouterr().out
    assert "horizon 2,000 episodes (beta can change at most 1.11-fold per phase)" in output
    assert "warning: beta can change at most 1.11-fold in 266 updates" in output
    assert "Add --recipe phased-kl to use all its settings" in output


def test_the_plan_of_the_longest_run_takes_seconds(configured, capsys):
    config = configured("--num-iterations", 10_000_000, "--batch-size", 1)
    begun = time.monotonic()
    show_plan(config, load_components(config, CPU, Screen()), 10_000_000, CPU, Screen())
    assert time.monotonic() - begun < 20
    assert "10,000,000 updates" in capsys.readouterr().out


def test_the_default_horizon_is_a_number_in_run_json(run_flags, tmp_path):
    train_ppo.main(run_flags("--num-iterations", 3))
    assert RunRecord.read(tmp_path / "run").settings["kl"]["kl_horizon"] == 8, "two updates' episodes"
    train_ppo.main(run_flags("--num-iterations", 3, "--kl-horizon", 77, "--overwrite"))
    assert RunRecord.read(tmp_path / "run").settings["kl"]["kl_horizon"] == 77

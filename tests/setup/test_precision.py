"""Tests of the precision on a CPU: a measurement chooses it, and all runs of a command and a resumed run keep it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import train_ppo
from rlhf.checkpoints.run_record import RunRecord
from rlhf.setup import precision
from rlhf.setup.precision import choose_precision, is_clearly_faster, measured
from rlhf.utils.console import Screen
from tests.distributed.ranks import chosen_by_two

CPU = torch.device("cpu")
# seconds in float32 and in bfloat16
FASTER = (0.030, 0.012)
SLOWER = (0.012, 0.030)


@pytest.fixture
def measures(monkeypatch):
    """Return a function that sets the measured seconds, also for tiny models. None: a measurement fails the test."""

    def set_to(seconds: tuple[float, float] | None, smallest: int = 0) -> None:
        def replacement(hidden: int, inner: int) -> tuple[float, float]:
            assert seconds is not None, f"measured {hidden} x {inner}"
            return seconds

        monkeypatch.setattr(precision, "SMALLEST", smallest)
        monkeypatch.setattr(precision, "measured", replacement)

    return set_to


def bf16_of(folder: Path) -> bool | None:
    return RunRecord.require(folder, "--output").flat_settings["bf16"]


@pytest.mark.parametrize(("seconds", "bfloat16"), [((2.4, 2.0), True), ((2.39, 2.0), False), (SLOWER, False)])
def test_bfloat16_must_be_clearly_faster(seconds, bfloat16):
    assert is_clearly_faster(*seconds) is bfloat16


@pytest.mark.parametrize(("seconds", "bfloat16"), [(FASTER, True), (SLOWER, False)])
def test_the_measurement_chooses_and_is_printed(configured, start_model, measures, capsys, seconds, bfloat16):
    measures(seconds)
    assert choose_precision(configured(), str(start_model), CPU, Screen()).model.bf16 is bfloat16
    printed = capsys.readouterr().out
    assert "30 ms" in printed and "12 ms" in printed and ("2.5x" if bfloat16 else "0.4x") in printed


@pytest.mark.parametrize("flag", ["--bf16", "--no-bf16"])
def test_an_explicit_flag_is_not_measured(configured, start_model, measures, flag):
    measures(None)
    assert choose_precision(configured(flag), str(start_model), CPU, Screen()) == configured(flag)


def test_a_gpu_and_a_tiny_model_are_not_measured(configured, start_model, measures):
    measures(None)
    assert choose_precision(configured(), str(start_model), torch.device("cuda"), Screen()).model.bf16 is None
    measures(None, smallest=32 * 64 + 1)  # the matrices of the tests' model are 32 x 64
    assert choose_precision(configured(), str(start_model), CPU, Screen()).model.bf16 is None


def test_the_demos_and_the_tests_are_tiny_and_smollm2_is_not():
    assert 256 * 512 < precision.SMALLEST <= 576 * 1536


def test_all_measurements_of_a_start_take_less_than_a_second():
    """Of two precisions, of the products for the plan, and of the threads."""
    assert 3 * precision.SECONDS + precision.THREADS_S < 1


def test_a_measurement_changes_no_state_and_is_made_once_per_process():
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = measured(48, 96)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert min(found) > 0 and torch.equal(torch.get_rng_state(), state)
    assert measured(48, 96) == found, "two measurements would differ"


def test_a_resumed_run_keeps_its_precision(run_flags, measures, tmp_path):
    """On another CPU, which would choose float32, and without a measurement."""
    measures(FASTER)
    train_ppo.main(run_flags("--num-iterations", 1, "--save-every", 1))
    assert bf16_of(tmp_path / "run") is True
    measures(None)
    train_ppo.main(run_flags("--num-iterations", 2, "--save-every", 1, "--resume", "--resume-anyway"))
    run = RunRecord.require(tmp_path / "run", "--output")
    assert run.flat_settings["bf16"] is True and run.spent.updates == 2


@pytest.mark.ci
def test_seeds_that_are_trained_later_have_the_precision_of_the_first(run_flags, measures, tmp_path, capsys):
    measures(FASTER)
    train_ppo.main(run_flags("--num-iterations", 1, "--seeds", 1))
    measures(None)
    train_ppo.main(run_flags("--num-iterations", 1, "--seeds", 1, 2))
    assert "seed 1: already finished" in capsys.readouterr().out
    assert [bf16_of(tmp_path / f"run_seed{seed}") for seed in (1, 2)] == [True, True]


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_several_processes_use_the_choice_of_the_first(start_model):
    work = """
    precision.SMALLEST = 0
    precision.measured = lambda *sizes: ((3.0, 1.0), (1.0, 3.0))[rank]
    return precision.choose_precision(config, start_model, device, Screen()).model.bf16
    """
    assert chosen_by_two(work, start_model) == "[True, True]"

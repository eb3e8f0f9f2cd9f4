"""Tests of the number of threads on a CPU: a measurement chooses it unless the user does, and a run keeps it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evaluate_generations
import train_ppo
from rlhf.checkpoints.run_record import RUN_FILE, RunRecord
from rlhf.demo import ready
from rlhf.run.resume_checks import as_other_seeds
from rlhf.setup import build, precision
from rlhf.setup.precision import choose_threads, thread_seconds
from rlhf.utils.console import Screen
from tests.distributed.ranks import chosen_by_two

CPU = torch.device("cpu")
# seconds with 1 and with 2 threads
BUSY = (0.001, 0.002)
EVEN = (0.001, 0.00199)
FREE = (0.002, 0.001)


@pytest.fixture
def measures(monkeypatch):
    """Return a function that sets the measured seconds on a machine with two cores, on which no variable sets the
    number. None: a measurement fails the test. Afterwards torch has its number of threads again."""
    before = torch.get_num_threads()

    def set_to(seconds: tuple[float, float] | None, own: int = 2, **variables: str) -> None:
        def replacement(hidden: int, inner: int, most: int) -> tuple[float, float]:
            assert seconds is not None, f"measured {hidden} x {inner}"
            return seconds

        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        torch.set_num_threads(own)
        monkeypatch.setattr(precision, "OWN_THREADS", own)
        monkeypatch.setattr(precision, "thread_seconds", replacement)
        monkeypatch.setattr("rlhf.models.device.available_cores", lambda: 2)

    yield set_to
    torch.set_num_threads(before)


@pytest.fixture
def stored(tmp_path):
    """Return a function that reads the number of threads in a run.json."""
    return lambda folder=tmp_path / "run": RunRecord.require(folder, "--output").threads


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "threads"), [(BUSY, 1), (EVEN, 2), (FREE, 2)])
def test_one_thread_must_be_twice_as_fast(configured, start_model, measures, capsys, seconds, threads):
    measures(seconds)
    choose_threads(configured(), str(start_model), CPU, Screen())
    assert torch.get_num_threads() == threads
    printed = capsys.readouterr().out
    assert f"threads: {threads}" in printed and "--threads" in printed
    assert f"{1000 * seconds[0]:.3g} ms" in printed and f"{1000 * seconds[1]:.3g} ms" in printed


@pytest.mark.parametrize(
    ("flags", "own", "variables", "threads"),
    [
        (["--threads", 1], 2, {}, 1),
        (["--threads", 2], 1, {"OMP_NUM_THREADS": "1"}, 2),  # as torchrun sets it
        ([], 2, {"OMP_NUM_THREADS": "2"}, 2),
        ([], 2, {"MKL_NUM_THREADS": "2"}, 2),
        ([], 1, {}, 1),
        (["--deterministic"], 2, {}, 2),
    ],
)
def test_what_the_user_sets_is_not_measured(configured, start_model, measures, capsys, flags, own, variables, threads):
    measures(None, own, **variables)
    choose_threads(configured(*flags), str(start_model), CPU, Screen())
    assert torch.get_num_threads() == threads and not capsys.readouterr().out


def test_more_threads_than_cores_are_reduced_with_a_note(configured, start_model, measures, capsys):
    measures(None)
    choose_threads(configured("--threads", 9), str(start_model), CPU, Screen())
    printed = capsys.readouterr().out
    assert torch.get_num_threads() == 2 and printed.startswith("note: ") and "2 threads: --threads 9" in printed


def test_a_program_keeps_its_number(configured, start_model, measures):
    measures(None)
    torch.set_num_threads(1)
    choose_threads(replace(configured(), in_python=True), str(start_model), CPU, Screen())
    assert torch.get_num_threads() == 1


def test_a_gpu_run_is_not_measured_and_takes_the_setting(configured, start_model, measures):
    measures(None)
    choose_threads(configured(), str(start_model), torch.device("cuda"), Screen())
    assert torch.get_num_threads() == 2
    choose_threads(configured("--threads", 1), str(start_model), torch.device("cuda"), Screen())
    assert torch.get_num_threads() == 1


def test_deterministic_does_not_measure_the_precision(configured, start_model, monkeypatch):
    monkeypatch.setattr(precision, "SMALLEST", 0)
    monkeypatch.setattr(precision, "measured", None)
    assert (
        precision.choose_precision(configured("--deterministic"), str(start_model), CPU, Screen()).model.bf16 is None
    )


def test_a_measurement_changes_no_state_and_is_made_once_per_process(monkeypatch):
    monkeypatch.setattr(precision, "THREADS_S", 0)
    monkeypatch.setattr(precision, "TURN_S", 0.001)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    found = thread_seconds(48, 96, 2)
    assert min(found) > 0 and torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    assert thread_seconds(48, 96, 2) == found, "two measurements would differ"


def test_the_turns_are_taken_by_both_numbers_and_their_medians_decide(monkeypatch):
    """One turn in which another program takes the cores decides nothing."""
    asked = []
    times = iter([1.0, 3.0, 90.0, 4.0, 2.0, 80.0])

    def timed(rows, hidden, inner, threads, seconds):
        asked.append(threads)
        return type("Measurement", (), {"mean": next(times)})

    monkeypatch.setattr(precision, "THREADS_S", 0)
    monkeypatch.setattr(precision, "_timed", timed)
    assert thread_seconds.__wrapped__(8, 8, 4) == (2.0, 4.0)
    assert asked == [1, 4] * precision.TURNS


def test_the_parts_of_the_demo_are_built_with_the_measured_number(configured, measures, monkeypatch):
    measures(BUSY)
    built = []
    monkeypatch.setattr(build, "prepare_parts", lambda *_: built.append(torch.get_num_threads()))
    monkeypatch.setattr(ready, "is_ready", lambda recipe: False)
    build.prepare_demo_components(replace(configured(), recipe="demo"), Screen(), CPU)
    assert built == [1]


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(run_flags, measures, made_once, tmp_path):
    """A run of one update, with one thread. It is trained once and copied."""

    def train(folder: Path) -> None:
        measures(BUSY)
        train_ppo.main(run_flags("--num-iterations", 1, "--output", folder / "run"))

    shutil.copytree(made_once("run_with_one_thread", train) / "run", tmp_path / "run")


def test_a_resumed_run_keeps_its_number(trained, run_flags, measures, stored):
    assert stored() == 1
    measures(None)
    train_ppo.main(run_flags("--num-iterations", 2, "--resume", "--resume-anyway"))
    assert torch.get_num_threads() == 1 and stored() == 1


@pytest.mark.parametrize(("flags", "variables"), [(["--threads", 2], {}), ([], {"OMP_NUM_THREADS": "2"})])
def test_the_user_changes_the_number_of_a_resumed_run_with_a_warning(
    trained, run_flags, measures, stored, capsys, flags, variables
):
    measures(None, **variables)
    train_ppo.main(run_flags("--num-iterations", 2, "--resume", "--resume-anyway", *flags))
    printed = capsys.readouterr().out
    assert stored() == 2 and printed.count("warning: the number of threads was 1") == 1 and "--threads 1" in printed


def test_a_run_of_an_older_version_is_resumed_with_the_number_of_the_machine(
    trained, run_flags, measures, tmp_path, capsys
):
    file = tmp_path / "run" / RUN_FILE
    facts = json.loads(file.read_text(encoding="utf-8"))
    del facts["threads"], facts["settings"]["speed"]["threads"]
    file.write_text(json.dumps(facts), encoding="utf-8")
    measures(None)
    train_ppo.main(run_flags("--num-iterations", 2, "--resume", "--resume-anyway"))
    assert torch.get_num_threads() == 2 and "the number of threads" not in capsys.readouterr().out


@pytest.mark.parametrize(("variables", "threads"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_an_evaluation_takes_the_number_of_the_run(trained, measures, tmp_path, monkeypatch, variables, threads):
    measures(None, **variables)
    monkeypatch.chdir(tmp_path)
    evaluate_generations.main(["--model-path", "run", "--num-prompts", "2", "--output", "evaluated"])
    assert torch.get_num_threads() == threads


@pytest.mark.ci
def test_seeds_that_are_trained_later_have_the_number_of_the_first(run_flags, measures, stored, tmp_path):
    measures(BUSY)
    train_ppo.main(run_flags("--num-iterations", 1, "--seeds", 1))
    measures(None)
    train_ppo.main(run_flags("--num-iterations", 1, "--seeds", 1, 2))
    assert [stored(tmp_path / f"run_seed{seed}") for seed in (1, 2)] == [1, 1]


def test_a_new_seed_gets_the_number_of_an_earlier_one(configured, measures, tmp_path):
    one = configured()
    given = configured("--threads", 2)
    facts = {"status": "finished", "threads": 1, "settings": {"model": {"actor_model": one.model.actor_model}}}
    (tmp_path / RUN_FILE).write_text(json.dumps(facts), encoding="utf-8")
    measures(None)
    assert [as_other_seeds(config, [tmp_path]).speed.threads for config in (one, given)] == [1, 2]
    measures(None, OMP_NUM_THREADS="2")
    assert [as_other_seeds(config, [tmp_path]).speed.threads for config in (one, given)] == [None, 2]


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_several_processes_use_the_number_of_the_first(start_model):
    work = """
    precision._threads_here = lambda *given: (1, 2)[rank]
    torch.set_num_threads(2)
    precision.choose_threads(config, start_model, device, Screen())
    return torch.get_num_threads()
    """
    assert chosen_by_two(work, start_model) == "[1, 1]"

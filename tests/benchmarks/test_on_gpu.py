"""Tests benchmarks/on_gpu.py on the CPU with tiny models: sections, time limits and the record of failures."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen

import psutil
import pytest
import torch

from benchmarks import on_gpu
from benchmarks.gpu_measures import Outcomes, last_line
from benchmarks.gpu_report import DONE, FAILED, OUT_OF_TIME, Report, number
from benchmarks.gpu_section import OutOfTime, Plan, Section
from benchmarks.gpu_trainings import first_difference, report_finished, report_stopped
from rlhf.checkpoints.run_record import Spent
from rlhf.settings.recipes import DEMOS, shipped_recipes
from rlhf.utils.errors import UserError
from rlhf.utils.system import WINDOWS
from tests.records import record_of
from tests.scripts.test_scripts import ROOT, run


def figures(folder) -> dict[str, dict]:
    """Returns the sections of figures.json, each with its figures by name."""
    found = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    return {name: {**record, "figures": {f["name"]: f for f in record["figures"]}}
            for name, record in found["sections"].items()}  # fmt: skip


# --- whole runs ------------------------------------------------------------------------------------------------------


def run_sections(folder: Path, *flags: str) -> tuple[dict[str, dict], str]:
    """Runs the script on the CPU and returns its sections and its console output."""
    done = run(["benchmarks/on_gpu.py", "--device", "cpu", *flags, "--output", str(folder / "out")], ROOT)
    assert done.returncode == 0, done.stderr
    return figures(folder / "out"), done.stdout


def test_section_is_measured_and_written(tmp_path):
    sections, printed = run_sections(tmp_path, "--only", "decoding", "--minutes", "0.5")
    assert list(sections) == ["decoding"]
    found = sections["decoding"]["figures"]
    assert found["64 slots, plain"]["value"] > 0 and found["64 slots, slots"]["value"] > 0
    # a busy machine may not have time for the last ones
    possible = {f"{n:,} slots, {engine}" for n in (64, 128, 256, 512, 1024) for engine in ("plain", "slots")}
    assert set(found) <= possible
    written = (tmp_path / "out" / "figures.md").read_text(encoding="utf-8")
    machine = json.loads((tmp_path / "out" / "figures.json").read_text(encoding="utf-8"))["machine"]
    for words in ("- GPU: none", machine["processor"], f"torch {machine['versions']['torch']}", "| 64 slots, plain |"):
        assert words in written
    assert "64 slots, plain:" in printed and "decoding: " in printed


@pytest.mark.ci
def test_all_sections_in_two_minutes_on_a_cpu(tmp_path):
    started = time.monotonic()
    found, _ = run_sections(tmp_path, "--minutes", "2")
    assert time.monotonic() - started < 2 * 60 + len(on_gpu.SHORT) * (on_gpu.TO_END + 5), (
        "each section has a fixed share of the time"
    )
    assert list(found) == list(on_gpu.SHORT), "all sections in order"
    assert {record["state"] for record in found.values()} <= {DONE, OUT_OF_TIME}
    shares = [120 * minutes / sum(on_gpu.SHORT.values()) for minutes in on_gpu.SHORT.values()]
    assert [record["share"] for record in found.values()] == pytest.approx(shares)
    assert "no CUDA GPU on this machine" in found["self-test"]["figures"]["GPU tests passed"]["note"]
    assert found["decoding"]["figures"]["64 slots, plain"]["value"] > 0


@pytest.mark.ci
def test_updates_and_memory_are_measured(tmp_path):
    found, _ = run_sections(tmp_path, "--only", "update", "memory", "--minutes", "5")
    assert {record["state"] for record in found.values()} == {DONE}
    for algorithm in ("PPO", "GRPO"):
        updates = found["update"]["figures"]
        ours, stock = (updates[f"{algorithm}, one update, {side}"] for side in ("ours", "stock TRL"))
        assert len(ours["all"]) == len(stock["all"]) == 10 and ours["value"] > 0
        epoch = updates[f"{algorithm}, one epoch of 10,000 prompts, ours"]
        assert epoch["note"].startswith("extrapolated from 10 of ")
    assert len(found["update"]["figures"]["RLOO, one update, ours"]["all"]) == 3
    for kind in ("full", "LoRA", "4-bit LoRA"):
        figure = found["memory"]["figures"][f"PPO, {kind}, measured / predicted"]
        assert figure["value"] == pytest.approx(figure["measured_bytes"] / figure["predicted_bytes"])


@pytest.mark.ci
def test_operators_fit_and_demo_parts_are_measured(tmp_path):
    found, _ = run_sections(tmp_path, "--only", "operators", "fit", "demo", "--minutes", "4")
    operators = found["operators"]["figures"]
    for algorithm in ("PPO", "GRPO", "RLOO"):
        assert 50 < operators[f"{algorithm}, operators: decoding step"]["value"] < 200
    fit = found["fit"]["figures"]
    assert fit["--dry-run"]["value"] > 0 and fit["--fit 800MB"]["value"] <= 800 / 1024
    assert found["demo"]["figures"]["demo parts"]["value"] == "made"
    for algorithm in ("PPO", "GRPO", "RLOO"):
        assert any(name.startswith(f"{algorithm}, seed 42") for name in found["demo"]["figures"])


@pytest.mark.proof
def test_recipes_and_epochs_are_measured(tmp_path):
    found = run_sections(tmp_path, "--full", "--only", "recipes", "--minutes", "12")[0]["recipes"]["figures"]
    assert set(found) == {f"{r}, {a}" for r in set(shipped_recipes()) - set(DEMOS) for a in ("PPO", "GRPO", "RLOO")}
    assert all(figure["value"] > 0 and figure["unit"] == "s per update" for figure in found.values()), found
    found, _ = run_sections(tmp_path, "--full", "--only", "epochs", "out of memory", "--minutes", "3")
    assert found["out of memory"]["figures"]["out of memory"]["error"] == "needs a CUDA GPU"
    for algorithm in ("PPO", "GRPO", "RLOO"):
        epoch = found["epochs"]["figures"][f"{algorithm}, one epoch of 10,000 prompts"]
        assert epoch["value"] > 0 and re.match(r"extrapolated from \d+ of \d+ updates; ", epoch["note"])


@pytest.mark.proof
def test_same_seed_section_reports_bit_identical_runs(tmp_path):
    found = run_sections(tmp_path, "--full", "--only", "same seed", "--minutes", "9")[0]["same seed"]["figures"]
    switches = ("--deterministic", "--no-deterministic")
    assert set(found) == {f"{algorithm}, {switch}" for algorithm in ("PPO", "GRPO", "RLOO") for switch in switches}
    assert {figure["value"] for figure in found.values()} == {"bit-identical"}


# --- the plan --------------------------------------------------------------------------------------------------------


def test_sections_share_the_given_time():
    assert sum(on_gpu.SHORT.values()) == 8.5
    assert on_gpu.shares_of(on_gpu.parse([])) == {n: 60 * m for n, m in on_gpu.SHORT.items()}
    halved = on_gpu.shares_of(on_gpu.parse(["--minutes", "4.25"]))
    assert halved == pytest.approx({name: 30 * minutes for name, minutes in on_gpu.SHORT.items()})
    selected = on_gpu.shares_of(on_gpu.parse(["--minutes", "3", "--only", "decoding", "demo"]))
    assert selected == pytest.approx({"decoding": 180 * 1.5 / 3.5, "demo": 180 * 2 / 3.5})
    assert set(on_gpu.shares_of(on_gpu.parse(["--full"]))) > set(on_gpu.SHORT)
    assert list(on_gpu.shares_of(on_gpu.parse(["--real"]))) == ["real"]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--only", "decodings"], "no such section: --only decodings"),
        (["--full", "--real"], "mutually exclusive flags: --full, --real"),
        (["--minutes", "0"], "not a positive number: --minutes 0"),
    ],
)
def test_invalid_flags_are_one_line_errors(flags, error):
    with pytest.raises(UserError, match=error):
        on_gpu.parse(flags)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_gpu_is_an_error_before_any_output(tmp_path, monkeypatch):
    monkeypatch.setattr("os.environ", dict(os.environ))  # choose_device changes os.environ
    with pytest.raises(UserError, match="no GPU that this torch can use: --device cuda. Use --device cpu"):
        on_gpu.main(["--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_every_section_of_a_plan_exists():
    from benchmarks import gpu_measures, gpu_trainings, gpu_updates

    known = {**gpu_measures.SECTIONS, **gpu_updates.SECTIONS, **gpu_trainings.SECTIONS}
    assert set(known) == {*on_gpu.SHORT, *on_gpu.FULL, *on_gpu.REAL}


# --- time limits and failures ----------------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path) -> Report:
    (tmp_path / "logs").mkdir()
    return Report(tmp_path, ["on_gpu.py"], "today")


def plan(tmp_path, name: str, seconds: float = 60.0) -> Plan:
    return Plan(name, seconds, device="cpu", size="tiny", models=str(tmp_path / "models"), output=str(tmp_path))


def test_failed_section_is_recorded(tmp_path, report, capsys):
    on_gpu.measure(plan(tmp_path, "nowhere"), report)
    record = figures(tmp_path)["nowhere"]
    assert record["state"] == FAILED and "KeyError: 'nowhere'" in record["error"]
    assert "nowhere: failed" in capsys.readouterr().out
    assert "error: exit status 1" in (tmp_path / "figures.md").read_text(encoding="utf-8")


STUCK = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(json.dumps({"name": "child", "value": child.pid}), flush=True)
time.sleep(60)
"""


def test_section_over_its_time_limit_is_ended_with_its_child_processes():
    process = Popen([sys.executable, "-c", STUCK], stdout=PIPE, text=True, start_new_session=not WINDOWS)
    received = []
    started = time.monotonic()
    assert not on_gpu.follow(process, started + 3, received.append)
    assert 2.9 < time.monotonic() - started < 10
    on_gpu.end_all(process)
    assert process.poll() is not None
    (child,) = received
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child["value"]) and psutil.Process(child["value"]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child process is still running"
        time.sleep(0.05)


@pytest.fixture
def section(tmp_path) -> Section:
    return Section(plan(tmp_path, "decoding"), io.StringIO())


def messages(section: Section) -> list[dict]:
    return [json.loads(line) for line in section.channel.getvalue().splitlines()]


def test_failed_attempt_is_recorded_and_the_section_continues(section):
    def fail(error):
        raise error

    section.attempt("one", lambda: fail(ValueError("no such kernel")))
    section.attempt("log", lambda: fail(RuntimeError("it stopped\n  File x\nKeyError: 1")))
    section.attempt("two", lambda: fail(OutOfTime()))
    section.attempt("three", lambda: section.figure("three", 3.0, "s", "a note"))
    section.deadline = 0.0
    section.attempt("four", lambda: section.figure("four", 4.0))
    late = "not measured: the section ran out of time"
    assert messages(section) == [
        {"name": "one", "error": "ValueError: no such kernel"},
        {"name": "log", "error": "RuntimeError: it stopped ... KeyError: 1"},
        {"name": "two", "error": late},
        {"name": "three", "value": 3.0, "unit": "s", "note": "a note"},
        {"name": "four", "error": late},
    ]


def test_figure_replaces_the_previous_one_and_is_written_at_once(report, tmp_path):
    report.begin("update", 30.0)
    report.add("update", {"name": "PPO", "value": 2.0, "unit": "s", "note": "median of 1"})
    assert figures(tmp_path)["update"]["figures"]["PPO"]["value"] == 2.0
    report.add("update", {"name": "PPO", "value": 1.5, "unit": "s", "note": "median | of 2"})
    report.add("update", {"name": "GRPO", "error": "RunError: it\nstopped"})
    record = figures(tmp_path)["update"]
    assert list(record["figures"]) == ["PPO", "GRPO"] and record["state"] == "running"
    written = (tmp_path / "figures.md").read_text(encoding="utf-8")
    assert "| PPO | 1.5 s | median \\| of 2 |" in written and "| GRPO | failed | RunError: it stopped |" in written


def test_numbers_are_rounded_for_display():
    assert [number(v) for v in (12345.6, 0.12345, 3.0, 99.94, "differs")] == [
        "12,346",
        "0.123",
        "3",
        "99.9",
        "differs",
    ]


# --- summaries of the sections ---------------------------------------------------------------------------------------


class ReportStub:
    """A minimal pytest report."""

    def __init__(self, name: str, outcome: str, when: str = "call", longrepr=""):
        self.nodeid, self.outcome, self.when, self.longrepr = name, outcome, when, longrepr
        self.failed, self.skipped, self.longreprtext = outcome == "failed", outcome == "skipped", str(longrepr)


def test_outcomes_of_gpu_tests_are_counted(section):
    outcomes = Outcomes(section)
    outcomes.selected = 4
    outcomes.pytest_runtest_logreport(ReportStub("a", "passed", "setup"))
    outcomes.pytest_runtest_logreport(ReportStub("a", "passed"))
    outcomes.pytest_runtest_logreport(
        ReportStub("b", "failed", longrepr="def test():\nE   assert 1 == 2\nE   and more")
    )
    outcomes.pytest_runtest_logreport(ReportStub("c", "skipped", "setup", ("file", 1, "Skipped: no CUDA GPU")))
    last = messages(section)[-1]
    assert (last["value"], last["unit"]) == (1, "of 4")
    assert last["note"] == "1 passed, 1 failed, 1 skipped, 1 not run; Skipped: no CUDA GPU"
    assert {"name": "b", "error": "assert 1 == 2"} in messages(section)
    assert last_line("no marked line") == "no marked line"


def test_first_difference_of_two_runs():
    one = {"loss": [(1, 0.5), (2, 0.4), (3, 0.3)], "kl": [(1, 0.0), (2, 0.1)], "time/update_s": [(1, 9.0)]}
    assert first_difference(one, one) is None
    other = {**one, "loss": [(1, 0.5), (2, 0.4), (3, 0.2)], "kl": [(1, 0.0), (2, 0.2)], "time/update_s": [(1, 8.0)]}
    assert first_difference(one, other) == (2, "kl")


def test_reports_of_finished_and_stopped_demo_runs(section, runs, tmp_path):
    learned = {
        "gold_before": 0.476, "gold_after": 0.734, "gold_rise_interval": [0.157, 0.356], "kl_last_10_updates": 2.68,
        "kl_unit": "nats/sequence", "kl_target": 3.0, "seconds": 117.0, "score_rise_in_start_sd": 1.11,
    }  # fmt: skip
    report_finished(section, "PPO, seed 42", record_of(figures=learned, spent=Spent(150, 9600, 600, 200_000)))
    report_stopped(section, "PPO, seed 1", runs["ppo", 1])
    report_stopped(section, "PPO, seed 3", tmp_path)
    finished, stopped, nothing = messages(section)
    assert finished["value"] == 1.11 and "gold quality 0.476 -> 0.734" in finished["note"]
    assert "out of time after update 2 of 2; last evaluation after update 2" in stopped["note"]
    assert nothing["error"].endswith("before the end of the first update")

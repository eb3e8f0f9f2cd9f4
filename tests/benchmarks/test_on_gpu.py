"""Tests benchmarks/on_gpu.py on the CPU with tiny models: sections, time limits and the record of failures."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen

import psutil
import pytest

from benchmarks import gpu_measures, gpu_trainings, gpu_updates, on_gpu
from benchmarks.gpu_report import DONE, OUT_OF_TIME, Report
from benchmarks.gpu_section import OutOfTime, Plan, Section
from rlhf.utils.system import WINDOWS
from tests.scripts.test_scripts import ROOT, run


def sections_of(folder: Path) -> dict[str, dict]:
    """Return the sections of figures.json, each with its figures by name."""
    found = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    return {name: {**record, "figures": {f["name"]: f for f in record["figures"]}}
            for name, record in found["sections"].items()}  # fmt: skip


def run_sections(folder: Path, *flags: str) -> dict[str, dict]:
    done = run(["benchmarks/on_gpu.py", "--device", "cpu", *flags, "--output", str(folder)], ROOT)
    assert done.returncode == 0, done.stderr
    return sections_of(folder)


@pytest.mark.ci
def test_sections_are_measured_and_written(tmp_path):
    found = run_sections(tmp_path, "--only", "operators", "--minutes", "2")
    assert {name: record["state"] for name, record in found.items()} == {"operators": DONE}
    for algorithm in ("PPO", "GRPO", "RLOO"):
        assert 50 < found["operators"]["figures"][f"{algorithm}, operators: decoding step"]["value"] < 200
    written = (tmp_path / "figures.md").read_text(encoding="utf-8")
    assert "- GPU: none" in written and "| PPO, operators: decoding step |" in written


@pytest.mark.proof
def test_all_sections(tmp_path):
    """The slow tests of memory need a GPU, so the self-test passes none. `real` needs the hub."""
    found = run_sections(tmp_path, "--full", "--minutes", "30")
    assert list(found) == list(on_gpu.FULL) and {record["state"] for record in found.values()} <= {DONE, OUT_OF_TIME}
    figures = {name: figure for record in found.values() for name, figure in record["figures"].items()}
    for name in ("64 slots, plain", "PPO, one update, ours", "GRPO, stock TRL's time / ours", "demo parts",
                 "PPO, 4-bit LoRA, measured / predicted", "RLOO, one epoch of 10,000 prompts"):  # fmt: skip
        assert "error" not in figures[name], figures[name]
    assert figures["PPO, --deterministic"]["value"] == "bit-identical"
    assert figures["--dry-run"]["value"] > 0 and figures["--fit 800MB"]["value"] <= 800 / 1024


def test_every_section_of_a_plan_exists():
    known = {**gpu_measures.SECTIONS, **gpu_updates.SECTIONS, **gpu_trainings.SECTIONS}
    assert set(known) == {*on_gpu.SHORT, *on_gpu.FULL, *on_gpu.REAL}
    selected = on_gpu.shares_of(on_gpu.parse(["--minutes", "3", "--only", "decoding", "demo"]))
    assert selected == pytest.approx({"decoding": 180 * 1.5 / 3.5, "demo": 180 * 2 / 3.5})


STUCK = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(json.dumps({"name": "child", "value": child.pid}), flush=True)
time.sleep(60)
"""


@pytest.mark.ci
def test_section_over_its_time_limit_is_ended_with_its_child_processes():
    process, received = Popen([sys.executable, "-c", STUCK], stdout=PIPE, text=True, start_new_session=not WINDOWS), []
    assert not on_gpu.follow(process, time.monotonic() + 2, received.append)
    on_gpu.end_all(process)
    (child,) = received
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child["value"]) and psutil.Process(child["value"]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child process is still running"
        time.sleep(0.05)


def test_failed_attempt_is_recorded_and_the_section_continues(tmp_path):
    def fail(error):
        raise error

    section = Section(Plan("update", 60.0, "cpu", "tiny", str(tmp_path), str(tmp_path)), io.StringIO())
    section.attempt("one", lambda: fail(ValueError("no such kernel")))
    section.attempt("two", lambda: fail(OutOfTime()))
    section.attempt("three", lambda: section.figure("three", 3.0, "s", "a | b"))
    section.deadline = 0.0
    section.attempt("four", lambda: section.figure("four", 4.0))
    report = Report(tmp_path, ["on_gpu.py"], "today")
    report.begin("update", 30.0)
    for line in section.channel.getvalue().splitlines():
        report.add("update", json.loads(line))
    figures = sections_of(tmp_path)["update"]["figures"]
    assert [name for name, figure in figures.items() if "error" in figure] == ["one", "two", "four"]
    assert "ValueError: no such kernel" in figures["one"]["error"]
    assert "| three | 3 s | a \\| b |" in (tmp_path / "figures.md").read_text(encoding="utf-8")

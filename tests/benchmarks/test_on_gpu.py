"""Tests benchmarks/on_gpu.py on the CPU with tiny models: sections, time limits and the record of failures."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import gpu_commands, gpu_limits, gpu_measures, gpu_profile, gpu_trainings, gpu_updates, on_gpu
from benchmarks.gpu_limits import GPUS
from benchmarks.gpu_report import DONE, FAILED, OUT_OF_TIME, Report
from benchmarks.gpu_section import OutOfTime, Plan, Section
from benchmarks.work import EOS, PAD, TEMPERATURE, Work, random_prompts
from rlhf.config import parse_cli
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.settings.training import SamplingSettings
from rlhf.setup.inputs import check_inputs
from rlhf.setup.load_inputs import load_inputs
from rlhf.setup.shape import Shape
from rlhf.utils.console import Screen
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
    found = run_sections(tmp_path, "--only", "operators", "update-profile", "--minutes", "3")
    assert {name: record["state"] for name, record in found.items()} == dict.fromkeys(
        ("operators", "update-profile"), DONE
    )
    for algorithm in ("PPO", "GRPO", "RLOO"):
        assert 50 < found["operators"]["figures"][f"{algorithm}, operators: decoding step"]["value"] < 200
    written = (tmp_path / "figures.md").read_text(encoding="utf-8")
    assert "- GPU: none" in written and "| PPO, operators: decoding step |" in written
    for rows in gpu_profile.ROWS:
        name = f"{rows} rows, one optimizer step"
        parts = found["update-profile"]["figures"][name]["parts"]
        counts = {part: figures["launches"] for part, figures in parts.items()}
        assert counts["refresh of the cast weights"] == 1 and 1 <= counts["AdamW"] <= 10
        assert counts["backward"] > counts["forward"] > 50 < counts["clip"] + counts["loss"]
        assert 0 < counts["rest"] < counts["whole step"] / 2
        assert all(figures["seconds"] > 0 for part, figures in parts.items() if part != "rest")
        assert {figures["busy_seconds"] for figures in parts.values()} == {None}
        assert f"### {name}\n\n| part | wall time, ms | GPU busy, ms | operators |" in written


@pytest.mark.proof
def test_all_sections(tmp_path):
    """The slow tests of memory need a GPU, so the self-test passes none. `real` needs the hub."""
    found = run_sections(tmp_path, "--full", "--minutes", "45")
    assert list(found) == list(on_gpu.FULL) and {record["state"] for record in found.values()} <= {DONE, OUT_OF_TIME}
    figures = {name: figure for record in found.values() for name, figure in record["figures"].items()}
    for name in ("--check", "RLOO, three updates", "64 slots, plain", "64 slots, mixed lengths, LoRA, slots",
                 "PPO, one update, ours", "GRPO, stock TRL's time / ours", "demo parts",
                 "PPO, 4-bit LoRA, measured / predicted", "RLOO, one epoch of 10,000 prompts"):  # fmt: skip
        assert "error" not in figures[name], figures[name]
    assert figures["PPO, --deterministic"]["value"] == "bit-identical"
    assert figures["--dry-run"]["value"] > 0 and figures["--fit 800MB"]["value"] <= 800 / 1024


def test_the_code_that_makes_the_demo_parts_imports_what_exists():
    names = {}
    exec("\n".join(line for line in gpu_trainings.PREPARE.splitlines() if line.startswith("from ")), names)
    used = gpu_trainings.PREPARE.splitlines()[-1].partition("(")[0]
    assert callable(names[used])


def test_every_section_of_a_plan_exists():
    modules = (gpu_measures, gpu_updates, gpu_profile, gpu_trainings)
    known = {name for module in modules for name in module.SECTIONS}
    assert known == {*on_gpu.SHORT, *on_gpu.FULL, *on_gpu.REAL} > set(on_gpu.REPORT)
    assert sum(on_gpu.REPORT.values()) <= on_gpu.REPORT_MINUTES == on_gpu.parse(["--report"]).minutes
    selected = on_gpu.shares_of(on_gpu.parse(["--only", "decoding-graph", "demo"]))
    assert selected == {"decoding-graph": 2 * 60, "demo": 4 * 60}
    names = list(on_gpu.SHORT)
    assert names[0] == "runs" and on_gpu.SHORT["runs"] <= 4, "correctness in the first four minutes"
    engines = [name for name in names if name.startswith("decoding")]
    assert engines[-1] == "decoding-graph", "nothing works in a process after a failed capture"


def section_of(folder: Path, report: Report, name: str = "update") -> Section:
    plan = Plan(name, 60.0, "cpu", "tiny", str(folder), str(folder), done=report.done(name))
    return Section(plan, io.StringIO())


def test_another_call_continues_the_section_that_ran_out_of_time(tmp_path):
    """What is measured is not measured again, errors are tried again, and finished and failed sections are over."""
    measured = []

    def call(late: bool) -> Report:
        report = Report(tmp_path, ["on_gpu.py"], "today")
        report.read()
        section = section_of(tmp_path, report)
        report.begin("update", 60.0)
        for name in ("one", "two"):
            section.deadline -= 100 * (late and name == "two")
            section.attempt(name, lambda name=name: (measured.append(name), section.figure(name, 1.0)))
        for line in section.channel.getvalue().splitlines():
            report.add("update", json.loads(line))
        report.end("update", DONE, 5.0)
        return report

    report = call(late=True)
    assert measured == ["one"] and "error" in report.sections["update"].figures["two"]
    assert report.sections["update"].state == OUT_OF_TIME and not report.is_over("update")
    report = call(late=False)
    assert measured == ["one", "two"] and "error" not in report.sections["update"].figures["two"]
    assert report.is_over("update") and report.sections["update"].seconds == 10.0
    report.end("update", FAILED, 1.0, "exit status 1")
    assert report.is_over("update") and not report.is_over("demo")


def test_a_call_without_time_starts_no_section(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu, "choose_device", lambda device: device)
    monkeypatch.setattr(on_gpu, "measure", lambda plan, report: pytest.fail(plan.section))
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    on_gpu.main(["--device", "cpu", "--minutes", "0.1", "--output", str(tmp_path)])
    assert "runs, decoding-plain, decoding-slots" in capsys.readouterr().out


def test_a_report_ends_with_one_block_also_if_all_is_measured(tmp_path, capsys, monkeypatch):
    machine = {"gpu": "RTX 3070", "gpu_memory_gib": 8.0, "gpu_state": {"driver_version": "1"}, "cuda": "13.0",
               "processor": "a CPU", "cores": 4, "threads_used": 4, "memory_bytes": 2**34, "python": "3.12",
               "platform": "Windows-11", "versions": {"torch": "2.13.0"}, "commit": None}  # fmt: skip
    measured = []

    def measure(plan, report):
        measured.append(plan.section)
        report.begin(plan.section, plan.seconds)
        report.add(plan.section, {"machine": machine})
        report.add(plan.section, {"name": "a figure", "error": "out of ```memory"})
        report.end(plan.section, DONE, 1.0)

    monkeypatch.setattr(on_gpu, "choose_device", lambda device: device)
    monkeypatch.setattr(on_gpu, "measure", measure)
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    for _ in range(2):
        on_gpu.main(["--report", "--only", "runs", "memory", "--output", str(tmp_path)] if not measured else
                    ["--report", "--minutes", "0.1", "--output", str(tmp_path)])  # fmt: skip
        _, block, after = capsys.readouterr().out.split("````")
        assert block.startswith("markdown\n# RTX 3070\n") and after == "\n"
        for words in ("RTX 3070, 8 GiB, CUDA 13.0", "16 GiB memory", "torch 2.13.0", "Windows-11", "## runs",
                      "## memory", "| a figure | failed |"):  # fmt: skip
            assert words in block
    assert measured == ["runs", "memory"]


@pytest.mark.parametrize(("gib", "both"), [(8, False), (24, True)])
def test_a_small_gpu_runs_no_update_of_stock_trl(tmp_path, monkeypatch, gib, both):
    section = Section(Plan("update", 60.0, "cuda", "smollm2", str(tmp_path), str(tmp_path)), io.StringIO())
    alone = []
    pairs = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=gib * 2**30))
    monkeypatch.setattr(gpu_updates, "updates_alone", lambda section, name, more: alone.append(name))
    monkeypatch.setattr(gpu_updates, "updates_of_both", lambda section, name, *_: pairs.append(name))
    gpu_updates.update(section)
    assert pairs == (["ppo", "grpo"] if both else [])
    assert alone == [*gpu_updates.ALONE, *([] if both else ["PPO", "GRPO"])]


def test_mixed_lengths_end_at_eos_and_share_the_slots(tmp_path):
    """Random weights with an EOS that is as likely as completions of half the length need."""
    section = section_of(tmp_path, Report(tmp_path, [], "today"), "decoding-slots")
    work = Work("", size="tiny", prompt_length=16, reply_length=64)
    policy = gpu_measures.policy_for(section, work, gpu_measures.Case(8, mixed=True))
    noise = uniform_noise(0, 0, "rollout", range(64), 64)
    prompts = random_prompts([8] * 64, policy.config.vocab_size, 0)
    sampling = SamplingSettings(64, TEMPERATURE)
    at = {"eos": EOS, "pad": PAD, "device": policy.device, "engine": "slots", "slots": 8}
    lengths = sample_completions(policy, prompts, noise, sampling, **at).completion_lengths
    mean = sum(min(n, 64) * (31 / 32) ** (n - 1) / 32 for n in range(1, 2_000))  # 27.8: geometric, cut off at 64
    assert mean / 1.4 < sum(lengths) / len(lengths) < 1.4 * mean and len(set(lengths)) > 10


def test_completions_of_a_graph_are_compared_with_those_of_slots(tmp_path):
    section = section_of(tmp_path, Report(tmp_path, [], "today"))
    found = SimpleNamespace(rows=lambda: [[5, 6], [7], [8]])
    assert gpu_measures.equal_to_slots(section, "64 slots, slots", "slots", found) == ""
    other = SimpleNamespace(rows=lambda: [[5, 6], [7], [9]])
    assert gpu_measures.equal_to_slots(section, "64 slots, graph", "graph", other).startswith("2 of 3 ")


STUCK = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(json.dumps({"name": "child", "value": child.pid}), flush=True)
time.sleep(60)
"""


@pytest.mark.ci
def test_section_over_its_time_limit_is_ended_with_its_child_processes():
    process = Popen([sys.executable, "-c", STUCK], stdout=PIPE, text=True, start_new_session=not WINDOWS)
    received = []
    family: set[psutil.Process] = set()
    assert not on_gpu.follow(process, time.monotonic() + 2, received.append, family)
    on_gpu.end_all(process, family)
    (child,) = received
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child["value"]) and psutil.Process(child["value"]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child process is still running"
        time.sleep(0.05)


LEFT = """
import subprocess, sys, time
from benchmarks.run_section import end_with_the_call
end_with_the_call()
waits = "import sys, time; sys.stdin.read(); print(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", waits])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.ci
def test_section_of_a_killed_call_ends_with_its_child_processes():
    """Its standard input is a pipe that only the killed process could write to."""
    section = Popen([sys.executable, "-c", LEFT], stdin=PIPE, stdout=PIPE, text=True, start_new_session=not WINDOWS)
    child = psutil.Process(int(section.stdout.readline()))
    assert section.stdout.readline().strip() == "1", "the child's own input is empty, so it does not wait for any"
    section.stdin.close()
    assert section.wait(20) == 1
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("status", "how"), [(None, "--overwrite"), ("running", "--resume"), ("stopped", "--resume"),
                                             ("finished", "--overwrite")])  # fmt: skip
def test_a_real_run_that_ran_out_of_time_is_resumed(tmp_path, monkeypatch, status, how):
    class Ran(Exception):
        pass

    def run(section, words, folder):
        raise Ran(words[-1])

    monkeypatch.setattr(gpu_trainings, "run", run)
    record = None if status is None else SimpleNamespace(status=status)
    monkeypatch.setattr(gpu_trainings.RunRecord, "read", lambda folder: record)
    with pytest.raises(Ran, match=how):
        gpu_trainings.real_run(section_of(tmp_path, Report(tmp_path, [], "today"), "real"), tmp_path, "grpo")


SAVES = """
import signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(0)
for number in (signal.SIGTERM, getattr(signal, "SIGBREAK", signal.SIGTERM)):
    signal.signal(number, stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.ci
def test_a_command_that_runs_out_of_time_is_stopped_so_that_it_saves(tmp_path, monkeypatch):
    section = section_of(tmp_path, Report(tmp_path, [], "today"))
    section.deadline = time.monotonic() + gpu_commands.TO_STOP + 5
    with pytest.raises(OutOfTime):
        gpu_commands.run(section, ["-c", SAVES], tmp_path)
    (log,) = tmp_path.glob("*.log")
    assert log.read_text(encoding="utf-8").split() == ["ready", "saved"] and section.left > 0


ENDED = """
import json, subprocess, sys, time
words = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
print(json.dumps({"name": "child", "value": child.pid}), flush=True)
time.sleep(1.5 * float(sys.argv[1]))
"""


@pytest.mark.ci
def test_child_process_of_a_section_that_has_ended_is_ended(monkeypatch):
    """It does not belong to the section's process group, as on Windows, where there are none."""
    words = [sys.executable, "-c", ENDED, str(on_gpu.LOOK_EVERY)]
    process = Popen(words, stdout=PIPE, text=True, start_new_session=not WINDOWS)
    received = []
    family: set[psutil.Process] = set()
    assert on_gpu.follow(process, time.monotonic() + 30, received.append, family)
    (child,) = received
    assert psutil.pid_exists(child["value"])
    on_gpu.end_all(process, family)
    psutil.wait_procs(family, timeout=10)
    assert not psutil.pid_exists(child["value"]) or psutil.Process(child["value"]).status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("stand_ins")
    return [*map(str, gpu_commands.stand_ins(section_of(folder, Report(folder, [], "today"), "recipes"), folder))]


@pytest.mark.parametrize("recipe", gpu_trainings.RECIPES)
def test_inputs_of_each_recipe_are_valid_with_the_stand_ins(tmp_path, monkeypatch, stand_ins, recipe):
    monkeypatch.chdir(tmp_path)
    for algorithm in gpu_trainings.ALGORITHMS:
        words = ["--recipe", recipe, *stand_ins, "--num-iterations", "10", "--output", str(tmp_path / algorithm)]
        config = parse_cli(words, algorithm)
        check_inputs(config, print)
        prompts = load_inputs(config, Screen(quiet=True)).prompts
        assert len(prompts.train) >= config.batch.batch_size and len(prompts.evaluation) == 8


class Updates:
    """Takes the place of a worker whose updates all take the same time."""

    def __init__(self, name: str, seconds: float, work: Work):
        self.name = name
        self.seconds = seconds
        self.tokens = work.episodes * work.reply_length
        self.process = SimpleNamespace(kill=lambda: None, wait=lambda: 0)
        self.calls = 0

    def go(self) -> dict:
        self.calls += 1
        if self.calls == 1:
            return {"machine": {"busy_before_percent": 0.0}, "mixed_precision": "no"}
        return {"seconds": self.seconds, "parts": dict.fromkeys(("rollout", "score", "update"), self.seconds / 3),
                "completion_tokens": self.tokens, "optimizer_steps": 8 * (self.calls - 1),
                "memory": {"peak": 2**30, "above_imports": 2**29}}  # fmt: skip


@pytest.mark.parametrize(("until", "pairs"), [(1e9, 2), (0.0, None)])
def test_pairs_with_stock_trl_are_recorded_as_they_are_measured(tmp_path, monkeypatch, until, pairs):
    """Two measured pairs after a warm-up: 2 and 3 s per update, 1,250 updates of 8 prompts in an epoch."""
    monkeypatch.setattr("benchmarks.against_trl.SETTLE_S", 0.0)
    report = Report(tmp_path, [], "today")
    section = section_of(tmp_path, report)
    work = gpu_measures.work_for(section, algorithm="ppo", updates=3, **gpu_measures.UPDATE["ppo"])
    workers = [Updates("ours", 2.0, work), Updates("stock", 3.0, work)]
    section.attempt("PPO", lambda: gpu_updates.alternate_until(section, work, workers, until))
    report.begin("update", 60.0)
    for line in section.channel.getvalue().splitlines():
        report.add("update", json.loads(line))
    figures = report.sections["update"].figures
    if pairs is None:  # the time is over after the warm-up
        assert list(figures) == ["PPO"] and "error" in figures["PPO"]
        return
    assert {name: figure["value"] for name, figure in figures.items()} == {
        "PPO, one update, ours": 2.0, "PPO, one update, stock TRL": 3.0,
        "PPO, one epoch of 10,000 prompts, ours": pytest.approx(1_250 * 2 / 60),
        "PPO, one epoch of 10,000 prompts, stock TRL": pytest.approx(1_250 * 3 / 60),
        "PPO, stock TRL's time / ours": 1.5,
    }  # fmt: skip
    assert figures["PPO, stock TRL's time / ours"]["all"] == [1.5] * pairs


def test_the_time_of_a_run_is_recorded_with_the_shares_of_saving_and_of_all_but_the_updates(tmp_path):
    """Of 200 s, 120 s are updates; checkpoints, best/ and the final save took 20 s."""
    time = {"imports": 10.0, "evaluation/sampling": 50.0, "sampling": 40.0, "optimizer steps": 80.0,
            "checkpoints/write": 12.0, "best/write": 6.0, "final save": 2.0}  # fmt: skip
    report = Report(tmp_path, [], "today")
    section = section_of(tmp_path, report, "real")
    gpu_trainings.record_times(section, "GRPO", time)
    report.begin("real", 60.0)
    report.add("real", json.loads(section.channel.getvalue()))
    figure = report.sections["real"].figures["GRPO: time of all but the updates"]
    assert figure["value"] == pytest.approx(40) and figure["time"] == time and "10.0%" in figure["note"]
    assert "| optimizer steps | 80.0 | 40.0% |" in (tmp_path / "figures.md").read_text(encoding="utf-8")


# --- what only runs on a GPU, with stand-ins -------------------------------------------------------------------------


def test_kernels_of_a_part_are_those_that_the_gpu_ran():
    """Two kernels of 3 and 5 microseconds in one call and one of 2 in the next; events of the CPU and names of ranges
    do not count."""

    def event(device, microseconds, annotation=False):
        times = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(device_type=device, time_range=times, is_user_annotation=annotation)

    count = gpu_profile.Launches(on_gpu=True)
    count.add("forward", [event(DeviceType.CPU, 9), event(DeviceType.CUDA, 3), event(DeviceType.CUDA, 5)])
    count.add("forward", [event(DeviceType.CUDA, 100, annotation=True)])
    count.add("forward", [event(DeviceType.CUDA, 2)])
    count.add("whole step", [event(DeviceType.CUDA, 25)])
    assert count.launches == {"forward": 3, "whole step": 1}
    assert count.busy == {"forward": pytest.approx(10e-6), "whole step": pytest.approx(25e-6)}


def test_the_profiler_sees_all_kernels_of_a_part_and_none_of_another(monkeypatch):
    order = []

    class Profiler:
        def __init__(self, activities):
            assert activities == [gpu_profile.ProfilerActivity.CUDA]

        def __enter__(self):
            order.append("start")
            return self

        def __exit__(self, *_):
            order.append("end")

        def events(self):
            return []

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(gpu_profile, "profile", Profiler)
    count = gpu_profile.Launches(on_gpu=True)
    with count("forward"):
        order.append("work")
    assert order == ["wait", "start", "work", "wait", "end"] and count.launches == {"forward": 0}


def test_the_rest_of_a_step_is_what_its_parts_leave():
    def part(seconds, busy, launches):
        return {"seconds": seconds, "busy_seconds": busy, "launches": launches}

    found = {"forward": part(0.5, 0.25, 30), "AdamW": part(0.25, 0.125, 2), "whole step": part(1.0, 0.5, 40)}
    found["rest"] = gpu_profile.rest_of(found)
    assert found["rest"] == part(0.25, 0.125, 8)
    assert gpu_profile.table_of(found, on_gpu=True)[1:] == [
        ["forward", "500.00", "250.00", "30"],
        ["AdamW", "250.00", "125.00", "2"],
        ["rest", "250.00", "125.00", "8"],
        ["whole step", "1000.00", "500.00", "40"],
    ]


def test_shares_of_the_hardware_of_a_known_gpu(tmp_path, monkeypatch):
    """An update at the H100's peak has an MFU of 100%, and a step at its bandwidth an MBU of 100%."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    section = Section(Plan("update", 60.0, "cuda", "tiny", str(tmp_path), str(tmp_path)), io.StringIO())
    work = Work("", size="tiny", batch_size=2, prompt_length=3, reply_length=4, ppo_epochs=4)
    policy = gpu_measures.policy_for(section_of(tmp_path, Report(tmp_path, [], "")), work, gpu_measures.Case(2))
    shape = Shape.of(policy.config, policy.num_parameters())
    spent = gpu_limits.update_flops(shape, 2, 3, 4, passes=4, reward=True) / GPUS["H100"].peak
    assert gpu_updates.share_of_peak(section, work, spent) == "; MFU 100.0%"
    step = gpu_limits.decoding_bytes(shape, 2, 5) / GPUS["H100"].bandwidth
    assert gpu_measures.share_of_bandwidth(section, policy, work, 2, 2 * step) == ", MBU 50%"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA T4")
    assert gpu_updates.share_of_peak(section, work, spent) == ""


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

"""Tests of runs on several processes: their number does not change the optimization, and a fault in one process is a
decision of all. The processes are forked, so Windows skips these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.run_record import RunRecord
from tests.distributed import proof
from tests.distributed.proof import CASES, largest_gap
from tests.distributed.ranks import free_port, launcher_variables
from tests.distributed.runs import words
from tests.scripts.test_scripts import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
ADAPTER_FILE = "adapter_model.safetensors"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
BOTH = ("alone", "shared")  # the output folders of the same training in one process and in two


def driver(name: str, *given: object) -> list[dict]:
    """Return the JSON objects that a module of tests/distributed prints."""
    ended = subprocess.run(
        [sys.executable, "-m", f"tests.distributed.{name}", *map(str, given)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, env=ENVIRONMENT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


# --- the same optimization -------------------------------------------------------------------------------------------


def check_proof(folder: Path, names: list[str], processes: int = 2) -> None:
    found = {name: case for line in driver("proof", processes, folder, *names) for name, case in line.items()}
    assert list(found) == names
    for name, case in found.items():
        for precision, one in case.items():
            which = f"{name}, {precision}: {one}"
            assert one["equal_on_ranks"] and one["same_ids"], which
            assert one["gradient_norm"] > 0.01 and one["lengths"] > 1, which
            assert one["weights"] <= (1e-12 if precision == "float64" else 1e-6), which
            # a weight that starts at 0 is a sum of few steps, and Adam divides each by the size of the gradient
            assert one["from_zero"] <= (1e-12 if precision == "float64" else 5e-5), which
        if name == "grpo-dynamic":
            assert case["float64"]["resampled"] > 0


CHUNKS = [list(CASES)[start : start + 6] for start in range(0, len(CASES), 6)]


@pytest.mark.ci
@pytest.mark.parametrize("names", CHUNKS, ids=lambda names: names[0])
def test_two_processes_make_the_same_updates_as_one_in_every_case(tmp_path, names):
    check_proof(tmp_path, names)


@pytest.mark.proof
@pytest.mark.parametrize("names", CHUNKS, ids=lambda names: names[0])
def test_four_processes_make_the_same_updates_as_one(tmp_path, names):
    check_proof(tmp_path, names, processes=4)


def test_every_loss_and_critic_is_a_case():
    from rlhf.settings.fields import settings_of
    from rlhf.settings.training import Config
    from rlhf.settings.types import CriticName

    flags = [[str(word) for word in case] for case in CASES.values()]
    choices = {name: settings_of(Config)[name].choices for name in ("loss_type", "scale_rewards")}
    for name, values in {**choices, "critic": CriticName.KINDS}.items():
        flag = "--" + name.replace("_", "-")
        tested = {one[one.index(flag) + 1] for one in flags if flag in one}
        assert set(values) - tested <= {"shared", "none", "group"}, name  # the defaults, and a scale within groups


@pytest.mark.parametrize(
    "algorithm", [pytest.param("ppo", marks=pytest.mark.ci), pytest.param("rloo", marks=pytest.mark.proof)]
)
def test_run_may_be_resumed_with_another_number_of_processes(tmp_path, algorithm):
    (found,) = driver("resumed", tmp_path, algorithm)
    assert found["statuses"] == [[0], [143, 143], [143], [0, 0]], found
    assert found["status"] == "finished" and found["processes"] == 2
    assert found["gap"] < 1e-5, found


# --- faults ----------------------------------------------------------------------------------------------------------

# fault -> exit statuses, the updates of the valid checkpoints, and a part of the only error line
EXPECTED = {
    "none": ([0, 0], [4, 5], None),
    "reward-raises": ([1, 1], [2], "failed on purpose: a test. Fix it (in process 1 of 2)"),
    "bad-score": ([0, 0], [4, 5], None),
    "callback-raises": ([1, 1], [2], "the callback failed on purpose: a test. Fix it (in process 1 of 2)"),
    "loading-raises": ([2, 2], [], "loading failed on purpose: a test"),
    "nan": ([0, 0], [4, 5], None),
    "out-of-memory": ([1, 1], [2], "out of memory with one completion at a time: the backward pass"),
    "out-of-memory-if-large": ([0, 0], [4, 5], None),
    "disk-full": ([1, 1], [2], "the checkpoint of update 4 could not be saved"),
    "other-weights": ([1, 1], [2], "the weights after update 4 differ between process 0 and process 1"),
    "other-versions": ([2, 2], [], "Install the same versions everywhere"),
    "other-data": ([2, 2], [], "train_sha256 is"),
    "own-clock": ([0, 0], [3, 5], None),
    "stopped": ([143, 143], [2, 3], None),
    "ctrl-c": ([130, 130], [2, 3], None),
    "killed": ([1, -9], [2], "another process of this run has ended or does not answer"),
    "first-killed": ([-9, 1], [2], "another process of this run has ended or does not answer"),
    "first-killed-by-launcher": ([-9, (1, -15)], [2], "process"),  # by the lost connection or by SIGTERM
    "first-killed-at-start": ([-9, -15], [], "ended by SIGTERM, which a launcher sends if another process has ended"),
    "unknown-host": ([2, 2], [], "the processes cannot be connected"),
    "taken-port": ([2, 2], [], "the processes cannot be connected"),
}
SLOW = ("unknown-host", "taken-port")  # they wait for the timeout, or for the first process to report


def check_faults(folder: Path, names: list[str]) -> None:
    for found in driver("faults", folder, *names):
        statuses, checkpoints, message = EXPECTED[found["name"]]
        lines = [line for text in found["errors"] for line in text.splitlines() if "error:" in line]
        allowed = [one if isinstance(one, tuple) else (one,) for one in statuses]
        assert all(one in may for one, may in zip(found["statuses"], allowed, strict=True)), found
        assert found["checkpoints"] == checkpoints, found
        assert found["printed"][1] == "", "only the first process prints"
        assert (lines == []) if message is None else (lines and all(message in line for line in lines)), found
        if found["name"] not in (*SLOW, "other-versions"):
            assert len(lines) == (message is not None), found
        assert found["seconds"] < (60 if found["name"] in SLOW else 20), found


@pytest.mark.ci
@pytest.mark.parametrize("names", [list(EXPECTED)[:11], list(EXPECTED)[11:]], ids=["errors", "ends"])
def test_every_fault_in_one_process_is_decided_by_all(tmp_path, names):
    check_faults(tmp_path, names)


def check_kills(folder: Path, algorithm: str, kills: int) -> None:
    (found,) = driver("kills", kills, 1, folder, algorithm)
    assert found["problems"] == [] and found["killed"] == kills, found
    assert found["slowest_end_s"] < 20, found
    assert kills < 5 or (0 < found["first"] < kills and found["resumed"] > 0), found


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_killed_process_ends_the_others_and_the_run_resumes(tmp_path, algorithm):
    check_kills(tmp_path, algorithm, 5 if algorithm == "ppo" else 2)


@pytest.mark.proof
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_25_killed_processes(tmp_path, algorithm):
    check_kills(tmp_path, algorithm, 25)


# --- the launchers ---------------------------------------------------------------------------------------------------


def launcher_commands(launcher: str) -> list[list[str]]:
    """Return the commands that start one run: one per machine. The machines are this one, several times."""
    port = str(free_port())
    torchrun = ["torch.distributed.run", "--master-port", port]
    if launcher == "two-machines":
        nodes = [*torchrun, "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--node-rank"]
        return [[*nodes, "0"], [*nodes, "1"]]
    if launcher == "torchrun":
        return [[*torchrun, "--nproc-per-node", "2"]]
    return [["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
             "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port]]  # fmt: skip


def gap_to_one_process(forks, folder: Path, launcher: str, *more: str) -> float:
    """Train with python and with the launcher's own command. Return the largest gap of the saved weights."""
    inputs = proof.Inputs.make(folder / "inputs")
    alone, shared = ([str(ROOT / "train_ppo.py"), *words("ppo", inputs, folder / name, *more)] for name in BOTH)
    done = forks.run(alone, folder)
    assert done.returncode == 0 and "processes" not in done.stdout, done.stderr
    started = [
        subprocess.Popen([sys.executable, "-m", *command, *shared], cwd=folder, env=ENVIRONMENT, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for command in launcher_commands(launcher)
    ]  # fmt: skip
    ended = [process.communicate(timeout=200) for process in started]
    assert {process.returncode for process in started} == {0}, ended
    printed = "".join(out for out, _ in ended)
    assert printed.count("update 5/5") == 1 and "processes" in printed, "only the first process prints"
    run = RunRecord.read(folder / "shared")
    assert run.status == "finished" and run.processes == 2
    file = ADAPTER_FILE if "--use-lora" in more else "model.safetensors"
    return largest_gap(*(load_file(folder / name / file) for name in BOTH))


# with torchrun on one machine: test_adapters_over_4_bit_weights_on_two_processes
@pytest.mark.ci
@pytest.mark.parametrize("launcher", ["two-machines", "accelerate"])
def test_commands_of_the_launchers(forks, tmp_path, launcher):
    assert gap_to_one_process(forks, tmp_path, launcher) < 5e-6


@pytest.mark.ci
@pytest.mark.parametrize("victim", [0, 1])
def test_one_line_after_a_killed_process_of_torchrun(tmp_path, victim):
    """torchrun sends SIGTERM to the other process at once, and prints a traceback."""
    inputs = proof.Inputs.make(tmp_path / "inputs")
    output = tmp_path / "run"
    (command,) = launcher_commands("torchrun")
    argv = [str(ROOT / "train_ppo.py"), *words("ppo", inputs, output), "--num-iterations", "5000"]
    with subprocess.Popen([sys.executable, "-m", *command, *argv], cwd=tmp_path, env=ENVIRONMENT, text=True,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as launcher:  # fmt: skip
        until = time.monotonic() + 120
        while not (output / "metrics.jsonl").exists() and launcher.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        ranks = {p.environ()["RANK"]: p for p in psutil.Process(launcher.pid).children()}
        ranks[str(victim)].kill()
        _, errors = launcher.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if "error: " in line and "ChildFailedError" not in line]
    assert len(lines) == 1 and "has ended" in lines[0], errors
    assert lines[0].startswith("error: " if victim else "process 1 of 2: error: ")
    assert launcher.returncode == 1 and RunRecord.read(output).status == ("failed" if victim else "running")


@pytest.mark.ci
def test_adapters_over_4_bit_weights_on_two_processes(forks, tmp_path):
    pytest.importorskip("bitsandbytes")
    assert gap_to_one_process(forks, tmp_path, "torchrun", "--use-lora", "--lora-r", "4", "--load-in-4bit") < 1e-5


def in_one_and_in_two(forks, folder: Path, command: list[str]) -> list[str]:
    """Run a command alone and with torchrun. Its last argument is the output. Return what both runs print."""
    alone, shared = ([*command, str(folder / name)] for name in BOTH)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    ended = [
        forks.run(alone, ROOT),
        subprocess.run([sys.executable, *torchrun, *shared], cwd=ROOT, capture_output=True, text=True, timeout=200,
                       env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}),
    ]  # fmt: skip
    assert [one.returncode for one in ended] == [0, 0], ended
    return [one.stdout for one in ended]


@pytest.mark.ci
def test_reward_model_of_two_processes_is_that_of_one(forks, tmp_path):
    inputs = proof.Inputs.make(tmp_path / "inputs")
    flags = ["--pairs", inputs.pairs, "--base-model", inputs.start, "--actor-model", "none", "--rm-epochs", 2,
             "--rm-batch-size", 7, "--split", "60/30/10", "--rm-learning-rate", "1e-4"]  # fmt: skip
    trained = in_one_and_in_two(forks, tmp_path, ["-m", "reward_model.train", *map(str, flags), "--rm-output"])
    assert [printed.count("reward model saved") for printed in trained] == [1, 1]
    plain, shared = (load_file(tmp_path / name / "model.safetensors") for name in BOTH)
    start = load_file(inputs.start / "model.safetensors")
    assert largest_gap(plain, shared, without={"score.weight"}) < 1e-6
    moved = [n for n in start if n in plain and not torch.equal(start[n], plain[n])]
    assert len(moved) > 10


PROGRAM = """
import sys
from rlhf.api import make_trainer
from rlhf.config import make_config

def vowels(completions, **_):
    return [sum(c in "aeiou" for c in str(text)) / 10 for text in completions]

config = make_config(algorithm="grpo", actor_model=sys.argv[1], batch_size=2, K=4, num_iterations=3,
                     max_new_tokens=8, learning_rate=1e-4, ppo_epochs=2)
trainer = make_trainer(config, [f"What is number {i}?" for i in range(30)], vowels)
trainer.train()
trainer.save_model(sys.argv[2])
"""


@pytest.mark.ci
def test_python_api_on_two_processes(forks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    start = proof.Inputs.make(tmp_path / "inputs").start
    in_one_and_in_two(forks, tmp_path, [str(program), str(start)])
    plain, shared = (load_file(tmp_path / name / "model.safetensors") for name in BOTH)
    assert largest_gap(plain, shared) < 1e-6


# in process 1, first the prompts and then an update fail
FAILING = """
import os, sys
second = os.environ["RANK"] == "1"
from rlhf.api import make_trainer
from rlhf.config import make_config
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.errors import UserError

def fail(self, update):
    raise UserError("the update failed")

if second:
    OnPolicyLoop.update_step = fail
config = make_config(actor_model=sys.argv[1], batch_size=2, num_iterations=1, max_new_tokens=4, ddp_timeout=60)
for prompts in ([" "] if second else ["a cat?"], ["a cat?", "a dog?"]):
    try:
        make_trainer(config, prompts, "word_penalty", progress=False).train()
    except UserError as error:
        print("raised:", error)
"""


@pytest.mark.ci
def test_an_error_in_one_process_is_raised_in_all_from_python(tmp_path):
    start = proof.Inputs.make(tmp_path / "inputs").start
    port = free_port()
    words = [sys.executable, "-c", FAILING, str(start)]
    both = [
        subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                         env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | launcher_variables(rank, 2, port))
        for rank in (0, 1)
    ]  # fmt: skip
    for process in both:
        printed, _ = process.communicate(timeout=50)  # less than the timeout of the connection
        assert process.returncode == 0 and printed.count("raised: ") == 2, printed
        assert "raised: prompt is empty: prompt 1" in printed and "raised: the update failed" in printed
